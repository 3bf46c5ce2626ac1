"""TokenizerInfo: what pretraining needs to know about a tokenizer, read from its two JSON files.

Imports neither jax, Levanter nor transformers, so the launcher can refuse a tokenizer without a
``<mask>`` before anything else starts. Hub ids are downloaded on first use, with huggingface_hub.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mlm_recipe.errors import ConfigError

# Special tokens by role: the names in tokenizer_config.json, then the texts that RoBERTa and BERT
# use. roberta-base leaves its roles to the Python class, so its file alone does not name them.
_ROLES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "bos": (("cls_token", "bos_token"), ("<s>", "[CLS]")),
    "eos": (("sep_token", "eos_token"), ("</s>", "[SEP]")),
    "pad": (("pad_token",), ("<pad>", "[PAD]")),
    "mask": (("mask_token",), ("<mask>", "[MASK]")),
    "unk": (("unk_token",), ("<unk>", "[UNK]")),
}
_REQUIRED = ("bos", "eos", "pad", "mask")
_HUB_PATTERNS = ["tokenizer*.json", "special_tokens_map.json", "vocab*", "merges.txt"]


@dataclass(frozen=True)
class TokenizerInfo:
    """Ids and identity of a tokenizer."""

    name: str
    """As configured: a directory or a Hugging Face id."""
    directory: Path
    """Where ``tokenizer.json`` lies."""
    digest: str
    """sha256 (hex) of ``tokenizer.json`` and of the special ids below: what a cache depends on."""
    vocab_size: int
    """Largest id + 1, added tokens included: the least vocabulary a model must have."""
    bos_id: int
    """Starts every segment: ``<s>``, or ``[CLS]`` for a BERT tokenizer."""
    eos_id: int
    """Ends every segment: ``</s>``, or ``[SEP]``."""
    pad_id: int
    mask_id: int
    unk_id: int | None
    special_ids: tuple[int, ...]
    """Ascending; never masked and never drawn as a replacement."""
    random_ids: np.ndarray = dataclasses.field(repr=False, compare=False)
    """``{random}`` int32, ascending: every id that names a token and is not special. Added
    non-special tokens belong to it; holes in the id range do not."""

    @classmethod
    def load(cls, name: str, *, field: str = "data.tokenizer") -> "TokenizerInfo":
        """Read the tokenizer ``name``, a local directory or else a Hugging Face id.

        Raises:
            ConfigError: nothing is found there, the files cannot be read, or the tokenizer lacks
                a mask, padding, start or end token. ``field`` is the config key it names.
        """
        directory = find_tokenizer(name, field=field)
        tokenizer = _read_tokenizer(name, directory, field)
        ids = _role_ids(name, tokenizer, _read_named_tokens(directory), field)
        specials = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        specials |= {i for i in ids.values() if i is not None}
        known = set(tokenizer.get_vocab(with_added_tokens=True).values())
        content = (directory / "tokenizer.json").read_bytes()
        return cls(
            name=name,
            directory=directory,
            digest=hashlib.sha256(content + json.dumps(ids, sort_keys=True).encode()).hexdigest(),
            vocab_size=max(known) + 1,
            bos_id=_present(ids["bos"]),
            eos_id=_present(ids["eos"]),
            pad_id=_present(ids["pad"]),
            mask_id=_present(ids["mask"]),
            unk_id=ids["unk"],
            special_ids=tuple(sorted(specials)),
            random_ids=np.array(sorted(known - specials), dtype=np.int32),
        )

    def document_tokenizer(self) -> Tokenizer:
        """A tokenizer for raw documents: every character counts and none is an instruction.

        Truncation and padding stored in ``tokenizer.json`` are off (they would cut documents
        silently), and a literal ``</s>`` or ``<mask>`` in a document is text, not a special id.
        """
        tokenizer = Tokenizer.from_file(str(self.directory / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer


def find_tokenizer(name: str, *, field: str = "data.tokenizer") -> Path:
    """The local directory of tokenizer ``name``; a Hugging Face id (``id@revision``) is fetched.

    Raises ConfigError when there is no such tokenizer or it has no ``tokenizer.json``.
    """
    if not name:
        raise ConfigError(
            field, name, "no tokenizer is given", f"set {field} to a directory or Hugging Face id"
        )
    local = Path(name).expanduser()
    directory = local if local.is_dir() else _download(name, field)
    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(
            field,
            name,
            "it has no tokenizer.json",
            "save it once with AutoTokenizer.from_pretrained(...).save_pretrained(directory)",
        )
    return directory


def _download(name: str, field: str) -> Path:
    """Fetch the tokenizer files of a Hugging Face id, from the local hub cache where possible."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo_id, _, revision = name.partition("@")
    try:
        path = snapshot_download(repo_id, revision=revision or None, allow_patterns=_HUB_PATTERNS)
    except HFValidationError as error:
        raise ConfigError(
            field, name, "there is no such directory", "give the directory of tokenizer.json"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            field,
            name,
            "it is no local directory and could not be fetched from the Hugging Face Hub "
            f"({type(error).__name__})",
            "give a directory with tokenizer.json, or check the id, the network and HF_TOKEN",
        ) from error
    return Path(path)


def _read_tokenizer(name: str, directory: Path, field: str) -> Tokenizer:
    path = directory / "tokenizer.json"
    try:
        json.loads(path.read_bytes())  # tokenizers would raise a bare Exception for broken JSON
    except ValueError as error:
        raise ConfigError(
            field, name, f"{path} is not valid JSON: {error}", "save the tokenizer again"
        ) from error
    return Tokenizer.from_file(str(path))


def _read_named_tokens(directory: Path) -> dict[str, str]:
    """``{"mask_token": "<mask>", ...}`` from the JSON files beside ``tokenizer.json``."""
    named: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / file
        if path.is_file():
            for key, value in json.loads(path.read_text(encoding="utf-8")).items():
                text = value.get("content") if isinstance(value, dict) else value
                if key.endswith("_token") and isinstance(text, str):
                    named[key] = text
    return named


def _role_ids(
    name: str, tokenizer: Tokenizer, named: Mapping[str, str], field: str
) -> dict[str, int | None]:
    added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
    special_texts = {token.content for token in added.values() if token.special}
    ids: dict[str, int | None] = {}
    for role, (keys, conventional) in _ROLES.items():
        texts = [named[key] for key in keys if key in named]
        texts += [text for text in conventional if text in special_texts]
        found = (tokenizer.token_to_id(text) for text in texts)
        ids[role] = next((i for i in found if i is not None), None)
    missing = [role for role in _REQUIRED if ids[role] is None]
    if missing:
        wanted = ", ".join(f"{role} ({' or '.join(_ROLES[role][0])})" for role in missing)
        raise ConfigError(
            field,
            name,
            f"the tokenizer has no token for: {wanted}",
            "use an encoder's tokenizer (RoBERTa, BERT), or add the token and name it in "
            "tokenizer_config.json",
        )
    return ids


def _present(token_id: int | None) -> int:
    assert token_id is not None, "_role_ids refuses a tokenizer without it"
    return token_id
