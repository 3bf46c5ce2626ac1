"""Where words start, read from a tokenizer's own description.

A word is a maximal run of letters, of digits, or of other symbols, with the space before it: what
GPT-2's pre-tokenizer splits text into, except that an apostrophe and what follows it are two
words unless they are one token. SentencePiece knows spaces only, so there a word is what stands
between spaces; in WordPiece it is a token and the ``##`` tokens after it.

Whole-word masking that looks for ``##`` in a byte-level vocabulary does something else without a
word (huggingface/transformers#9866, #11768). Hence a tokenizer that does not tell where words
start is refused. Where a single token leaves it open (part of a UTF-8 character), it is joined to
its neighbour: a word is never split, at worst two are taken as one.

Importable without jax.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from mlm_recipe.errors import ConfigError

_REPLACEMENT_CHARACTER = "\ufffd"
_METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Edge(IntEnum):
    """How the first or last character of a token meets its neighbour."""

    JOINS = 0  # one word with any neighbour that does not break
    BREAKS = 1  # a word boundary, whatever the neighbour
    LETTER = 2  # the others: one word with their like
    NUMBER = 3
    SYMBOL = 4
    SPACE = 5


class WordStarts(NamedTuple):
    """Two tables over the vocabulary from which word starts in a row of tokens follow.

    Token ``t`` after token ``s`` starts a word if ``first[t]`` or ``last[s]`` is ``BREAKS``, or if
    they differ and neither is ``JOINS``. Whatever follows padding, a special token or the end of a
    document starts a word regardless.
    """

    first: np.ndarray
    """``{vocab}`` int8: the ``Edge`` a token begins with."""
    last: np.ndarray
    """``{vocab}`` int8: the ``Edge`` a token ends with."""


Edges = tuple[Edge, Edge]


def word_start_table(tokenizer_json: Mapping[str, Any]) -> WordStarts:
    """Derives ``WordStarts`` from the content of a ``tokenizer.json``.

    Known are byte-level BPE (GPT-2, RoBERTa), WordPiece (BERT), word-level vocabularies, and BPE or
    Unigram whose spaces are written as the Metaspace marker (SentencePiece). Added tokens, special
    or not, are words of their own.

    Raises ``ConfigError`` naming ``masking.unit`` for any other tokenizer.
    """
    model = tokenizer_json["model"]
    edges_of = _edge_rule(tokenizer_json)
    vocab = model["vocab"]
    if not isinstance(vocab, Mapping):  # Unigram: [token, log probability] in the order of ids
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
    edges = {i: edges_of(token) for token, i in vocab.items()}
    for token in tokenizer_json.get("added_tokens") or ():
        edges[token["id"]] = (Edge.BREAKS, Edge.BREAKS)
    first = np.full(max(edges) + 1, Edge.BREAKS, dtype=np.int8)
    last = first.copy()
    for i, pair in edges.items():
        first[i], last[i] = pair
    return WordStarts(first, last)


def _edge_rule(tokenizer_json: Mapping[str, Any]) -> Callable[[str], Edges]:
    model = tokenizer_json["model"]
    parts = [
        *_components(tokenizer_json.get("normalizer")),
        *_components(tokenizer_json.get("pre_tokenizer")),
    ]
    kind = model.get("type")
    if kind == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        return lambda token: _prefix_edges(token, prefix)
    if kind == "WordLevel":
        return lambda token: (Edge.BREAKS, Edge.BREAKS)
    if kind == "BPE" and any(part["type"] == "ByteLevel" for part in parts):
        return lambda token: _text_edges(_byte_level_text(token), _category)
    if kind in ("BPE", "Unigram"):
        marker = _space_marker(parts)
        if marker is not None:
            byte_fallback = bool(model.get("byte_fallback"))
            return lambda token: _metaspace_edges(token, marker, byte_fallback)
    names = ", ".join(part["type"] for part in parts) or "none"
    raise ConfigError(
        "masking.unit",
        "whole_word",
        f"this tokenizer ({kind}; normalizer and pre-tokenizer: {names}) marks no word starts",
        "set masking.unit to token, or use a byte-level BPE, WordPiece or Metaspace tokenizer",
    )


def _components(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer, with those nested in a sequence."""
    if component is None:
        return
    yield component
    for nested in ("normalizers", "pretokenizers"):
        for part in component.get(nested, ()):
            yield from _components(part)


def _space_marker(parts: list[Mapping[str, Any]]) -> str | None:
    """The character that stands for a space in the vocabulary, if there is one."""
    for part in parts:
        if part["type"] == "Metaspace":
            return part.get("replacement", _METASPACE)
        if part["type"] == "Replace" and part.get("content") == _METASPACE:
            return _METASPACE
    return None


def _prefix_edges(token: str, prefix: str) -> Edges:
    return (Edge.JOINS if token.startswith(prefix) else Edge.BREAKS), Edge.JOINS


def _metaspace_edges(token: str, marker: str, byte_fallback: bool) -> Edges:
    byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
    if byte is None:
        text = token.replace(marker, " ")
    else:
        text = bytes([int(byte[1], 16)]).decode("utf-8", errors="replace")
    return _text_edges(text, _space_or_letter)


def _text_edges(text: str, category: Callable[[str], Edge]) -> Edges:
    if not text:
        return Edge.JOINS, Edge.JOINS
    first, last = category(text[0]), category(text[-1])
    if text[0] == " " or (first is Edge.SPACE and not text.isspace()):
        first = Edge.BREAKS
    if text[-1] == " ":  # belongs to the word after it, merged with it or not
        last = Edge.JOINS
    return first, last


def _category(character: str) -> Edge:
    if character == _REPLACEMENT_CHARACTER:
        return Edge.JOINS
    if character.isspace():
        return Edge.SPACE
    match unicodedata.category(character)[0]:
        case "L" | "M":  # a vowel sign of Devanagari is a mark, yet part of the word
            return Edge.LETTER
        case "N":
            return Edge.NUMBER
    return Edge.SYMBOL


def _space_or_letter(character: str) -> Edge:
    if character == _REPLACEMENT_CHARACTER:
        return Edge.JOINS
    return Edge.SPACE if character.isspace() else Edge.LETTER


def _byte_level_bytes() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted (openai/gpt-2, ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_bytes()


def _byte_level_text(token: str) -> str:
    """The token's text; what is not a whole UTF-8 character becomes U+FFFD."""
    return bytes(_BYTE_OF[c] for c in token if c in _BYTE_OF).decode("utf-8", errors="replace")
