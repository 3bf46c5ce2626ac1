"""The Hugging Face form of the model: two tables, read in both directions.

Names and shapes are those of transformers' ``RobertaForMaskedLM`` as it is saved:
``lm_head.decoder.*`` is never written, since transformers 5 un-ties the decoder of a file that
holds it. Streaming and publishing files is not done here.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from transformers import RobertaConfig as HfRobertaConfig

from mlm_recipe.errors import ConfigError
from mlm_recipe.model.config import RobertaConfig
from mlm_recipe.model.roberta import RobertaForMaskedLM

_CONFIG = {
    "hidden_size": "hidden_dim",
    "intermediate_size": "intermediate_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "type_vocab_size": "type_vocab_size",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_dropout_prob": "hidden_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "initializer_range",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
}
"""Field of transformers' config -> field of ours."""

_COMPUTED = {
    "hidden_act": "gelu",
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""What this model computes; a config that asks for anything else is refused."""

_COMPUTED_V4 = {"position_embedding_type": "absolute"}
"""The same for a field that transformers 5 dropped, but keeps when it reads an older file."""

_TENSORS = {
    "roberta.embeddings.word_embeddings.weight": (
        "embeddings.word_embeddings.weight",
        "vocab embed",
    ),
    "roberta.embeddings.position_embeddings.weight": (
        "embeddings.position_embeddings.weight",
        "position_table embed",
    ),
    "roberta.embeddings.token_type_embeddings.weight": (
        "embeddings.token_type_embeddings.weight",
        "token_type embed",
    ),
    "roberta.embeddings.LayerNorm.weight": ("embeddings.layer_norm.weight", "embed"),
    "roberta.embeddings.LayerNorm.bias": ("embeddings.layer_norm.bias", "embed"),
    "lm_head.dense.weight": ("lm_head.dense.weight", "head_embed embed"),
    "lm_head.dense.bias": ("lm_head.dense.bias", "head_embed"),
    "lm_head.layer_norm.weight": ("lm_head.layer_norm.weight", "embed"),
    "lm_head.layer_norm.bias": ("lm_head.layer_norm.bias", "embed"),
    "lm_head.bias": ("lm_head.bias", "vocab"),
}
"""Tensor -> parameter and its axes; axes in parentheses are one axis of the tensor."""

_LAYER_TENSORS = {
    "attention.self.query.weight": ("attention.query.weight", "(heads head_size) embed"),
    "attention.self.query.bias": ("attention.query.bias", "(heads head_size)"),
    "attention.self.key.weight": ("attention.key.weight", "(heads head_size) embed"),
    "attention.self.key.bias": ("attention.key.bias", "(heads head_size)"),
    "attention.self.value.weight": ("attention.value.weight", "(heads head_size) embed"),
    "attention.self.value.bias": ("attention.value.bias", "(heads head_size)"),
    "attention.output.dense.weight": ("attention.output.weight", "embed (heads head_size)"),
    "attention.output.dense.bias": ("attention.output.bias", "embed"),
    "attention.output.LayerNorm.weight": ("attention_layer_norm.weight", "embed"),
    "attention.output.LayerNorm.bias": ("attention_layer_norm.bias", "embed"),
    "intermediate.dense.weight": ("intermediate.weight", "mlp embed"),
    "intermediate.dense.bias": ("intermediate.bias", "mlp"),
    "output.dense.weight": ("output.weight", "embed mlp"),
    "output.dense.bias": ("output.bias", "embed"),
    "output.LayerNorm.weight": ("output_layer_norm.weight", "embed"),
    "output.LayerNorm.bias": ("output_layer_norm.bias", "embed"),
}
"""The same for ``roberta.encoder.layer.N.*`` and slice N of ``layers``."""

_IGNORED = re.compile(r"roberta\.(embeddings\.(position_ids|token_type_ids)|pooler\.dense\.\w+)")
"""Buffers and heads in older checkpoints that masked-LM does not use."""

_TIED = {
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
    "lm_head.decoder.bias": "lm_head.bias",
}
"""Second names in older checkpoints, accepted where they hold the same numbers."""


def from_hf_config(hf_config: HfRobertaConfig) -> RobertaConfig:
    """Raises ConfigError for what this model does not compute, naming the field."""
    for field, computed in (_COMPUTED | _COMPUTED_V4).items():
        value = getattr(hf_config, field, computed)
        if value != computed:
            raise ConfigError(
                f"config.json: {field}",
                value,
                f"this model computes {computed!r} only",
                "use a RoBERTa masked-LM checkpoint",
            )
    fields = {ours: getattr(hf_config, theirs) for theirs, ours in _CONFIG.items()}
    rows = hf_config.max_position_embeddings
    return RobertaConfig(
        max_seq_len=rows - fields["pad_token_id"] - 1,
        max_position_embeddings=rows,
        vocab_size=hf_config.vocab_size,
        **fields,
    )


def to_hf_config(config: RobertaConfig, vocab_size: int) -> HfRobertaConfig:
    """transformers' config of an exported model of ``vocab_size`` tokens."""
    return HfRobertaConfig(
        architectures=["RobertaForMaskedLM"],
        vocab_size=vocab_size,
        max_position_embeddings=config.PositionTable.size,
        **{theirs: getattr(config, ours) for theirs, ours in _CONFIG.items()},
        **_COMPUTED,
    )


def to_hf_state_dict(model: RobertaForMaskedLM) -> dict[str, jax.Array]:
    """Tensors by transformers' name, in the parameters' dtype, with the true vocabulary."""
    sizes = _axis_sizes(model.config, model.vocab_size)
    return {tensor.name: tensor.read(model, sizes) for tensor in _tensors(model.config)}


def from_hf_state_dict(
    config: RobertaConfig,
    Vocab: Axis,
    tensors: Mapping[str, Any],
    *,
    vocab_size: int | None = None,
) -> RobertaForMaskedLM:
    """The model of a checkpoint, in float32.

    Args:
        Vocab: the ``vocab`` axis; rows beyond the checkpoint's are zero.
        tensors: numpy or jax arrays by transformers' name. Tied decoder weights, buffers and a
            pooler, which older files hold, are accepted.
        vocab_size: as in ``RobertaForMaskedLM.init``.

    Raises:
        ConfigError: names the tensors that are missing, unexpected or of another shape.
    """
    template = eqx.filter_eval_shape(
        RobertaForMaskedLM.init, Vocab, config, vocab_size=vocab_size, key=jax.random.key(0)
    )
    expected = list(_tensors(config))
    _check_names(tensors, {tensor.name for tensor in expected})
    sizes = _axis_sizes(config, template.vocab_size)
    values: dict[str, list[np.ndarray]] = {}
    for tensor in expected:
        values.setdefault(tensor.path, []).append(tensor.unflatten(tensors[tensor.name], sizes))
    parameters = [
        _parameter(layers, attrgetter(path)(template).axes) for path, layers in values.items()
    ]
    return eqx.tree_at(
        lambda model: [attrgetter(path)(model) for path in values], template, parameters
    )


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a checkpoint, and the parameter, or the layer of it, that holds it."""

    name: str
    path: str
    axes: tuple[tuple[str, ...], ...]
    layer: int | None = None

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(sizes[name] for name in group) for group in self.axes)

    def read(self, model: RobertaForMaskedLM, sizes: Mapping[str, int]) -> jax.Array:
        parameter = attrgetter(self.path)(model)
        if self.layer is not None:
            parameter = parameter["layers", self.layer]
        if parameter.has_axis("vocab"):
            parameter = parameter["vocab", 0 : sizes["vocab"]]
        names = tuple(name for group in self.axes for name in group)
        return parameter.rearrange(names).array.reshape(self.shape(sizes))

    def unflatten(self, values: Any, sizes: Mapping[str, int]) -> np.ndarray:
        values = np.asarray(values, dtype=np.float32)
        if values.shape != self.shape(sizes):
            raise ConfigError(
                f"checkpoint: {self.name}",
                values.shape,
                f"the model has shape {self.shape(sizes)}",
                "load it with the config.json it was saved with",
            )
        return values.reshape([sizes[name] for group in self.axes for name in group])


def _tensors(config: RobertaConfig) -> Iterator[_Tensor]:
    for name, (path, axes) in _TENSORS.items():
        yield _Tensor(name, path, _groups(axes))
    for layer in range(config.num_layers):
        for name, (path, axes) in _LAYER_TENSORS.items():
            prefix = f"roberta.encoder.layer.{layer}."
            yield _Tensor(prefix + name, f"layers.stacked.{path}", _groups(axes), layer)


def _groups(axes: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\w+", axes))


def _axis_sizes(config: RobertaConfig, vocab_size: int) -> dict[str, int]:
    axes = (config.PositionTable, config.TokenTypes, config.Heads, config.HeadSize, config.Mlp)
    sizes = {axis.name: axis.size for axis in (*axes, config.Embed)}
    return sizes | {"head_embed": config.hidden_dim, "vocab": vocab_size}


def _parameter(layers: list[np.ndarray], axes: tuple[Axis, ...]) -> NamedArray:
    values = np.stack(layers) if axes[0].name == "layers" else layers[0]
    padding = [(0, axis.size - size) for axis, size in zip(axes, values.shape, strict=True)]
    return NamedArray(jnp.asarray(np.pad(values, padding)), axes)


def _check_names(tensors: Mapping[str, Any], expected: set[str]) -> None:
    if missing := sorted(expected - set(tensors)):
        raise ConfigError(
            "checkpoint", missing, "tensors are missing", "give a RobertaForMaskedLM checkpoint"
        )
    for name in sorted(set(tensors) - expected):
        if name in _TIED:
            _check_tied(tensors, name, _TIED[name])
        elif not _IGNORED.fullmatch(name):
            raise ConfigError(
                "checkpoint",
                name,
                "this tensor has no place in the model",
                "give a RobertaForMaskedLM checkpoint with the config.json it was saved with",
            )


def _check_tied(tensors: Mapping[str, Any], name: str, tied_to: str) -> None:
    if not np.array_equal(np.asarray(tensors[name]), np.asarray(tensors[tied_to])):
        raise ConfigError(
            f"checkpoint: {name}",
            np.shape(tensors[name]),
            f"differs from {tied_to}, and this model's decoder is tied",
            f"tie the checkpoint: drop one of the two, keeping {tied_to}",
        )
