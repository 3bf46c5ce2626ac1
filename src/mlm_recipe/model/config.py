"""RobertaConfig: the geometry of a RoBERTa encoder, how it is executed, and its named axes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from haliax import Axis, ScanCheckpointPolicy
from levanter.layers.attention import AttentionBackend
from levanter.models.lm_model import LmConfig
from transformers import RobertaConfig as HfRobertaConfig

from mlm_recipe.model import flops
from mlm_recipe.model.checks import check_roberta, position_table_size

if TYPE_CHECKING:
    from mlm_recipe.model.roberta import RobertaForMaskedLM


@LmConfig.register_subclass("roberta")
@dataclass(frozen=True)
class RobertaConfig(LmConfig[Any]):
    """RoBERTa (Liu et al. 2019); the defaults are ``roberta-base``.

    Raises ConfigError for a geometry that cannot run (see ``model.checks``).
    """

    max_seq_len: int = 512
    """Tokens per row."""
    max_position_embeddings: int | None = None
    """Rows of the position table. Ids start at ``pad_token_id + 1``, so T tokens need
    T + pad_token_id + 1 rows (514 for 512); null takes just that many."""
    hidden_dim: int = 768
    """Width of the residual stream."""
    intermediate_dim: int = 3072
    """Width of the feed-forward layers."""
    num_layers: int = 12
    """Encoder layers."""
    num_heads: int = 12
    """Attention heads; divides hidden_dim."""
    type_vocab_size: int = 1
    """Rows of the token type table; row 0 is added to every token."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance in every LayerNorm."""
    hidden_dropout: float = 0.1
    """Dropout after the embeddings, the attention output and the feed-forward output."""
    attention_dropout: float = 0.1
    """Dropout on attention probabilities. Above 0, training uses plain attention: the fused
    kernels either refuse dropout or let it leak across documents."""
    initializer_range: float = 0.02
    """Standard deviation of initial Linear and Embedding weights."""
    pad_token_id: int = 1
    """Id of ``<pad>``; also the position id of padding."""
    bos_token_id: int = 0
    """Id of ``<s>``."""
    eos_token_id: int = 2
    """Id of ``</s>``."""
    vocab_size: int | None = None
    """Tokens of the vocabulary; null takes the tokenizer's number."""
    vocab_multiple: int = 64
    """The vocabulary axis is rounded up to a multiple of this; the columns added are never
    predicted, never trained and never exported."""
    scan_layers: bool = True
    """Compile one layer and loop over it; false unrolls the loop. Parameters, checkpoints and
    numbers are the same either way."""
    gradient_checkpointing: bool | ScanCheckpointPolicy | str = True
    """Recompute activations of a layer in the backward pass: true, false, a policy's name
    (offload, recompute, full, save_all, nested) or a haliax ScanCheckpointPolicy."""
    attn_backend: AttentionBackend | None = None
    """Attention kernel; null is plain attention on a CPU and Levanter's choice elsewhere."""
    flash_attention_block_size: int | None = None
    """Block size of the fused kernels; null takes the kernel's own."""
    upcast_attn: bool = True
    """Compute attention scores and their softmax in float32 whatever the compute precision."""

    def __post_init__(self):
        check_roberta(vars(self))

    @property
    def Embed(self) -> Axis:
        return Axis("embed", self.hidden_dim)

    @property
    def Mlp(self) -> Axis:
        return Axis("mlp", self.intermediate_dim)

    @property
    def Heads(self) -> Axis:
        return Axis("heads", self.num_heads)

    @property
    def HeadSize(self) -> Axis:
        return Axis("head_size", self.hidden_dim // self.num_heads)

    @property
    def Layers(self) -> Axis:
        return Axis("layers", self.num_layers)

    @property
    def TokenTypes(self) -> Axis:
        return Axis("token_type", self.type_vocab_size)

    @property
    def PositionTable(self) -> Axis:
        """Rows of the position table; not ``position``, which is where a token is in its row."""
        rows = self.max_position_embeddings
        if rows is None:
            rows = position_table_size(self.max_seq_len, self.pad_token_id)
        return Axis("position_table", rows)

    def vocab_axis(self, vocab_size: int) -> Axis:
        """``vocab``: the vocabulary rounded up to a multiple of ``vocab_multiple``."""
        return Axis("vocab", -(-vocab_size // self.vocab_multiple) * self.vocab_multiple)

    @property
    def model_type(self) -> type["RobertaForMaskedLM"]:
        # roberta.py imports this file.
        from mlm_recipe.model.roberta import RobertaForMaskedLM

        return RobertaForMaskedLM

    def flops_per_token(
        self, vocab_size: int, context_length: int, masked_fraction: float = 0.15
    ) -> float:
        """Forward FLOPs per token of a row, for work done (``model.flops``).

        Args:
            vocab_size: tokens of the vocabulary; the padded axis is what is counted.
            context_length: tokens per row.
            masked_fraction: part of the positions where the head runs; BERT's rate by default.
        """
        return flops.forward_flops_per_token(
            hidden_dim=self.hidden_dim,
            intermediate_dim=self.intermediate_dim,
            num_layers=self.num_layers,
            context_length=context_length,
            vocab_columns=self.vocab_axis(vocab_size).size,
            masked_fraction=masked_fraction,
        )

    def total_trainable_params(self, vocab_size: int) -> int:
        """Parameters as exported: decoder tied, padding columns left out."""
        return flops.parameter_count(
            hidden_dim=self.hidden_dim,
            intermediate_dim=self.intermediate_dim,
            num_layers=self.num_layers,
            vocab_size=vocab_size,
            position_rows=self.PositionTable.size,
            type_vocab_size=self.type_vocab_size,
        )

    @classmethod
    def from_hf_config(cls, hf_config: HfRobertaConfig) -> "RobertaConfig":
        """Raises ConfigError for what this model does not compute (``model.hf``)."""
        from mlm_recipe.model.hf import from_hf_config

        return from_hf_config(hf_config)

    def to_hf_config(self, vocab_size: int) -> HfRobertaConfig:
        """The ``config.json`` of an exported model of ``vocab_size`` tokens."""
        from mlm_recipe.model.hf import to_hf_config

        return to_hf_config(self, vocab_size)
