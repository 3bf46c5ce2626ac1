"""Word starts from a tokenizer: against its own pre-tokenizer, by table, and refusals."""

import json

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlm_recipe.data.word_starts import Edge, WordStarts, word_start_table
from mlm_recipe.errors import ConfigError

TEXT = [
    "It is a truth universally acknowledged, that a single man in possession of 20,000 pounds",
    "must be in want of a wife!  (However little known the feelings...)\nChapter 2\n",
    "\u201cMy dear Mr. Bennet,\u201d said his lady \u2014 caf\u00e9 na\u00efve",
    "\u4f60\u597d \U0001f600 and\t\ttabs or   three spaces , and x1y22z under_score\n\nend",
]
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def word_starts(table: WordStarts, ids: list[int]) -> list[bool]:
    """The documented rule, walked token by token."""
    starts, last = [], int(Edge.BREAKS)
    for token in ids:
        first = int(table.first[token])
        breaks = Edge.BREAKS in (first, last)
        starts.append(breaks or (first != last and Edge.JOINS not in (first, last)))
        last = int(table.last[token])
    return starts


def byte_level_bpe(vocab_size: int = 600) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def table_of(tokenizer: Tokenizer) -> WordStarts:
    return word_start_table(json.loads(tokenizer.to_str()))


def boundaries(tokenizer: Tokenizer, text: str) -> list[bool]:
    """Where the tokenizer's own pre-tokenizer began a piece."""
    words = tokenizer.encode(text, add_special_tokens=False).word_ids
    return [i == 0 or words[i] != words[i - 1] for i in range(len(words))]


@pytest.mark.parametrize("vocab_size", [262, 300, 600])
@pytest.mark.parametrize("text", [TEXT[0], TEXT[1], "a  b\tc\nd", "(1.5%), x", "ab12 34cd!?"])
def test_byte_level_words_are_the_pre_tokenizers(vocab_size, text):
    tokenizer = byte_level_bpe(vocab_size)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert word_starts(table_of(tokenizer), ids) == boundaries(tokenizer, text)


@pytest.mark.parametrize("vocab_size", [262, 300, 600])
def test_byte_level_words_are_joined_at_worst(vocab_size):
    tokenizer = byte_level_bpe(vocab_size)
    for text in TEXT:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        starts = word_starts(table_of(tokenizer), encoding.ids)
        pieces = zip(starts, boundaries(tokenizer, text), encoding.tokens, strict=True)
        for start, boundary, token in pieces:
            assert boundary or not start or token == "\u0120"  # inside a run of spaces
        assert sum(starts) >= len(text.split())


def edge(table: WordStarts, vocab: dict[str, int], token: str) -> tuple[Edge, Edge]:
    return Edge(table.first[vocab[token]]), Edge(table.last[vocab[token]])


@pytest.mark.parametrize(
    ("token", "first", "last"),
    [
        ("\u0120the", Edge.BREAKS, Edge.LETTER),
        ("the", Edge.LETTER, Edge.LETTER),
        ("\u0120", Edge.BREAKS, Edge.JOINS),  # the space before a word, left unmerged
        ("\u010a", Edge.SPACE, Edge.SPACE),  # newline
        (",", Edge.SYMBOL, Edge.SYMBOL),
        ("'t", Edge.SYMBOL, Edge.LETTER),
        ("2024", Edge.NUMBER, Edge.NUMBER),
        ("\u00c3\u00a9", Edge.LETTER, Edge.LETTER),  # e with acute, whole
        ("\u00c3", Edge.JOINS, Edge.JOINS),  # its first byte
        ("\u00a9", Edge.JOINS, Edge.JOINS),  # its second
        ("\u0120\u00e2\u0122", Edge.BREAKS, Edge.JOINS),  # space and half a quotation mark
        ("\u00e0\u00a4\u00be", Edge.LETTER, Edge.LETTER),  # Devanagari vowel sign, a mark
        ("<mask>", Edge.BREAKS, Edge.BREAKS),
        ("added", Edge.BREAKS, Edge.BREAKS),
    ],
)
def test_byte_level_edges(token, first, last):
    vocab = {"<mask>": 0, "the": 1, "\u0120the": 2, "\u0120": 3, "\u010a": 4, ",": 5, "'t": 6}
    vocab |= {"2024": 7, "\u00c3\u00a9": 8, "\u00c3": 9, "\u00a9": 10, "\u0120\u00e2\u0122": 11}
    vocab |= {"\u00e0\u00a4\u00be": 12}
    added = [{"id": 0, "content": "<mask>"}, {"id": 13, "content": "added"}]
    content = {
        "model": {"type": "BPE", "vocab": vocab},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]},
        "added_tokens": added,
    }
    table = word_start_table(content)
    assert table.first.dtype == table.last.dtype == np.int8
    assert table.first.shape == (14,)
    assert edge(table, vocab | {"added": 13}, token) == (first, last)


def test_wordpiece_words_begin_without_the_prefix():
    vocab = ["[PAD]", "[UNK]", "un", "##aff", "##able", ",", "day"]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ids = tokenizer.encode("unaffable, day").ids
    assert word_starts(table_of(tokenizer), ids) == [True, False, False, True, True]
    assert word_starts(table_of(tokenizer), ids) == boundaries(tokenizer, "unaffable, day")


@pytest.mark.parametrize("model", ["Unigram", "BPE"])
def test_metaspace_words_stand_between_spaces(model):
    if model == "Unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", show_progress=False)
        trainer.special_tokens = ["<unk>"]  # pyright: ignore[reportAttributeAccessIssue] - a setter
    else:
        tokenizer = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(TEXT[:1], trainer)
    encoding = tokenizer.encode(TEXT[0])
    starts = word_starts(table_of(tokenizer), encoding.ids)
    assert starts == boundaries(tokenizer, TEXT[0])
    assert sum(starts) == len(TEXT[0].split())


def test_byte_fallback_tokens_join_unless_they_are_spaces():
    vocab = {"\u2581a": 0, "b": 1, "<0xC3>": 2, "<0xA9>": 3, "<0x0A>": 4, "\u2581": 5}
    content = {
        "model": {"type": "BPE", "vocab": vocab, "byte_fallback": True},
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
    }
    table = word_start_table(content)
    assert word_starts(table, [0, 2, 3, 1]) == [True, False, False, False]
    assert word_starts(table, [0, 4, 1]) == [True, True, True]
    assert word_starts(table, [0, 5, 1]) == [True, True, False]


def test_word_level_tokens_are_words():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert word_starts(table_of(tokenizer), [0, 1, 1]) == [True] * 3


@pytest.mark.parametrize("model", ["BPE", "Unigram"])
def test_tokenizers_without_word_starts_are_refused(model):
    tokenizer = Tokenizer(
        models.BPE({"a": 0, "b": 1}, []) if model == "BPE" else models.Unigram([("a", -1.0)], 0)
    )
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    with pytest.raises(ConfigError) as error:
        table_of(tokenizer)
    assert error.value.field == "masking.unit"
    assert f"({model}; normalizer and pre-tokenizer: NFKC, Split)" in str(error.value)
    assert "set masking.unit to token" in error.value.fix
