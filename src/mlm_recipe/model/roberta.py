"""RoBERTa for masked language modelling, in named axes.

Post-LN encoder, exact GELU, learned positions from ``pad + 1``, decoder tied to the word
embeddings (Liu et al. 2019; same numbers as transformers' ``RobertaForMaskedLM``). It is not a
Levanter ``LmHeadModel``: next-token tooling must not apply to it by accident.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray, ScanCheckpointPolicy
from haliax.jax_utils import maybe_rng_split, named_call, shaped_rng_split
from jaxtyping import PRNGKeyArray
from levanter.layers.attention import AttentionMask

from mlm_recipe.errors import ConfigError
from mlm_recipe.model import nn
from mlm_recipe.model.config import RobertaConfig
from mlm_recipe.model.encoder import RobertaEmbeddings, RobertaLayer
from mlm_recipe.model.position_ids import roberta_position_ids


class RobertaLmHead(eqx.Module):
    """``LN(gelu(dense(x)))``, then the decoder: word embeddings transposed, plus its own bias."""

    dense: hnn.Linear
    layer_norm: hnn.LayerNorm
    bias: NamedArray

    @staticmethod
    def init(Vocab: Axis, config: RobertaConfig, *, key: PRNGKeyArray) -> "RobertaLmHead":
        Out = config.Embed.alias("head_embed")
        return RobertaLmHead(
            nn.linear(config, config.Embed, Out, key),
            nn.layer_norm(config),
            hax.zeros(Vocab),
        )

    @named_call
    def __call__(self, x: NamedArray, word_embeddings: hnn.Embedding) -> NamedArray:
        x = hnn.gelu(self.dense(x), approximate=False).rename({"head_embed": "embed"})
        x = nn.normalize(self.layer_norm, x)
        return hax.auto_sharded(word_embeddings.unembed(x) + self.bias)


class RobertaForMaskedLM(eqx.Module):
    """Encoder and masked-LM head.

    ``Vocab`` may be larger than ``vocab_size``: the columns added have logit -inf, zero weights
    and zero gradients.
    """

    config: RobertaConfig = eqx.field(static=True)
    vocab_size: int = eqx.field(static=True)
    embeddings: RobertaEmbeddings
    layers: hnn.Stacked[RobertaLayer]
    lm_head: RobertaLmHead

    @staticmethod
    def init(
        Vocab: Axis, config: RobertaConfig, *, vocab_size: int | None = None, key: PRNGKeyArray
    ) -> "RobertaForMaskedLM":
        """N(0, initializer_range) Linear and Embedding weights, zero biases and zero pad rows.

        Args:
            Vocab: the ``vocab`` axis, e.g. ``config.vocab_axis(vocab_size)``.
            vocab_size: tokens of the vocabulary; None takes the config's, else all of ``Vocab``.
        """
        vocab_size = vocab_size or config.vocab_size or Vocab.size
        if vocab_size > Vocab.size:
            raise ConfigError(
                "model.vocab_size",
                vocab_size,
                f"exceeds the vocabulary axis of {Vocab.size}",
                "give the tokenizer's size",
            )
        k_embeddings, k_layers, k_head = jax.random.split(key, 3)
        stack = hnn.Stacked.init(
            config.Layers, RobertaLayer, gradient_checkpointing=_checkpoint_policy(config)
        )
        return RobertaForMaskedLM(
            config,
            vocab_size,
            RobertaEmbeddings.init(Vocab, config, vocab_size=vocab_size, key=k_embeddings),
            stack(config, key=shaped_rng_split(k_layers, config.num_layers)),
            RobertaLmHead.init(Vocab, config, key=k_head),
        )

    @property
    def Vocab(self) -> Axis:
        return self.embeddings.word_embeddings.Vocab

    def __call__(
        self,
        input_ids: NamedArray,
        segment_ids: NamedArray | None,
        *,
        position_ids: NamedArray | None = None,
        masked_positions: NamedArray | None = None,
        key: PRNGKeyArray | None = None,
    ) -> NamedArray:
        """Logits ``{..., masked, vocab}``, or ``{..., position, vocab}`` for all positions.

        Args:
            input_ids: ``{..., position}`` int.
            segment_ids: ``{..., position}`` int; tokens attend within their segment, padding
                (-1) to padding. None lets every position attend to every other, as transformers
                does without an attention mask.
            position_ids: ``{..., position}`` int; None computes ``roberta_position_ids``.
            masked_positions: ``{..., masked}`` int, where in the row the head runs; None runs
                it everywhere.
            key: for dropout; None is inference.
        """
        x = self.encode(input_ids, segment_ids, position_ids=position_ids, key=key)
        if masked_positions is not None:
            x = hax.auto_sharded(_gather_positions(x, masked_positions))
        logits = self.lm_head(x, self.embeddings.word_embeddings)
        if self.vocab_size == self.Vocab.size:
            return logits
        return hax.where(hax.arange(self.Vocab) < self.vocab_size, logits, -jnp.inf)

    def encode(
        self,
        input_ids: NamedArray,
        segment_ids: NamedArray | None,
        *,
        position_ids: NamedArray | None = None,
        key: PRNGKeyArray | None = None,
    ) -> NamedArray:
        """Hidden states ``{..., position, embed}`` of the last layer; arguments as in a call."""
        if position_ids is None:
            pad = self.config.pad_token_id
            position_ids = roberta_position_ids(input_ids, segment_ids, pad)
        k_embeddings, k_layers = maybe_rng_split(key, 2)
        x = self.embeddings(input_ids, position_ids, key=k_embeddings)
        mask = None if segment_ids is None else AttentionMask().with_segment_ids(segment_ids)
        layer_keys = (
            None if k_layers is None else shaped_rng_split(k_layers, self.config.num_layers)
        )
        unroll = not self.config.scan_layers
        return self.layers.fold(x, mask, key=layer_keys, unroll=unroll)


def _checkpoint_policy(config: RobertaConfig) -> ScanCheckpointPolicy:
    policy = config.gradient_checkpointing
    if not isinstance(policy, ScanCheckpointPolicy):
        policy = ScanCheckpointPolicy.from_bool_or_str(policy)
    # Outside a loop XLA finds the recomputation to be a common subexpression and removes it.
    return policy if config.scan_layers else dataclasses.replace(policy, prevent_cse=True)


def _gather_positions(x: NamedArray, positions: NamedArray) -> NamedArray:
    # Mapping over the batch axes keeps the gather local to a shard; indexing with an iota of
    # the batch would not.
    batch_axes = tuple(axis for axis in x.axes if axis in positions.axes)
    return hax.vmap(lambda row, index: row.take("position", index), batch_axes)(x, positions)
