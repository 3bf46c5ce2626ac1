"""Row planning: every token exactly once, rows within bounds, next to no padding."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_recipe.data.packing import POOL_TAILS, PackingConfig, RowPlan, plan_rows
from mlm_recipe.errors import ConfigError

CORPUS = Path(__file__).parents[1] / "corpus" / "austen"


def rows_of(plan: RowPlan) -> list[list[tuple[int, int]]]:
    """``(start, length)`` of each segment, by row."""
    pairs = list(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True))
    return [pairs[a:b] for a, b in zip(plan.row_offsets, plan.row_offsets[1:], strict=False)]


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 90), max_size=60),
    seq_len=st.integers(3, 40),
    max_segments=st.integers(1, 8),
)
def test_every_token_is_in_exactly_one_segment(lengths, seq_len, max_segments):
    plan = plan_rows(np.array(lengths, dtype=int), seq_len, max_segments_per_row=max_segments)
    covered = np.zeros(sum(lengths), dtype=int)
    ends = set(np.cumsum(lengths).tolist())
    for row in rows_of(plan):
        assert 1 <= len(row) <= max_segments
        assert sum(length + 2 for _, length in row) <= seq_len
        assert row == sorted(row)
        for start, length in row:
            assert length >= 1
            covered[start : start + length] += 1
            # A window stops early only where its document ends, and never crosses that end.
            assert length == seq_len - 2 or start + length in ends
            assert not any(start < end < start + length for end in ends)
    assert (covered == 1).all()
    assert plan.dropped_tokens == 0
    first_tokens = [row[0][0] for row in rows_of(plan)]
    assert first_tokens == sorted(first_tokens)


def test_a_full_window_takes_a_row_alone_and_tails_share():
    plan = plan_rows(np.array([14, 3, 2]), seq_len=12)
    assert rows_of(plan) == [[(0, 10)], [(10, 4), (14, 3)], [(17, 2)]]
    assert plan.fill == pytest.approx((12 + 11 + 4) / 36)


@pytest.mark.parametrize(
    "lengths, expected",
    [
        # Best fit: 3 joins 5 (exactly full) although the row of 4 came with more room.
        ([5, 4, 3], [[(0, 5), (9, 3)], [(5, 4)]]),
        ([], []),
        ([0, 0], []),
        ([10], [[(0, 10)]]),
        ([11], [[(0, 10)], [(10, 1)]]),
        ([1], [[(0, 1)]]),
    ],
)
def test_small_cases(lengths, expected):
    assert rows_of(plan_rows(np.array(lengths, dtype=int), seq_len=12)) == expected


def lognormal(n: int) -> np.ndarray:
    return np.random.default_rng(0).lognormal(5.5, 1.2, n).astype(int) + 1


def austen_like() -> np.ndarray:
    """Chapter lengths of the shipped corpus, in tokens at the measured 4.11 characters each."""
    with gzip.open(CORPUS / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        return np.array([int(len(json.loads(line)["text"]) / 4.11) for line in file])


@pytest.mark.parametrize("seq_len", [128, 512])
@pytest.mark.parametrize("lengths", [lognormal(20_000), austen_like()], ids=["skewed", "austen"])
def test_rows_are_at_least_99_percent_full(lengths, seq_len):
    assert plan_rows(lengths, seq_len).fill >= 0.99


def test_short_documents_fill_rows_to_the_best_possible():
    lengths = np.random.default_rng(1).integers(1, 60, 20_000)
    plan = plan_rows(lengths, 128)
    at_best = -(-(int(lengths.sum()) + 2 * len(lengths)) // 128)
    assert plan.num_rows <= 1.01 * at_best


def test_rows_of_tails_stay_within_one_pool_of_neighbours():
    lengths = np.full(3 * POOL_TAILS, 20)
    for row in rows_of(plan_rows(lengths, 128)):
        pools = {start // 20 // POOL_TAILS for start, _ in row}
        assert len(pools) == 1


def test_planning_is_deterministic():
    first, second = (plan_rows(lognormal(5_000), 128) for _ in range(2))
    np.testing.assert_array_equal(first.starts, second.starts)
    np.testing.assert_array_equal(first.row_offsets, second.row_offsets)


def test_dtypes_hold_large_corpora():
    plan = plan_rows(np.array([3_000_000_000]), 100_000)
    assert plan.starts.dtype == np.int64 and plan.lengths.dtype == np.int32
    assert plan.starts[-1] + plan.lengths[-1] == 3_000_000_000


def test_short_tails_are_dropped_and_counted_only_on_request():
    plan = plan_rows(np.array([12, 3, 10]), 12, min_window_tokens=4)
    assert rows_of(plan) == [[(0, 10)], [(15, 10)]]
    assert plan.dropped_tokens == 2 + 3


@pytest.mark.parametrize("seq_len", [0, 1, 2])
def test_no_room_for_a_token_is_refused(seq_len):
    with pytest.raises(ConfigError, match="no room"):
        plan_rows(np.array([5]), seq_len)


@pytest.mark.parametrize(
    "options, field",
    [
        ({"max_segments_per_row": 0}, "data.packing.max_segments_per_row"),
        ({"min_window_tokens": 0}, "data.packing.min_window_tokens"),
        ({"positions": "reset"}, "data.packing.positions"),
    ],
)
def test_impossible_packing_is_refused(options, field):
    with pytest.raises(ConfigError) as error:
        PackingConfig(**options)
    assert error.value.field == field
