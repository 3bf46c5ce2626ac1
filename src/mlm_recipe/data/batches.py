"""An iterator of training batches that knows the global masked count and can be closed."""

import dataclasses
from collections.abc import Iterator

import haliax as hax
import jax
from levanter.data.loader import DataLoader

from mlm_recipe.data.example import MlmExample


class GlobalBatches(Iterator[MlmExample]):
    """Batches of a loader from one step on, each carrying ``masked_per_example``.

    Gradient accumulation averages microbatch means (levanter ``grad_accum.py``), which weights
    tokens unequally unless each microbatch divides by the count of the whole batch. Close it:
    a loader thread left alive aborts the interpreter at exit, after a finished run.
    """

    def __init__(self, loader: DataLoader[MlmExample], *, start_step: int = 0):
        self._batches = loader.iter_from_step(start_step)
        self._per_example = jax.jit(lambda weights: weights.sum() / weights.shape[0])

    def __next__(self) -> MlmExample:
        batch = next(self._batches)
        per_example = self._per_example(batch.masked_weights.array)
        return dataclasses.replace(batch, masked_per_example=hax.named(per_example, ()))

    def close(self) -> None:
        """Stop the loader's thread; further items raise StopIteration."""
        self._batches.close()
