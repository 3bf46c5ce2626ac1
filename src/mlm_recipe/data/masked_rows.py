"""Rows with masks that are a pure function of (key, global example index).

Masking sits at the outermost dataset level: below a mixture that restarts, indices wrap and every
epoch would see the same masks. Here they are new each epoch, and equal on any device count, batch
split or resume point, with no state to checkpoint.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray
from levanter.data.dataset import AsyncDataset
from levanter.utils.jax_utils import local_cpu_mesh

from mlm_recipe.data.example import MlmExample
from mlm_recipe.data.masking import MaskedTokens, mask_tokens
from mlm_recipe.data.masking_config import MaskingConfig, MaskingRates
from mlm_recipe.data.rows import Row
from mlm_recipe.data.tokenizer import TokenizerInfo
from mlm_recipe.data.word_starts import WordStarts

_CHUNK = 128
"""Rows masked in one call: a single size, because each takes seconds to compile."""

RatesAt = Callable[[np.ndarray], MaskingRates]
"""Global example indices ``{n}`` int64 to rates ``{n}`` float."""


class MaskedRows(AsyncDataset[MlmExample]):
    """Masks each row of ``rows`` with the key folded with its index.

    Args:
        rows: Packed rows of ``Pos.size`` tokens.
        Pos: The ``position`` axis.
        masking: What to select and how to replace it.
        tokenizer: Ids of ``<mask>``, the special tokens and the replacement vocabulary.
        key: The stream of these masks; one for training, a constant one for evaluation.
        rates_at: The rates at global example indices, for schedules over steps.
        word_starts: Where words start; for whole words and spans.
    """

    def __init__(
        self,
        rows: AsyncDataset[Row],
        Pos: Axis,
        masking: MaskingConfig,
        tokenizer: TokenizerInfo,
        *,
        key: PRNGKeyArray,
        rates_at: RatesAt,
        word_starts: WordStarts | None = None,
    ):
        self.rows = rows
        self.rates_at = rates_at
        self.Masked = Axis("masked", masking.num_masked_slots(Pos.size))
        self._Pos = Pos
        maskable = np.ones(tokenizer.vocab_size, dtype=bool)
        maskable[list(tokenizer.special_ids)] = False
        self._masking = masking
        self._mask_id = tokenizer.mask_id
        # Arguments, not constants of the program: so equal configurations share one compilation.
        self._tables = jax.device_get((key, maskable, tokenizer.random_ids, word_starts))

    async def async_len(self) -> int:
        return await self.rows.async_len()

    def is_finite(self) -> bool:
        return self.rows.is_finite()

    async def get_batch(self, indices: Sequence[int]) -> Sequence[MlmExample]:
        if not indices:
            return []
        rows = await self.rows.get_batch(indices)
        masked = self._mask(
            np.stack([row.input_ids for row in rows]),
            np.stack([row.segment_ids for row in rows]),
            np.asarray(indices, dtype=np.int64),
        )
        return [self._example(row, masked, i) for i, row in enumerate(rows)]

    def _mask(self, tokens: np.ndarray, segments: np.ndarray, indices: np.ndarray) -> MaskedTokens:
        rates = (np.asarray(rate, dtype=np.float32) for rate in self.rates_at(indices))
        high = (indices >> 32).astype(np.uint32)
        low = (indices & 0xFFFFFFFF).astype(np.uint32)
        inputs = (tokens, segments, high, low, MaskingRates(*rates))
        with local_cpu_mesh():
            chunks = [
                jax.device_get(
                    _mask_rows(
                        *jax.tree.map(partial(_chunk, start), inputs),
                        *self._tables,
                        Pos=self._Pos,
                        Masked=self.Masked,
                        masking=self._masking,
                        mask_id=self._mask_id,
                    )
                )
                for start in range(0, len(indices), _CHUNK)
            ]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *chunks)

    def _example(self, row: Row, masked: MaskedTokens, i: int) -> MlmExample:
        Pos, Masked = self._Pos, self.Masked

        def item(array: NamedArray, *axes: Axis) -> NamedArray:
            return named(np.asarray(array.array[i]), *axes)

        def named(array: Any, *axes: Axis) -> NamedArray:
            return NamedArray(array, axes)

        return MlmExample(
            input_ids=item(masked.input_ids, Pos),
            segment_ids=named(row.segment_ids, Pos),
            position_ids=named(row.position_ids, Pos),
            masked_positions=item(masked.masked_positions, Masked),
            masked_labels=item(masked.masked_labels, Masked),
            masked_weights=item(masked.masked_weights, Masked),
            masked_kinds=item(masked.masked_kinds, Masked),
            overflow=item(masked.overflow),
        )


def _chunk(start: int, array: np.ndarray) -> np.ndarray:
    part = array[start : start + _CHUNK]
    padding = [(0, _CHUNK - len(part))] + [(0, 0)] * (array.ndim - 1)
    return np.pad(part, padding, mode="edge")


@partial(jax.jit, static_argnames=("Pos", "Masked", "masking", "mask_id"))
def _mask_rows(
    tokens: jax.Array,
    segments: jax.Array,
    index_high: jax.Array,
    index_low: jax.Array,
    rates: MaskingRates,
    key: PRNGKeyArray,
    maskable_ids: jax.Array,
    random_ids: jax.Array,
    word_starts: WordStarts | None,
    *,
    Pos: Axis,
    Masked: Axis,
    masking: MaskingConfig,
    mask_id: int,
) -> MaskedTokens:
    """Mask ``{row, position}`` tokens; the result's arrays have a leading ``row`` dimension."""

    def mask_row(tokens, segments, index_high, index_low, rates) -> MaskedTokens:
        # Two folds, because fold_in takes 32 bits and long runs see more examples.
        row_key = jax.random.fold_in(jax.random.fold_in(key, index_high), index_low)
        return mask_tokens(
            hax.named(tokens, Pos),
            hax.named(maskable_ids[tokens] & (segments >= 0), Pos),
            masking,
            mask_id=mask_id,
            random_ids=hax.named(random_ids, "random"),
            key=row_key,
            segment_ids=hax.named(segments, Pos),
            rates=rates,
            word_starts=word_starts,
            Masked=Masked,
        )

    return jax.vmap(mask_row)(tokens, segments, index_high, index_low, rates)
