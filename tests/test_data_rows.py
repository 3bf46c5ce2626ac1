"""PackedRows: what a row holds, against the documents it came from."""

import json
from pathlib import Path

import numpy as np
import pytest
from levanter.store.cache import TreeCache
from levanter.utils.thread_utils import blocking_wait

from mlm_recipe.data.cache import build_or_load_cache
from mlm_recipe.data.documents import DocumentTokenizer
from mlm_recipe.data.packing import PackingConfig
from mlm_recipe.data.rows import PackedRows, Row, document_lengths
from mlm_recipe.data.sources import DocumentFiles
from mlm_recipe.data.tokenizer import TokenizerInfo

INFO = TokenizerInfo.load(str(Path(__file__).parents[1] / "corpus" / "austen" / "tokenizer"))
SEQ_LEN = 16


@pytest.fixture(scope="module")
def texts() -> list[str]:
    words = "the sea was calm and every bird upon it seemed to wait for the evening".split()
    sizes = np.random.default_rng(0).integers(1, 40, 120)
    return [" ".join(words[(i + j) % len(words)] for j in range(n)) for i, n in enumerate(sizes)]


@pytest.fixture(scope="module")
def cache(texts, tmp_path_factory) -> TreeCache[dict]:
    """Three files, so that the cache has several shards; one holds no text."""
    directory = tmp_path_factory.mktemp("rows")
    for name, part in (("a", texts[:50]), ("b", [""]), ("c", texts[50:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (directory / f"{name}.jsonl").write_text(lines)
    files = DocumentFiles.resolve([str(directory / "*.jsonl")], field="train_urls")
    target = str(directory / "cache")
    return build_or_load_cache(target, files, DocumentTokenizer(INFO), field="cache_dir")


def all_rows(rows: PackedRows) -> list[Row]:
    return list(blocking_wait(rows.get_batch(range(rows.plan.num_rows))))


def segments(row: Row) -> list[np.ndarray]:
    return [row.input_ids[row.segment_ids == s] for s in range(row.segment_ids.max() + 1)]


def test_segments_hold_every_document_between_special_tokens(cache, texts):
    rows = PackedRows(cache, SEQ_LEN, INFO)
    documents = [row["input_ids"] for row in DocumentTokenizer(INFO)([{"text": t} for t in texts])]
    np.testing.assert_array_equal(document_lengths(cache), [len(d) for d in documents])
    flat = np.concatenate(documents)
    rebuilt = np.full(len(flat), -1)
    start_of = iter(rows.plan.starts)
    for row in all_rows(rows):
        for segment in segments(row):
            assert segment[0] == INFO.bos_id and segment[-1] == INFO.eos_id
            start = next(start_of)
            rebuilt[start : start + len(segment) - 2] = segment[1:-1]
    np.testing.assert_array_equal(rebuilt, flat)


def test_padding_is_the_pad_token_and_comes_last(cache):
    rows = all_rows(PackedRows(cache, SEQ_LEN, INFO))
    assert any((row.segment_ids == -1).any() for row in rows)
    for row in rows:
        padding = row.segment_ids == -1
        assert (row.input_ids[padding] == INFO.pad_id).all()
        assert (row.position_ids[padding] == INFO.pad_id).all()
        assert (row.input_ids[~padding] != INFO.pad_id).all()
        used = row.segment_ids[~padding]
        assert (np.diff(padding.astype(int)) >= 0).all() and (np.diff(used) >= 0).all()
        assert used[0] == 0 and set(np.diff(used)) <= {0, 1}
        assert {array.dtype.name for array in row} == {"int32"}
        assert {array.shape for array in row} == {(SEQ_LEN,)}


def test_positions_restart_as_if_each_segment_came_alone(cache):
    for row in all_rows(PackedRows(cache, SEQ_LEN, INFO)):
        for s, segment in enumerate(segments(row)):
            # transformers: cumsum(ids != pad) * (ids != pad) + pad
            alone = np.cumsum(segment != INFO.pad_id) + INFO.pad_id
            np.testing.assert_array_equal(row.position_ids[row.segment_ids == s], alone)


def test_positions_can_run_on_through_the_row(cache):
    rows = PackedRows(cache, SEQ_LEN, INFO, PackingConfig(positions="continuous"))
    for row in all_rows(rows):
        used = row.segment_ids >= 0
        expected = np.arange(INFO.pad_id + 1, INFO.pad_id + 1 + used.sum())
        np.testing.assert_array_equal(row.position_ids[used], expected)


def test_any_order_of_indices_gives_the_same_rows(cache):
    rows = PackedRows(cache, SEQ_LEN, INFO)
    expected = all_rows(rows)
    assert blocking_wait(rows.async_len()) == len(expected)
    order = np.random.default_rng(1).permutation(len(expected)).tolist()
    for indices in (order, [7, 3, 3, 7], [len(expected) - 1], []):
        batch = blocking_wait(rows.get_batch(indices))
        for index, row in zip(indices, batch, strict=True):
            np.testing.assert_array_equal(np.stack(row), np.stack(expected[index]))


def test_one_cache_serves_every_length_and_segment_limit(cache):
    for seq_len, limit in ((8, 1), (64, 2), (512, 64)):
        rows = all_rows(PackedRows(cache, seq_len, INFO, PackingConfig(limit)))
        assert max(row.segment_ids.max() for row in rows) + 1 <= limit
        kept = sum(int((row.segment_ids >= 0).sum()) - 2 * len(segments(row)) for row in rows)
        assert kept == document_lengths(cache).sum()
