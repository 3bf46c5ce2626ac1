"""PackedRows: rows of ``<s> window </s>`` segments, read from a cache of document tokens.

The cache holds the documents' own tokens only; ``<s>``, ``</s>`` and ``<pad>`` are added here, so
one cache serves every sequence length.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from levanter.data.dataset import AsyncDataset
from levanter.store.cache import TreeCache

from mlm_recipe.data.packing import SEGMENT_OVERHEAD, PackingConfig, RowPlan, plan_rows
from mlm_recipe.data.tokenizer import TokenizerInfo

TOKENS_FIELD = "input_ids"
"""The cache field that holds document tokens."""

MERGE_GAP = 1024
"""Slices at most this many tokens apart are read at once: 4 KB more, one request fewer."""


class Row(NamedTuple):
    """One unmasked row. All arrays are ``{position}`` int32."""

    input_ids: np.ndarray
    """Tokens; the tokenizer's ``<pad>`` on padding."""
    segment_ids: np.ndarray
    """0, 1, ... for the segments of the row, -1 on padding."""
    position_ids: np.ndarray
    """Rows of the position table: from ``pad + 1``; ``pad`` on padding (Hugging Face RoBERTa)."""


class PackedRows(AsyncDataset[Row]):
    """The documents of one cache in rows of ``seq_len`` tokens."""

    plan: RowPlan

    def __init__(
        self,
        cache: TreeCache[dict],
        seq_len: int,
        tokenizer: TokenizerInfo,
        packing: PackingConfig | None = None,
    ):
        """Plan the rows; reads the document lengths, not the tokens."""
        packing = packing or PackingConfig()
        self._store: Any = cache.jagged_array_tree()[TOKENS_FIELD]
        self._tokenizer = tokenizer
        self._positions = packing.positions
        self.plan = plan_rows(
            document_lengths(cache),
            seq_len,
            max_segments_per_row=packing.max_segments_per_row,
            min_window_tokens=packing.min_window_tokens,
        )

    async def async_len(self) -> int:
        return self.plan.num_rows

    def is_finite(self) -> bool:
        return True

    async def get_batch(self, indices: Sequence[int]) -> list[Row]:
        """The rows at ``indices``; slices that lie close together are read as one."""
        plan = self.plan
        bounds = [(int(plan.row_offsets[i]), int(plan.row_offsets[i + 1])) for i in indices]
        segments = np.array([s for begin, end in bounds for s in range(begin, end)], dtype=np.int64)
        windows = iter(
            await _read_slices(self._store.data, plan.starts[segments], plan.lengths[segments])
        )
        return [self._row([next(windows) for _ in range(begin, end)]) for begin, end in bounds]

    def _row(self, windows: Sequence[np.ndarray]) -> Row:
        ids = self._tokenizer
        input_ids = np.full(self.plan.seq_len, ids.pad_id, dtype=np.int32)
        segment_ids = np.full(self.plan.seq_len, -1, dtype=np.int32)
        position_ids = np.full(self.plan.seq_len, ids.pad_id, dtype=np.int32)
        begin = 0
        for segment, window in enumerate(windows):
            end = begin + len(window) + SEGMENT_OVERHEAD
            input_ids[begin:end] = np.concatenate([[ids.bos_id], window, [ids.eos_id]])
            segment_ids[begin:end] = segment
            first = ids.pad_id + 1 + (begin if self._positions == "continuous" else 0)
            position_ids[begin:end] = np.arange(first, first + end - begin)
            begin = end
        return Row(input_ids, segment_ids, position_ids)


def document_lengths(cache: TreeCache[dict]) -> np.ndarray:
    """``{document}`` int64 tokens per document of ``cache``."""
    store: Any = cache.jagged_array_tree()[TOKENS_FIELD]
    offsets = np.array(store.offsets[0 : store.num_rows + 1].read().result(), dtype=np.int64)
    offsets[0] = 0  # the store keeps its row count there
    return np.diff(offsets)


async def _read_slices(
    tokens: Any, starts: np.ndarray, lengths: np.ndarray
) -> Sequence[np.ndarray]:
    """``tokens[start : start + length]`` for each pair, in few reads of the token store."""
    if len(starts) == 0:
        return []
    order = np.argsort(starts, kind="stable")
    begins = starts[order]
    ends = np.maximum.accumulate(begins + lengths[order])
    opens = np.concatenate([[True], begins[1:] > ends[:-1] + MERGE_GAP])
    span_begins = begins[opens]
    span_ends = ends[np.concatenate([opens[1:], [True]])]
    spans = await asyncio.gather(
        *(tokens[int(b) : int(e)].read() for b, e in zip(span_begins, span_ends, strict=True))
    )
    span_of = np.searchsorted(span_begins, starts, side="right") - 1
    offsets = starts - span_begins[span_of]
    return [
        spans[span][offset : offset + length]
        for span, offset, length in zip(span_of, offsets, lengths, strict=True)
    ]
