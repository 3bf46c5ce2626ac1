"""While it trains: a bar with loss, tokens/s, FLOP/s or MFU and time left, and the figures kept."""

import inspect
import logging
from typing import cast

import jax
import levanter.tracker
from levanter.callbacks import Callback, LambdaCallback, StepInfo
from levanter.callbacks._metrics import aggregate_device_flops, compute_instant_throughput
from levanter.schedule import BatchSchedule
from levanter.trainer import Trainer

from mlm_recipe.data.batches import BatchCounts, GlobalBatches
from mlm_recipe.summary import RunSummary

logger = logging.getLogger(__name__)


def show_throughput(trainer: Trainer, *, tokens_per_example: int, flops_per_example: float) -> None:
    """Let Levanter's progress bar, which shows the loss alone, show tokens/s and FLOP/s or MFU.

    Args:
        trainer: With its default hooks.
        tokens_per_example: Positions of a row.
        flops_per_example: Forward and backward, for the work actually done.
    """
    hook = next(hook for hook in trainer.hooks.hooks if _is_progress_bar(hook.fn))
    trainer.hooks.hooks.remove(hook)
    # The bar exists from the trainer's start, and a second one would stand beside it.
    bar = inspect.getclosurevars(cast(LambdaCallback, hook.fn).fn).nonlocals["pbar"]
    peak = aggregate_device_flops() if jax.default_backend() != "cpu" else None

    def update(info: StepInfo) -> None:
        batch = trainer.config.batch_schedule.batch_size_at_step(info.step)
        speed = compute_instant_throughput(
            batch, info.step_duration, tokens_per_example, flops_per_example, peak
        )
        shown = {"loss": f"{info.loss:.3f}", "tok/s": f"{speed.tokens_per_second or 0:,.0f}"}
        if speed.mfu is not None:
            shown["mfu"] = f"{speed.mfu:.1f}%"
        else:
            shown["GFLOP/s"] = f"{(speed.model_flops_per_second or 0) / 1e9:,.1f}"
        bar.set_postfix(shown, refresh=False)
        bar.update(info.next_step - bar.n)

    trainer.add_hook(update)


def _is_progress_bar(callback: object) -> bool:
    return isinstance(callback, LambdaCallback) and "pbar_logger" in callback.fn.__qualname__


class RunMeter(Callback):
    """Keeps the summary's step, loss and throughput, and logs tokens seen and useful tokens/s."""

    def __init__(
        self,
        batches: GlobalBatches,
        summary: RunSummary,
        schedule: BatchSchedule,
        *,
        tokens_per_example: int,
    ):
        self._batches = batches
        self._summary = summary
        self._schedule = schedule
        self._tokens_per_example = tokens_per_example
        self._positions = 0
        self._useful = 0
        # Of the steps after the first, which compiles.
        self._timed_useful = 0
        self._timed_seconds = 0.0

    def on_step(self, info: StepInfo, force: bool = False) -> None:
        summary = self._summary
        summary.final_step = info.next_step
        examples = self._schedule.global_data_offset_by_step(info.next_step)
        summary.tokens_seen = examples * self._tokens_per_example
        if force or info.step_duration == 0.0:
            return  # Levanter's repeat of the last step, or a run that was already complete
        summary.train_loss = info.loss
        counts = self._batches.last_counts
        self._add(info, counts)
        metrics = {
            "train/tokens_seen": summary.tokens_seen,
            "train/mask_overflow": counts.overflow,
            "throughput/useful_tokens_per_second": counts.useful_tokens / info.step_duration,
            "throughput/useful_token_share": summary.useful_token_share,
        }
        levanter.tracker.log(metrics, step=info.step)

    def _add(self, info: StepInfo, counts: BatchCounts) -> None:
        if self._positions == 0:
            self._summary.seconds["first_step"] = round(info.step_duration, 3)
        else:
            self._timed_useful += counts.useful_tokens
            self._timed_seconds += info.step_duration
            speed = self._timed_useful / self._timed_seconds
            self._summary.useful_tokens_per_second = round(speed, 1)
        batch = self._schedule.batch_size_at_step(info.step)
        self._positions += batch * self._tokens_per_example
        self._useful += counts.useful_tokens
        self._summary.useful_token_share = round(self._useful / self._positions, 4)
        if counts.overflow and not self._summary.mask_overflow:
            logger.warning(
                "step %d: %d tokens selected for masking found no slot and were left alone; raise "
                "masking.max_masked (counted as mask_overflow)",
                info.next_step,
                counts.overflow,
            )
        self._summary.mask_overflow += counts.overflow
