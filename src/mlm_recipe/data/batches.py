"""An iterator of training batches that knows the global masked count and can be closed."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from levanter.data.loader import DataLoader

from mlm_recipe.data.example import MlmExample


class BatchCounts(NamedTuple):
    """What a batch holds."""

    useful_tokens: int
    """Tokens that are not padding."""
    overflow: int
    """Tokens selected for masking that found no slot."""


class GlobalBatches(Iterator[MlmExample]):
    """Batches of a loader from one step on, each carrying ``masked_per_example``.

    Gradient accumulation averages microbatch means (levanter ``grad_accum.py``), which weights
    tokens unequally unless each microbatch divides by the count of the whole batch. Close it:
    a loader thread left alive aborts the interpreter at exit, after a finished run.
    """

    def __init__(self, loader: DataLoader[MlmExample], *, start_step: int = 0):
        self._batches = loader.iter_from_step(start_step)
        self._count = jax.jit(_count)
        self._last: tuple[jax.Array, ...] = ()

    def __next__(self) -> MlmExample:
        batch = next(self._batches)
        assert batch.overflow is not None
        per_example, *counts = self._count(
            batch.masked_weights.array, batch.segment_ids.array, batch.overflow.array
        )
        self._last = tuple(counts)
        return dataclasses.replace(batch, masked_per_example=hax.named(per_example, ()))

    @property
    def last_counts(self) -> BatchCounts:
        """Of the batch handed out last, over all processes."""
        return BatchCounts(*(int(n) for n in self._last)) if self._last else BatchCounts(0, 0)

    def close(self) -> None:
        """Stop the loader's thread; further items raise StopIteration."""
        self._batches.close()


def _count(weights: jax.Array, segments: jax.Array, overflow: jax.Array) -> tuple[jax.Array, ...]:
    return weights.sum() / weights.shape[0], jnp.sum(segments >= 0), overflow.sum()
