"""MlmExample: what the model and the loss see of one row of packed text.

The loss is taken at ``masked_positions`` only, so the head never runs elsewhere
(google-research/bert, ``gather_indexes``). The ``masked`` axis is static: unused slots carry
weight 0.
"""

from collections.abc import Sequence
from enum import IntEnum

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax import NamedArray


class MaskKind(IntEnum):
    """What a selected token was replaced by (BERT's 80/10/10; Devlin et al. 2019, section 3.1)."""

    MASK = 0
    RANDOM = 1
    KEPT = 2


class MlmExample(eqx.Module):
    """One row, or with a leading ``batch`` axis one batch, of masked text. All ids are int32."""

    input_ids: NamedArray
    """``{position}`` tokens after replacement; padding is the tokenizer's ``<pad>``."""
    segment_ids: NamedArray
    """``{position}`` 0, 1, ... for the documents packed in the row, -1 on padding."""
    position_ids: NamedArray
    """``{position}`` rows of the position table: ``pad + 1`` onwards, ``pad`` on padding."""
    masked_positions: NamedArray
    """``{masked}`` where in the row the loss is taken, ascending; 0 in unused slots."""
    masked_labels: NamedArray
    """``{masked}`` the original tokens there."""
    masked_weights: NamedArray
    """``{masked}`` float32: 1 where the slot is used, else 0."""
    masked_kinds: NamedArray
    """``{masked}`` a ``MaskKind`` per slot."""
    overflow: NamedArray | None = None
    """Scalar int32: tokens selected but left alone for want of a slot (Bernoulli selection)."""
    masked_per_example: NamedArray | None = None
    """Scalar float32, mean number of masked tokens per example over the *global* batch.

    It carries no batch axis, so gradient accumulation hands it whole to every microbatch; None
    means that this batch is the global batch.
    """


def stack_examples(examples: Sequence[MlmExample]) -> MlmExample:
    """Examples as one with a leading ``batch`` axis, as numpy arrays on the host."""
    Batch = hax.Axis("batch", len(examples))

    def stack(*leaves: NamedArray) -> NamedArray:
        array = np.stack([np.asarray(leaf.array) for leaf in leaves])
        return NamedArray(array, (Batch, *leaves[0].axes))  # pyright: ignore[reportArgumentType]

    return jax.tree.map(stack, *examples, is_leaf=lambda x: isinstance(x, NamedArray))
