"""RoBERTa's embeddings and encoder layer: post-LN, exact GELU, attention within segments."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split, named_call
from jaxtyping import PRNGKeyArray
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention

from mlm_recipe.model import nn
from mlm_recipe.model.config import RobertaConfig


class RobertaEmbeddings(eqx.Module):
    word_embeddings: hnn.Embedding
    position_embeddings: hnn.Embedding
    token_type_embeddings: hnn.Embedding
    layer_norm: hnn.LayerNorm
    dropout: hnn.Dropout
    pad_token_id: int = eqx.field(static=True)

    @staticmethod
    def init(
        Vocab: Axis, config: RobertaConfig, *, vocab_size: int, key: PRNGKeyArray
    ) -> "RobertaEmbeddings":
        k_word, k_position, k_type = jax.random.split(key, 3)
        pad = config.pad_token_id
        words = hax.arange(Vocab)
        positions = hax.arange(config.PositionTable)
        return RobertaEmbeddings(
            nn.embedding(config, Vocab, k_word, (words != pad) & (words < vocab_size)),
            nn.embedding(config, config.PositionTable, k_position, positions != pad),
            nn.embedding(config, config.TokenTypes, k_type),
            nn.layer_norm(config),
            hnn.Dropout(config.hidden_dropout),
            pad,
        )

    @named_call
    def __call__(
        self, input_ids: NamedArray, position_ids: NamedArray, *, key: PRNGKeyArray | None
    ) -> NamedArray:
        words = nn.lookup(self.word_embeddings, input_ids, self.pad_token_id)
        positions = nn.lookup(self.position_embeddings, position_ids, self.pad_token_id)
        token_type = self.token_type_embeddings.weight["token_type", 0]
        x = nn.normalize(self.layer_norm, words + token_type + positions)
        return hax.auto_sharded(nn.drop(self.dropout, x, key))


class RobertaAttention(eqx.Module):
    """Bidirectional self-attention within segments; ``{..., position, embed}`` in and out."""

    config: RobertaConfig = eqx.field(static=True)
    query: hnn.Linear
    key: hnn.Linear
    value: hnn.Linear
    output: hnn.Linear
    dropout: hnn.Dropout

    @staticmethod
    def init(config: RobertaConfig, *, key: PRNGKeyArray) -> "RobertaAttention":
        k_query, k_key, k_value, k_output = jax.random.split(key, 4)
        heads = (config.Heads, config.HeadSize)
        return RobertaAttention(
            config,
            nn.linear(config, config.Embed, heads, k_query),
            nn.linear(config, config.Embed, heads, k_key),
            nn.linear(config, config.Embed, heads, k_value),
            nn.linear(config, heads, config.Embed, k_output),
            hnn.Dropout(config.attention_dropout),
        )

    @named_call
    def __call__(
        self, x: NamedArray, mask: AttentionMask | None, *, key: PRNGKeyArray | None
    ) -> NamedArray:
        keys = self.key(x).rename({"position": "key_position"})
        values = self.value(x).rename({"position": "key_position"})
        drops = key is not None and self.dropout.is_active
        context = dot_product_attention(
            "position",
            "key_position",
            "head_size",
            self.query(x),
            keys,
            values,
            mask,
            attention_dtype=jnp.float32 if self.config.upcast_attn else None,
            attn_backend=self._backend(drops),
            flash_block_size=self.config.flash_attention_block_size,
            dropout=self.dropout.pdrop if drops else 0.0,
            inference=not drops,
            prng=key if drops else None,
        )
        return self.output(context.astype(x.dtype))

    def _backend(self, drops: bool) -> AttentionBackend:
        # Levanter's JAX flash drops masked scores to 0 before the softmax, which lets 5.4 % of
        # the attention into other documents at a rate of 0.1; splash has no dropout.
        if drops:
            return AttentionBackend.VANILLA
        if self.config.attn_backend is not None:
            return self.config.attn_backend
        on_cpu = jax.local_devices()[0].platform == "cpu"
        return AttentionBackend.VANILLA if on_cpu else AttentionBackend.DEFAULT


class RobertaLayer(eqx.Module):
    """``LN(x + drop(attention(x)))`` then ``LN(x + drop(feed_forward(x)))``."""

    attention: RobertaAttention
    attention_layer_norm: hnn.LayerNorm
    intermediate: hnn.Linear
    output: hnn.Linear
    output_layer_norm: hnn.LayerNorm
    dropout: hnn.Dropout

    @staticmethod
    def init(config: RobertaConfig, *, key: PRNGKeyArray) -> "RobertaLayer":
        k_attention, k_intermediate, k_output = jax.random.split(key, 3)
        return RobertaLayer(
            RobertaAttention.init(config, key=k_attention),
            nn.layer_norm(config),
            nn.linear(config, config.Embed, config.Mlp, k_intermediate),
            nn.linear(config, config.Mlp, config.Embed, k_output),
            nn.layer_norm(config),
            hnn.Dropout(config.hidden_dropout),
        )

    @named_call
    def __call__(
        self, x: NamedArray, mask: AttentionMask | None, *, key: PRNGKeyArray | None = None
    ) -> NamedArray:
        k_scores, k_attention, k_output = maybe_rng_split(key, 3)
        attended = self.attention(x, mask, key=k_scores)
        x = nn.normalize(
            self.attention_layer_norm, x + nn.drop(self.dropout, attended, k_attention)
        )
        expanded = hnn.gelu(self.intermediate(x), approximate=False)
        transformed = nn.drop(self.dropout, self.output(expanded), k_output)
        return nn.normalize(self.output_layer_norm, x + transformed)
