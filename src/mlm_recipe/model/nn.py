"""Linear, Embedding, LayerNorm and Dropout as RoBERTa initialises and applies them."""

from collections.abc import Sequence

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray, NamedOrNumeric
from jaxtyping import PRNGKeyArray

from mlm_recipe.model.config import RobertaConfig


def linear(
    config: RobertaConfig,
    In: Axis | Sequence[Axis],
    Out: Axis | Sequence[Axis],
    key: PRNGKeyArray,
) -> hnn.Linear:
    # Output axes first is torch's layout; XLA:CPU's bf16 backward is 15 times slower otherwise.
    axes = hax.axis.concat_axes(Out, In)
    weight = hax.random.normal(key, axes) * config.initializer_range
    return hnn.Linear(weight, hax.zeros(Out), In, Out)


def embedding(
    config: RobertaConfig, Rows: Axis, key: PRNGKeyArray, used: NamedOrNumeric | None = None
) -> hnn.Embedding:
    weight = hax.random.normal(key, (Rows, config.Embed)) * config.initializer_range
    if used is not None:
        weight = hax.where(used, weight, 0.0)
    return hnn.Embedding(weight, Rows, config.Embed)


def layer_norm(config: RobertaConfig) -> hnn.LayerNorm:
    return hnn.LayerNorm.init(config.Embed, eps=config.layer_norm_epsilon)


def normalize(layer_norm: hnn.LayerNorm, x: NamedArray) -> NamedArray:
    # Haliax takes mean and variance in the dtype of x; bf16 is too coarse for them.
    return layer_norm(x.astype(jnp.float32)).astype(x.dtype)


def drop(dropout: hnn.Dropout, x: NamedArray, key: PRNGKeyArray | None) -> NamedArray:
    return x if key is None else dropout(x, key=key)


def lookup(table: hnn.Embedding, ids: NamedArray, padding_id: int) -> NamedArray:
    """Rows of ``table``; the padding row gets no gradient, as with torch's ``padding_idx``."""
    rows = table(ids)
    return hax.where(ids == padding_id, jax.lax.stop_gradient(rows), rows)
