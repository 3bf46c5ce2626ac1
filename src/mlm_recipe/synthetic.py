"""Synthetic batches: packed rows of random tokens, equal on any mesh and any machine."""

import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray

from mlm_recipe.data.example import MaskKind, MlmExample


def synthetic_batch(
    Batch: Axis, Pos: Axis, Masked: Axis, *, vocab_size: int, pad_token_id: int, seed: int = 0
) -> MlmExample:
    """A global batch on the host, as numpy arrays: two documents in each row, no padding.

    Args:
        Batch: the ``batch`` axis; Pos: ``position``; Masked: ``masked``.
        vocab_size: tokens are drawn from its upper end, where no special tokens are.
        pad_token_id: position ids start above it.
        seed: of the tokens.
    """
    draw = np.random.default_rng(seed)
    lowest = min(5, vocab_size - 1)
    ids = draw.integers(lowest, vocab_size, (Batch.size, Pos.size), dtype=np.int32)
    half = max(Pos.size // 2, 1)
    row = np.arange(Pos.size, dtype=np.int32)
    segments, places = row // half, row % half
    masked = np.sort(draw.permuted(np.tile(row, (Batch.size, 1)), axis=1)[:, : Masked.size], axis=1)

    def rows(value: np.ndarray, *axes: Axis) -> NamedArray:
        shape = (Batch.size, *(axis.size for axis in axes))
        array = np.ascontiguousarray(np.broadcast_to(value, shape))
        return hax.NamedArray(array, (Batch, *axes))  # pyright: ignore[reportArgumentType]

    return MlmExample(
        input_ids=rows(ids, Pos),
        segment_ids=rows(segments, Pos),
        position_ids=rows(places + np.int32(pad_token_id + 1), Pos),
        masked_positions=rows(masked, Masked),
        masked_labels=rows(np.take_along_axis(ids, masked, axis=1), Masked),
        masked_weights=rows(np.ones((), np.float32), Masked),
        masked_kinds=rows(np.full((), MaskKind.KEPT, np.int32), Masked),
        overflow=rows(np.zeros((), np.int32)),
        masked_per_example=NamedArray(np.float32(Masked.size), ()),  # pyright: ignore[reportArgumentType]
    )


def place(batch: MlmExample, shapes: MlmExample) -> MlmExample:
    """Put a host batch where ``shapes`` says, on attached devices."""
    return jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), batch, shapes)
