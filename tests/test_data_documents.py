"""The documents format: a document's own tokens, all of them, and nothing else (C24)."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from levanter.tokenizers import load_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

from mlm_recipe.data.documents import (
    PIECE_CHARS,
    DocumentsFormat,
    DocumentTokenizer,
    batched_by_size,
    split_text,
)
from mlm_recipe.data.sources import DocumentFiles
from mlm_recipe.data.tokenizer import TokenizerInfo
from mlm_recipe.errors import ConfigError

AUSTEN = Path(__file__).parents[1] / "corpus" / "austen"
INFO = TokenizerInfo.load(str(AUSTEN / "tokenizer"))
PROCESS = DocumentTokenizer(INFO)
DECODE = Tokenizer.from_file(str(AUSTEN / "tokenizer" / "tokenizer.json")).decode


def tokens(text: str) -> np.ndarray:
    (row,) = PROCESS([{"text": text}])
    return row["input_ids"]


def test_every_chapter_decodes_to_itself():
    files = DocumentFiles([str(AUSTEN / "validation.jsonl.gz")])
    texts = [document["text"] for document in files]
    rows = PROCESS([{"text": text} for text in texts])
    assert len(rows) == 26
    for text, row in zip(texts, rows, strict=True):
        assert row["input_ids"].dtype == np.int32
        assert DECODE(row["input_ids"].tolist(), skip_special_tokens=False) == text
        assert not set(row["input_ids"].tolist()) & set(INFO.special_ids)


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200))
@example(" lone")
@example("trailing \n")
@example("</s><mask> <s><pad>")
def test_any_text_decodes_to_itself(text):
    ids = tokens(text)
    assert DECODE(ids.tolist(), skip_special_tokens=False) == text
    assert not set(ids.tolist()) & set(INFO.special_ids)


def test_a_long_document_has_the_tokens_of_the_undivided_text():
    files = DocumentFiles([str(AUSTEN / "validation.jsonl.gz")])
    text = "\n".join(document["text"] for document in files)
    assert len(list(split_text(text))) == 4
    whole = INFO.document_tokenizer().encode(text, add_special_tokens=False).ids
    np.testing.assert_array_equal(tokens(text), whole)


def test_a_long_document_has_the_tokens_of_the_undivided_text_in_wordpiece(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "sea", "##s", "##ide", "."]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(words[:5])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "the seaside. the seas\n" * (PIECE_CHARS // 10)
    (row,) = DocumentTokenizer(TokenizerInfo.load(str(tmp_path)))([{"text": text}])
    np.testing.assert_array_equal(row["input_ids"], tokenizer.encode(text).ids)


@pytest.mark.parametrize("character", ["x", "\u6d77", "\n"])
def test_text_without_spaces_is_cut_and_still_decodes_to_itself(character):
    text = character * (10 * PIECE_CHARS + 5)
    assert max(map(len, split_text(text))) <= 10 * PIECE_CHARS
    assert DECODE(tokens(text).tolist()) == text


@given(st.text(" ab\n", max_size=60), st.integers(1, 9))
def test_pieces_join_to_the_text_and_end_before_a_space_between_words(text, size):
    pieces = list(split_text(text, size))
    assert "".join(pieces) == text
    for left, right in itertools.pairwise(pieces):
        at_word = right[:1] == " " and not (left[-1:] + right[1:2]).isspace()
        assert left and right and (at_word or len(left) == 10 * size)


def test_documents_without_tokens_are_left_out():
    rows = PROCESS([{"text": ""}, {"text": "sea"}, {"text": ""}])
    assert [DECODE(row["input_ids"].tolist()) for row in rows] == ["sea"]
    assert PROCESS([{"text": ""}]) == [] == PROCESS([])


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 25))
def test_batches_hold_all_items_in_order_within_the_limit(items, limit):
    batches = list(batched_by_size(items, limit, size=lambda item: item))
    assert [item for batch in batches for item in batch] == items
    assert all(sum(batch) <= limit or len(batch) == 1 for batch in batches)


def test_levanter_builds_the_processor_from_its_own_tokenizer():
    format = DocumentsFormat(text_key="body")
    process = format.build_preprocessor(load_tokenizer(str(AUSTEN / "tokenizer")))
    (row,) = process([{"body": "the sea"}])
    assert DECODE(row["input_ids"].tolist()) == "the sea"
    assert format.token_data_key == "input_ids"


def test_metadata_names_what_the_tokens_depend_on():
    metadata = PROCESS.metadata
    assert metadata == json.loads(json.dumps(metadata))
    assert metadata["tokenizer"] == INFO.digest
    assert metadata != DocumentTokenizer(INFO, text_key="body").metadata


def test_an_unknown_text_unit_is_refused():
    with pytest.raises(ConfigError, match="file, paragraph, line"):
        DocumentsFormat(text_unit="sentence")  # pyright: ignore[reportArgumentType]  # on purpose
