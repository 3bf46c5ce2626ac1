"""The dataset format ``documents``: raw text to a document's own tokens, and nothing else.

No ``<s>``, no ``</s>``, no space before it: Levanter's text format appends `` </s>``, which leaves
a stray space token in front under byte-level BPE. Special tokens are added when rows are packed,
so a cache depends on the text and the tokenizer only, and ``decode(cache) == text``.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from levanter.data._preprocessor import BatchProcessor
from levanter.data.text.formats import LmDatasetFormatBase
from levanter.tokenizers import MarinTokenizer

from mlm_recipe.data.readers import TextUnit
from mlm_recipe.data.rows import TOKENS_FIELD
from mlm_recipe.data.tokenizer import TokenizerInfo
from mlm_recipe.errors import ConfigError

FORMAT_VERSION = 1
"""Raised whenever the same text and tokenizer would give other tokens: old caches are rebuilt."""

PIECE_CHARS = 100_000
"""Longer documents are tokenized in pieces of about this size. The tokenizer keeps some 150 bytes
for each token in flight, so a 100 MB document at once would need gigabytes."""

# A piece may end before a space between two words: there every pre-tokenizer in use (GPT-2's
# pattern, whitespace, Metaspace) starts anew, so the tokens are those of the undivided text.
_WORD_BOUNDARY = re.compile(r"(?<=\S) (?=\S)")
BATCH_CHARS = 1_000_000
"""Characters tokenized in one call, spread over the cores."""


@LmDatasetFormatBase.register_subclass("documents")
@dataclass(frozen=True)
class DocumentsFormat(LmDatasetFormatBase):
    """Raw documents, tokenized whole."""

    text_key: str = "text"
    """The field of a json object or parquet row that holds the text."""
    text_unit: TextUnit = "file"
    """What one document is in a .txt file: ``file``, ``paragraph`` (blank lines between) or
    ``line``."""
    skip_corrupt: bool = False
    """Leave out documents that cannot be read, with a warning that counts them, instead of
    stopping at the first."""

    def __post_init__(self):
        if self.text_unit not in get_args(TextUnit):
            units = ", ".join(get_args(TextUnit))
            raise ConfigError("format.text_unit", self.text_unit, "no such unit", f"use {units}")

    def build_preprocessor(
        self, tokenizer: MarinTokenizer, *, enforce_eos: bool = True, enforce_bos: bool = True
    ) -> "DocumentTokenizer":
        """The processor for ``tokenizer``. Enforcing is for causal text: rows add both tokens."""
        del enforce_eos, enforce_bos
        return DocumentTokenizer(TokenizerInfo.load(tokenizer.name_or_path), self.text_key)


class DocumentTokenizer(BatchProcessor[dict, dict]):
    """``{text_key: str}`` -> ``{"input_ids": {token} int32}``, without documents of no tokens."""

    def __init__(self, tokenizer: TokenizerInfo, text_key: str = "text"):
        self.text_key = text_key
        self._digest = tokenizer.digest
        self._tokenizer = tokenizer.document_tokenizer()

    def __call__(self, batch: Sequence[dict]) -> list[dict]:
        tokens: list[list[np.ndarray]] = [[] for _ in batch]
        pieces = ((i, p) for i, doc in enumerate(batch) for p in split_text(doc[self.text_key]))
        for group in batched_by_size(pieces, BATCH_CHARS, size=lambda piece: len(piece[1])):
            encodings = self._tokenizer.encode_batch_fast(
                [piece for _, piece in group], add_special_tokens=False
            )
            for (i, _), encoding in zip(group, encodings, strict=True):
                tokens[i].append(np.array(encoding.ids, dtype=np.int32))
        documents = [np.concatenate(parts) for parts in tokens]
        return [{TOKENS_FIELD: ids} for ids in documents if len(ids)]

    @property
    def output_exemplar(self) -> dict:
        return {TOKENS_FIELD: np.zeros((0,), dtype=np.int32)}

    @property
    def num_cpus(self) -> int:
        return 1

    @property
    def metadata(self) -> dict[str, Any]:
        """What the tokens depend on; a cache with other metadata is never used."""
        return {
            "format": "documents",
            "version": FORMAT_VERSION,
            "tokenizer": self._digest,
            "text_key": self.text_key,
        }


def split_text(text: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """Pieces that join to ``text``, ending before a space between words where there is one.

    A run without such a space, ten pieces long, is cut inside: for text that separates no words
    with spaces, one token at each cut may differ.
    """
    begin, end = 0, -1
    while end < len(text):
        end = min(begin + 10 * piece_chars, len(text))
        if len(text) - begin <= piece_chars:
            end = len(text)
        elif boundary := _WORD_BOUNDARY.search(text, begin + piece_chars, end):
            end = boundary.start()
        yield text[begin:end]
        begin = end


def batched_by_size[T](
    items: Iterable[T], limit: int, *, size: Callable[[T], int]
) -> Iterator[list[T]]:
    """Consecutive ``items`` in lists of total size up to ``limit``; a larger item goes alone."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + size(item) > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch
