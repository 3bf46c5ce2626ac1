"""AdamW with RoBERTa's published values, as Levanter optimizer type ``roberta_adamw``."""

from dataclasses import dataclass
from typing import Any, Literal

import haliax.nn as hnn
import jax
from haliax import NamedArray
from levanter.optim.config import AdamConfig, OptimizerConfig


@OptimizerConfig.register_subclass("roberta_adamw")
@dataclass(frozen=True)
class RobertaAdamWConfig(AdamConfig):
    """Levanter's Adam; only the defaults and the weight-decay mask differ.

    Values: fairseq ``config/pretraining/base.yaml`` and ``examples/roberta``. Levanter's own
    defaults (cosine to 10 %, beta2 0.95, clip 1.0, no decay on embeddings) are those of causal LMs.
    """

    learning_rate: float = 6e-4
    """Peak. fairseq pairs 1e-4 with batches of 256, 5e-4 with 2048 and 7e-4 with 8192 examples."""
    weight_decay: float = 0.01
    """Decoupled (Loshchilov & Hutter 2019)."""
    weight_decay_mask: Literal["no_bias_or_norm", "all"] = "no_bias_or_norm"
    """What is decayed: ``no_bias_or_norm`` as BERT and Hugging Face do, ``all`` as fairseq did."""
    beta2: float = 0.98
    """Second-moment decay."""
    epsilon: float = 1e-6
    """Added to the root of the second moment."""
    warmup: int | float = 0.06
    """Fraction of the steps below 1, or steps: linear warm-up from 0."""
    lr_schedule: str = "linear"
    """linear, cosine, constant, ... after the warm-up."""
    min_lr_ratio: float = 0.0
    """Final rate as a fraction of the peak."""
    max_grad_norm: float | None = None
    """Clip by global norm; null or 0 does not clip, as published."""

    def build_weight_decay_mask(self) -> Any:
        """The mask optax applies: None decays everything.

        Overrides Levanter's, which also skips embeddings by class name.
        """
        if self.weight_decay_modules is not None or self.default_weight_decay_mask is not None:
            return super().build_weight_decay_mask()
        return None if self.weight_decay_mask == "all" else no_bias_or_norm


def no_bias_or_norm(model: Any) -> Any:
    """True for every leaf that is neither a bias nor part of a LayerNorm."""

    def decays(path: tuple[Any, ...], node: Any) -> Any:
        if isinstance(node, hnn.LayerNorm):
            return jax.tree.map(lambda _: False, node)
        return not jax.tree_util.keystr(path[-1:]).endswith("bias")

    return jax.tree_util.tree_map_with_path(
        decays, model, is_leaf=lambda x: isinstance(x, hnn.LayerNorm | NamedArray)
    )
