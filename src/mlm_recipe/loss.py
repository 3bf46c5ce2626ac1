"""The masked-LM loss: summed over masked tokens, divided by their global number.

Cross-entropy in float32, in nats. Dividing by the count of the *global* batch makes the loss
and its gradient independent of how the batch is split into microbatches or over devices;
averaging per microbatch is what goes wrong elsewhere (huggingface/transformers#47688).
"""

import math

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray
from levanter.metrics import Metric, ReductionType

from mlm_recipe.data.example import MaskKind, MlmExample
from mlm_recipe.model.roberta import RobertaForMaskedLM

Kind = Axis("mask_kind", len(MaskKind))


class MaskedLmTotals(eqx.Module):
    """Sums over the masked tokens of a batch, by what each was replaced by.

    All are ``{mask_kind}`` float32 in the order of ``MaskKind``. Totals of batches, and of
    kinds, add up: the mean over an evaluation set is ``sum(nll) / sum(count)``.
    """

    nll: NamedArray
    """Negative log-likelihood of the original tokens, in nats."""
    correct: NamedArray
    """Original tokens that were the most likely prediction."""
    count: NamedArray
    """Masked tokens."""

    def __add__(self, other: "MaskedLmTotals") -> "MaskedLmTotals":
        return MaskedLmTotals(
            self.nll + other.nll, self.correct + other.correct, self.count + other.count
        )


def masked_lm_loss(
    model: RobertaForMaskedLM,
    example: MlmExample,
    *,
    key: PRNGKeyArray | None = None,
    z_loss_weight: float = 0.0,
) -> tuple[NamedArray, dict[str, Metric]]:
    """Mean negative log-likelihood of masked tokens in nats, a float32 scalar.

    A batch of b examples is divided by ``example.masked_per_example * b``, so that the mean over
    the microbatches of a batch is the batch's own value; by its own number of masked tokens
    where ``masked_per_example`` is None. Nothing masked gives 0, with zero gradients.

    Args:
        example: with any leading batch axes, or none.
        key: for dropout; None is inference.
        z_loss_weight: weight of the mean squared log-partition function (PaLM, section 5).

    Returns:
        The loss, and ``masked_accuracy`` (a mean over masked tokens), ``num_masked`` (a sum)
        and with a ``z_loss_weight`` the mean ``z_loss``, its weight left out.
    """
    logits = _masked_logits(model, example, key)
    log_z = hnn.logsumexp(logits, model.Vocab)
    weights = example.masked_weights
    num_masked = hax.sum(weights)
    nll = log_z - _label_logits(logits, example.masked_labels, model.Vocab)
    total = hax.sum(nll * weights)
    metrics = {
        "masked_accuracy": _mean(
            hax.sum(_is_correct(logits, example.masked_labels, model.Vocab) * weights), num_masked
        ),
        "num_masked": Metric.from_value(num_masked.scalar(), ReductionType.SUM),
    }
    if z_loss_weight > 0:
        squared_log_z = hax.sum(hax.square(log_z) * weights)
        total = total + z_loss_weight * squared_log_z
        metrics["z_loss"] = _mean(squared_log_z, num_masked)
    return total / _denominator(example, num_masked), metrics


def masked_lm_totals(model: RobertaForMaskedLM, example: MlmExample) -> MaskedLmTotals:
    """Totals of a batch for evaluation; no dropout. Leading batch axes, or none."""
    logits = _masked_logits(model, example, None)
    labels = example.masked_labels
    nll = hnn.logsumexp(logits, model.Vocab) - _label_logits(logits, labels, model.Vocab)
    kinds = hax.arange(Kind).broadcast_axis(labels.axes) == example.masked_kinds
    weights = hax.where(kinds, example.masked_weights, 0.0)
    return MaskedLmTotals(
        nll=_sum_by_kind(nll * weights),
        correct=_sum_by_kind(_is_correct(logits, labels, model.Vocab) * weights),
        count=_sum_by_kind(weights),
    )


def _masked_logits(
    model: RobertaForMaskedLM, example: MlmExample, key: PRNGKeyArray | None
) -> NamedArray:
    logits = model(
        example.input_ids,
        example.segment_ids,
        position_ids=example.position_ids,
        masked_positions=example.masked_positions,
        key=key,
    )
    return logits.astype(jnp.float32)


def _label_logits(logits: NamedArray, labels: NamedArray, Vocab: Axis) -> NamedArray:
    # A select and a sum stay local where the vocabulary is sharded, and fuse; a gather does not.
    is_label = hax.arange(Vocab).broadcast_axis(labels.axes) == labels
    return hax.sum(hax.where(is_label, logits, 0.0), Vocab)


def _is_correct(logits: NamedArray, labels: NamedArray, Vocab: Axis) -> NamedArray:
    return hax.where(hax.argmax(logits, Vocab) == labels, 1.0, 0.0)


def _denominator(example: MlmExample, num_masked: NamedArray) -> NamedArray:
    if example.masked_per_example is None:
        count = num_masked
    else:
        batch_axes = [axis for axis in example.masked_weights.axes if axis.name != "masked"]
        count = example.masked_per_example * math.prod(axis.size for axis in batch_axes)
    return hax.where(count > 0, count, 1.0)


def _mean(total: NamedArray, count: NamedArray) -> Metric:
    return Metric(total.scalar(), count.scalar(), ReductionType.MEAN)


def _sum_by_kind(values: NamedArray) -> NamedArray:
    return hax.sum(values, tuple(axis for axis in values.axes if axis != Kind))
