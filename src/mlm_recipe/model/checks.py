"""What makes a RoBERTa geometry impossible, checked without importing jax.

``RobertaConfig`` calls this when it is built and the launcher calls it before anything is
imported, so that the same mistake gives the same message in both places.
"""

from collections.abc import Mapping
from typing import Any

from mlm_recipe.errors import ConfigError

_SIZES = (
    "max_seq_len",
    "hidden_dim",
    "intermediate_dim",
    "num_layers",
    "num_heads",
    "type_vocab_size",
    "vocab_multiple",
)
_DROPOUT_RATES = ("hidden_dropout", "attention_dropout")
_POSITIVE = ("layer_norm_epsilon", "initializer_range")
_CHECKPOINTING = ("offload", "recompute", "full", "save_all", "nested")


def check_roberta(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first impossible value.

    Args:
        values: every field of ``RobertaConfig`` by name, defaults filled in; the types are
            already right.
    """
    for name in _SIZES:
        _require(values, name, values[name] >= 1, "must be at least 1", "give a positive size")
    for name in _DROPOUT_RATES:
        in_range = 0 <= values[name] < 1
        _require(values, name, in_range, "is not a dropout rate", "give a rate in [0, 1)")
    for name in _POSITIVE:
        _require(values, name, values[name] > 0, "must be positive", "give a value above 0")
    _check_heads(values)
    _check_vocabulary(values)
    _check_positions(values)
    _check_execution(values)


def position_table_size(max_seq_len: int, pad_token_id: int) -> int:
    """Rows a position table needs: ids run from ``pad + 1``, and padding takes the id ``pad``."""
    return max_seq_len + pad_token_id + 1


def _check_heads(values: Mapping[str, Any]) -> None:
    hidden_dim, num_heads = values["hidden_dim"], values["num_heads"]
    _require(
        values,
        "hidden_dim",
        hidden_dim % num_heads == 0,
        f"does not divide into num_heads = {num_heads} heads of equal size",
        f"set model.hidden_dim to a multiple of {num_heads}, e.g. "
        f"{-(-hidden_dim // num_heads) * num_heads}, or change model.num_heads",
    )


def _check_vocabulary(values: Mapping[str, Any]) -> None:
    vocab_size = values["vocab_size"]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token_id = values[name]
        _require(values, name, token_id >= 0, "is not a token id", "give the tokenizer's id")
        _require(
            values,
            name,
            vocab_size is None or token_id < vocab_size,
            f"lies outside a vocabulary of {vocab_size}",
            "set model.vocab_size to the tokenizer's size, or leave it out",
        )


def _check_positions(values: Mapping[str, Any]) -> None:
    # An id beyond the table is NaN in JAX, where torch raises (huggingface/transformers#10832).
    rows, max_seq_len, pad = (
        values[name] for name in ("max_position_embeddings", "max_seq_len", "pad_token_id")
    )
    if rows is None:
        return
    usable = rows - pad - 1
    _require(
        values,
        "max_seq_len",
        max_seq_len <= usable,
        f"max_position_embeddings = {rows} serves {usable} tokens, as position ids start at "
        f"pad_token_id + 1 = {pad + 1}",
        f"set model.max_position_embeddings to {position_table_size(max_seq_len, pad)} "
        f"(or leave it out), or lower model.max_seq_len to {max(usable, 0)}",
    )


def _check_execution(values: Mapping[str, Any]) -> None:
    policy = values["gradient_checkpointing"]
    _require(
        values,
        "gradient_checkpointing",
        not isinstance(policy, str) or policy in _CHECKPOINTING,
        "is not a checkpointing policy",
        f"use true, false or one of: {', '.join(_CHECKPOINTING)}",
    )
    block = values["flash_attention_block_size"]
    _require(
        values,
        "flash_attention_block_size",
        block is None or block >= 1,
        "must be at least 1",
        "give a divisor of model.max_seq_len, or leave it out",
    )


def _require(values: Mapping[str, Any], name: str, holds: bool, problem: str, fix: str) -> None:
    if not holds:
        raise ConfigError(f"model.{name}", values[name], problem, fix)
