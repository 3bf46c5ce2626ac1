"""Evaluation on fixed masks: loss in nats, perplexity and masked accuracy, in all and by kind."""

import logging
from collections.abc import Mapping
from contextlib import closing

import equinox as eqx
import haliax as hax
import jax
import levanter.tracker
import numpy as np
from levanter.callbacks import Callback, ProgressEvent, StepInfo, progress_event_scope

from mlm_recipe.data.example import MaskKind, MlmExample
from mlm_recipe.loss import MaskedLmTotals, masked_lm_totals
from mlm_recipe.model.roberta import RobertaForMaskedLM
from mlm_recipe.recipe import Recipe
from mlm_recipe.scores import EvalResult

logger = logging.getLogger(__name__)


class Evaluator(Callback):
    """Scores every validation set; as a trainer hook, and on its own."""

    def __init__(self, recipe: Recipe, *, unigram_nats: float):
        self._recipe = recipe
        self._unigram_nats = unigram_nats
        self._last_step: int | None = None
        self.result: EvalResult | None = None
        self.seconds = 0.0
        mapping = recipe.trainer.compute_axis_mapping

        @eqx.filter_jit
        def totals(model: RobertaForMaskedLM, batch: MlmExample) -> MaskedLmTotals:
            with hax.axis_mapping(mapping):
                return masked_lm_totals(recipe.trainer.mp.cast_to_compute(model), batch)

        self._totals = totals

    def on_step(self, info: StepInfo, force: bool = False) -> None:
        # Levanter runs every hook once more after the last step.
        if not self._recipe.eval_sets or info.next_step == self._last_step:
            return
        started, finished = ProgressEvent.EVALUATION_STARTED, ProgressEvent.EVALUATION_FINISHED
        with (
            progress_event_scope(info.emit_event, started, finished),
            levanter.tracker.capture_time() as seconds,
        ):
            results = self.evaluate(info.eval_model)
        self._last_step = info.next_step
        self.seconds += seconds()
        self._report(results, info.step)

    def evaluate(self, model: RobertaForMaskedLM) -> dict[str, EvalResult]:
        """Results by set name; ``""`` is all sets together.

        Args:
            model: In inference mode.
        """
        totals = {name: self._sum(model, name) for name in self._recipe.eval_sets}
        results = {name: EvalResult.from_totals(t) for name, t in totals.items()}
        self.result = EvalResult.from_totals(sum(totals.values(), np.zeros((len(MaskKind), 3))))
        return {"": self.result, **results}

    def _sum(self, model: RobertaForMaskedLM, name: str) -> np.ndarray:
        limit = self._recipe.config.trainer.max_eval_batches
        loader = self._recipe.eval_loader(self._recipe.eval_sets[name])
        totals = np.zeros((len(MaskKind), 3))
        # Closed, because a loader thread left alive aborts the interpreter at exit.
        with closing(iter(loader)) as batches:
            for index, batch in enumerate(batches):
                if limit is not None and index >= limit:
                    break
                sums = jax.device_get(self._totals(model, batch))
                columns = (sums.nll, sums.correct, sums.count)
                totals += np.stack([column.array for column in columns], axis=-1)
        return totals

    def _report(self, results: Mapping[str, EvalResult], step: int) -> None:
        metrics = {"eval/unigram_nats": self._unigram_nats}
        for name, result in results.items():
            if name and len(results) == 2:
                continue  # the only set is the total
            prefix = f"eval/{name}/" if name else "eval/"
            metrics |= {prefix + key: value for key, value in result.metrics().items()}
        levanter.tracker.log(metrics, step=step)
        logger.info(
            "step %d: eval %s; unigram entropy %.4f nats", step + 1, results[""], self._unigram_nats
        )
