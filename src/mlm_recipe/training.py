"""One run from its configuration to its last step."""

import dataclasses
import logging
from contextlib import closing
from typing import Any, cast

import levanter.tracker
import levanter.trainer
from levanter.callbacks import StepInfo, log_performance_stats
from levanter.trainer_state import TrainerState

from mlm_recipe.config import TrainMlmConfig
from mlm_recipe.data.audit import MaskingAudit, audit_masks, check_audit
from mlm_recipe.data.batches import GlobalBatches
from mlm_recipe.errors import ConfigError
from mlm_recipe.evaluate import Evaluator
from mlm_recipe.preflight.compiles import CompileCounts
from mlm_recipe.progress import RunMeter, show_throughput
from mlm_recipe.provenance import devices
from mlm_recipe.recipe import Recipe, build
from mlm_recipe.summary import RunSummary
from mlm_recipe.track_preflight import track_preflight
from mlm_recipe.unigram import unigram_entropy

logger = logging.getLogger(__name__)

# They log each file of a cache and each phase of a checkpoint.
_CHATTY = (
    "jax.experimental.array_serialization.serialization",
    "levanter.store.cache",
    "levanter.tensorstore_serialization",
    "fray.device_flops",
)

# What jax calls Levanter's train step, with or without jit hooks.
_TRAIN_STEP = "_train_step"

# Rows audited of one batch: more would tell nothing new and cost time.
_MOST_AUDITED = 512


class DataExhaustedError(RuntimeError):
    """The training data ended before the last step."""


def train(config: TrainMlmConfig, summary: RunSummary) -> None:
    """Run to the last step, filling ``summary`` on the way.

    Raises:
        ConfigError: input that only the devices or the data could show to be wrong.
        MaskingAuditError: the masks violate an invariant.
        DataExhaustedError: the data ended early.
        RuntimeError: the loss became NaN or infinite.
    """
    counts = CompileCounts()
    with summary.phase("initialize"):
        _initialize(config)
    summary.device = devices()
    summary.variant = track_preflight()
    recipe = build(config)
    with recipe.trainer:
        with summary.phase("data"):
            summary.unigram_nats = unigram_entropy(recipe.data.build_caches("train"))
            _ = recipe.train_set
            if not recipe.eval_sets:
                logger.warning(
                    "no component has validation documents: nothing will be evaluated; give "
                    "source.validation_urls or data.num_validation_sequences"
                )
        with summary.phase("audit"):
            summary.masking_audit = _audit(recipe)
        with summary.phase("state"):
            state = recipe.initial_state()
        summary.resumed_from_step = int(state.step) or None
        summary.num_parameters = recipe.num_parameters
        levanter.tracker.log_summary(_facts(summary))
        with closing(recipe.train_batches(int(state.step))) as batches:
            try:
                info = _train_steps(recipe, state, batches, summary)
            finally:
                summary.train_step_compiles = counts.compiled[_TRAIN_STEP]
                summary.train_step_cache_hits = counts.cached[_TRAIN_STEP]
    if info.next_step < config.trainer.num_train_steps:
        raise DataExhaustedError(
            f"the training data ended at step {info.next_step} of "
            f"{config.trainer.num_train_steps}; add data, lower trainer.num_train_steps, or set "
            "data.stop_strategy to restart"
        )


def _initialize(config: TrainMlmConfig) -> None:
    """Devices, logging, trackers.

    Levanter reports wrong devices and batches as bare errors after its own logging has begun.
    """
    trainer = config.trainer
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        levanter.trainer.initialize(cast(Any, config))  # it reads config.trainer, and logs all
    except RuntimeError as error:
        if "No accelerator found" not in str(error):
            raise
        raise ConfigError(
            "trainer.require_accelerator",
            trainer.require_accelerator,
            "jax found no GPU or TPU, only the CPU",
            "set it to false to train on the CPU, or install the gpu or tpu extra",
        ) from error
    except ValueError as error:
        if "divisible" not in str(error):
            raise
        raise ConfigError(
            "trainer.train_batch_size",
            trainer.train_batch_size,
            str(error),
            f"use a multiple of the {trainer.data_axis_size} devices that share the batch",
        ) from error


def _train_steps(
    recipe: Recipe, state: TrainerState, batches: GlobalBatches, summary: RunSummary
) -> StepInfo:
    trainer, schedule = recipe.trainer, recipe.config.trainer.batch_schedule
    assert summary.unigram_nats is not None
    evaluator = Evaluator(recipe, unigram_nats=summary.unigram_nats)
    meter = RunMeter(batches, summary, schedule, tokens_per_example=recipe.Pos.size)
    flops = recipe.train_flops_per_example
    trainer.add_hook(log_performance_stats(recipe.Pos.size, schedule, flops))
    trainer.add_hook(meter)
    show_throughput(trainer, tokens_per_example=recipe.Pos.size, flops_per_example=flops)
    trainer.add_hook(evaluator, every=recipe.config.trainer.steps_per_eval)
    with summary.phase("train"):
        info = trainer.train(state, batches)
    summary.seconds["eval"] = round(evaluator.seconds, 3)
    if evaluator.result is not None:
        summary.record_eval(evaluator.result)
    return info


def _audit(recipe: Recipe) -> dict[str, Any]:
    """Audit the masks of the first batches, log the figures, refuse a violation."""
    steps = min(recipe.config.audit_batches, recipe.config.trainer.num_train_steps)
    if steps == 0:
        return {}
    tokenizer = recipe.tokenizer
    audit = audit_masks(
        (recipe.host_batch(step, limit=_MOST_AUDITED) for step in range(steps)),
        recipe.config.masking,
        special_ids=tokenizer.special_ids,
        mask_id=tokenizer.mask_id,
        pad_id=tokenizer.pad_id,
        random_ids=tokenizer.random_ids,
    )
    logger.info(
        "masking audit of %d rows: %.2f %% masked, %.1f / %.1f / %.1f %% mask / random / kept, "
        "%.2f %% padding",
        audit.examples,
        *(100 * share for share in _shares(audit)),
    )
    check_audit(audit, recipe.config.masking)
    return dataclasses.asdict(audit)


def _shares(audit: MaskingAudit) -> tuple[float, ...]:
    kinds = (audit.mask_share, audit.random_share, audit.kept_share)
    return (audit.masked_rate, *kinds, audit.padding_share)


def _facts(summary: RunSummary) -> dict[str, Any]:
    """What a tracker should know of the run besides its metrics and configuration."""
    return {
        "run/git_commit": summary.git_commit,
        "run/num_parameters": summary.num_parameters,
        "run/resumed_from_step": summary.resumed_from_step,
        "run/unigram_nats": summary.unigram_nats,
        "run/variant": summary.variant,
        **{f"run/{key}": value for key, value in summary.device.items()},
        **{f"versions/{key}": value for key, value in summary.versions.items()},
        **{f"masking_audit/{key}": value for key, value in summary.masking_audit.items()},
    }
