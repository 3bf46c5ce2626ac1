"""Packing: which pieces of which documents share a row. Pure numpy; knows no files and no jax.

A document is cut into windows of at most ``seq_len - 2`` tokens, each of which becomes a segment
``<s> window </s>``. Only a document's tail can be shorter; a full window takes a row alone, and
tails share rows. The one invariant: every token of every document is in exactly one segment.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from mlm_recipe.errors import ConfigError

SEGMENT_OVERHEAD = 2
"""Tokens that ``<s>`` and ``</s>`` add to a segment."""

POOL_TAILS = 8192
"""Tails are packed among their neighbours in the corpus, this many at a time, so that a row's
tokens lie close together on disk and one read-ahead chunk serves many rows."""


Positions = Literal["restart", "continuous"]
"""How positions run in a row of several segments. ``restart``: each segment starts at ``pad + 1``,
which is what a model sees when a document comes alone. ``continuous``: they run on through the
row, as in fairseq's packed blocks."""


@dataclass(frozen=True)
class PackingConfig:
    """How documents share rows. Attention never crosses a segment."""

    max_segments_per_row: int = 64
    """Most segments in one row; 1 gives each window a row of its own."""
    positions: Positions = "restart"
    """``restart`` at each segment, or ``continuous`` through the row."""
    min_window_tokens: int = 1
    """Tails with fewer tokens are left out, and counted; 1 keeps everything."""

    def __post_init__(self):
        if self.positions not in get_args(Positions):
            raise ConfigError(
                "data.packing.positions",
                self.positions,
                "no such way of counting",
                f"use one of: {', '.join(get_args(Positions))}",
            )
        for name in ("max_segments_per_row", "min_window_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"data.packing.{name}", getattr(self, name), "it must be at least 1", "raise it"
                )


@dataclass(frozen=True, eq=False)
class RowPlan:
    """Rows as slices of one flat token array: 12 bytes a segment and 8 a row."""

    seq_len: int
    starts: np.ndarray
    """``{segment}`` int64, where the segment's window starts in the flat token array."""
    lengths: np.ndarray
    """``{segment}`` int32, tokens in the window, ``<s>`` and ``</s>`` not counted."""
    row_offsets: np.ndarray
    """``{row + 1}`` int64; row ``i`` owns the segments ``row_offsets[i]:row_offsets[i + 1]``."""
    dropped_tokens: int
    """Tokens in tails shorter than ``min_window_tokens``."""

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def num_segments(self) -> int:
        return len(self.starts)

    @property
    def fill(self) -> float:
        """Share of all positions that is not padding; ``<s>`` and ``</s>`` count as filled."""
        used = int(self.lengths.sum()) + SEGMENT_OVERHEAD * self.num_segments
        return used / max(self.num_rows * self.seq_len, 1)


def plan_rows(
    document_lengths: np.ndarray,
    seq_len: int,
    *,
    max_segments_per_row: int = 64,
    min_window_tokens: int = 1,
) -> RowPlan:
    """Lay documents out in rows of ``seq_len``, deterministically and almost without padding.

    Args:
        document_lengths: ``{document}`` tokens per document, in the order of the token array.
        seq_len: Positions per row, special tokens included.
        max_segments_per_row: Most segments in a row.
        min_window_tokens: Shorter tails are dropped.

    Returns:
        Rows ordered by where their first token lies in the token array.

    Raises:
        ConfigError: ``seq_len`` has no room for a token between ``<s>`` and ``</s>``.
    """
    window = seq_len - SEGMENT_OVERHEAD
    if window < 1:
        raise ConfigError(
            "seq_len", seq_len, "<s> and </s> leave no room for a token", "use at least 3"
        )
    starts, lengths = _cut_windows(np.asarray(document_lengths, dtype=np.int64), window)
    keep = lengths >= min(min_window_tokens, window)
    dropped = int(lengths[~keep].sum())
    starts, lengths = starts[keep], lengths[keep]

    row_of = np.empty(len(lengths), dtype=np.int64)
    full = lengths == window
    row_of[full] = np.arange(full.sum())
    num_rows = int(full.sum())
    tails = np.flatnonzero(~full)
    for first in range(0, len(tails), POOL_TAILS):
        pool = tails[first : first + POOL_TAILS]
        rows = _best_fit_decreasing(lengths[pool], seq_len, max_segments_per_row)
        row_of[pool] = rows + num_rows
        num_rows += int(rows.max()) + 1

    return _gather_rows(starts, lengths, row_of, num_rows, seq_len, dropped)


def _cut_windows(document_lengths: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts (int64) and lengths (int32) of all windows, in token order; empty documents have none.

    Whole windows come first and the tail last, so all windows but a document's last are full.
    """
    counts = -(-document_lengths // window)
    document_starts = np.cumsum(document_lengths) - document_lengths
    first_window = np.cumsum(counts) - counts
    index_in_document = np.arange(counts.sum()) - np.repeat(first_window, counts)
    starts = np.repeat(document_starts, counts) + index_in_document * window
    ends = np.repeat(document_starts + document_lengths, counts)
    return starts, np.minimum(ends - starts, window).astype(np.int32)


def _best_fit_decreasing(lengths: np.ndarray, seq_len: int, max_segments: int) -> np.ndarray:
    """Row number for each window: longest first, each into the fullest row that still has room.

    Bit ``r`` of ``room`` is set while some row has exactly ``r`` positions left, so the best fit
    is the lowest set bit at or above the need: one shift instead of a search.
    """
    row_of = np.empty(len(lengths), dtype=np.int64)
    open_rows: list[list[int]] = [[] for _ in range(seq_len + 1)]
    segments: list[int] = []
    room = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        need = int(lengths[item]) + SEGMENT_OVERHEAD
        fitting = room >> need
        if fitting:
            left = need + (fitting & -fitting).bit_length() - 1
            row = open_rows[left].pop()
            if not open_rows[left]:
                room &= ~(1 << left)
        else:
            left, row = seq_len, len(segments)
            segments.append(0)
        row_of[item] = row
        segments[row] += 1
        left -= need
        if left > SEGMENT_OVERHEAD and segments[row] < max_segments:
            open_rows[left].append(row)
            room |= 1 << left
    return row_of


def _gather_rows(
    starts: np.ndarray,
    lengths: np.ndarray,
    row_of: np.ndarray,
    num_rows: int,
    seq_len: int,
    dropped: int,
) -> RowPlan:
    """Order rows by their first token, and segments within a row by theirs."""
    # Windows come in token order, so a row's first window is its earliest.
    _, first_window = np.unique(row_of, return_index=True)
    rank = np.empty(num_rows, dtype=np.int64)
    rank[np.argsort(first_window, kind="stable")] = np.arange(num_rows)
    row_of = rank[row_of]
    order = np.argsort(row_of, kind="stable")
    row_offsets = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=num_rows), out=row_offsets[1:])
    return RowPlan(seq_len, starts[order], lengths[order], row_offsets, dropped)
