"""masked_lm_loss: microbatches, the masked-only head, nothing masked, totals for evaluation."""

import dataclasses
import math
from collections.abc import Mapping

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceAxis
from jax.sharding import Mesh
from levanter.grad_accum import microbatched
from levanter.metrics import Metric

from mlm_recipe.data.example import MaskKind, MlmExample
from mlm_recipe.loss import masked_lm_loss, masked_lm_totals
from mlm_recipe.model.config import RobertaConfig
from mlm_recipe.model.position_ids import roberta_position_ids
from mlm_recipe.model.roberta import RobertaForMaskedLM

VOCAB_SIZE, PAD = 100, 1
Z_LOSS = 1e-3
CONFIG = RobertaConfig(
    max_seq_len=16,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=2,
    num_heads=4,
    gradient_checkpointing=False,
)
Batch, Pos, Masked = Axis("batch", 8), CONFIG.max_Pos, Axis("masked", 6)

Result = tuple[tuple[jax.Array, dict[str, Metric]], RobertaForMaskedLM]


@pytest.fixture(scope="module")
def model() -> RobertaForMaskedLM:
    Vocab = CONFIG.vocab_axis(VOCAB_SIZE)
    return eqx.filter_jit(RobertaForMaskedLM.init)(
        Vocab, CONFIG, vocab_size=VOCAB_SIZE, key=jax.random.key(0)
    )


@pytest.fixture(scope="module")
def example() -> MlmExample:
    """Rows of 4 to 16 tokens with 0 to 6 masked, so that no two halves weigh the same."""
    rng = np.random.default_rng(0)
    lengths = np.array([16, 4, 9, 16, 12, 5, 16, 7])
    slots = np.array([6, 1, 2, 5, 0, 3, 6, 1])
    is_token = np.arange(Pos.size) < lengths[:, None]
    input_ids = np.where(is_token, rng.integers(5, VOCAB_SIZE, is_token.shape), PAD)
    segment_ids = np.where(is_token, 0, -1)
    positions = np.zeros((Batch.size, Masked.size), np.int32)
    for row, (length, count) in enumerate(zip(lengths, slots, strict=True)):
        positions[row, :count] = np.sort(rng.permutation(length)[:count])
    used = np.arange(Masked.size) < slots[:, None]

    def named(values: np.ndarray, axis: Axis) -> NamedArray:
        return hax.named(values.astype(np.int32), (Batch, axis))

    tokens, segments = named(input_ids, Pos), named(segment_ids, Pos)
    return MlmExample(
        input_ids=tokens,
        segment_ids=segments,
        position_ids=roberta_position_ids(tokens, segments, PAD),
        masked_positions=named(positions, Masked),
        masked_labels=named(rng.integers(5, VOCAB_SIZE, used.shape), Masked),
        masked_weights=named(used, Masked).astype(jnp.float32),
        masked_kinds=named(rng.integers(0, len(MaskKind), used.shape), Masked),
        masked_per_example=hax.named(jnp.float32(used.sum() / Batch.size), ()),
    )


def loss_and_gradients(model: RobertaForMaskedLM, example: MlmExample) -> Result:
    def loss(model: RobertaForMaskedLM, example: MlmExample) -> tuple[jax.Array, dict[str, Metric]]:
        value, metrics = masked_lm_loss(model, example, z_loss_weight=Z_LOSS)
        return value.scalar(), metrics

    return eqx.filter_value_and_grad(loss, has_aux=True)(model, example)


compiled = eqx.filter_jit(loss_and_gradients)


@pytest.fixture(scope="module")
def whole(model: RobertaForMaskedLM, example: MlmExample) -> Result:
    return compiled(model, example)


def assert_same(actual: Result, expected: Result) -> None:
    (loss, metrics), grads = actual
    (expected_loss, expected_metrics), expected_grads = expected
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for name, metric in expected_metrics.items():
        np.testing.assert_allclose(float(metrics[name]), float(metric), rtol=1e-6, err_msg=name)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "microbatches",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow), 8],
)
def test_loss_is_that_of_the_whole_batch_under_any_split(
    model: RobertaForMaskedLM, example: MlmExample, whole: Result, microbatches: int
):
    mapping = {"batch": ResourceAxis.DATA}
    mesh = Mesh(np.array(jax.devices()[:1]), (ResourceAxis.DATA,))

    @eqx.filter_jit
    def accumulated(model: RobertaForMaskedLM, example: MlmExample) -> Result:
        step = microbatched(
            lambda example: loss_and_gradients(model, example),
            Batch,
            Batch.size // microbatches,
            {},
            mapping,
        )
        return step(example)

    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        assert_same(accumulated(model, example), whole)


def test_a_batch_that_is_the_global_batch_counts_itself(
    model: RobertaForMaskedLM, example: MlmExample, whole: Result
):
    alone = dataclasses.replace(example, masked_per_example=None)
    assert_same(compiled(model, alone), whole)


def test_masked_head_is_the_full_head(
    model: RobertaForMaskedLM, example: MlmExample, whole: Result
):
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def full_head(model: RobertaForMaskedLM) -> jax.Array:
        logits = model(example.input_ids, example.segment_ids).array
        at = example.masked_positions.array[..., None]
        logits = jnp.take_along_axis(logits, at, axis=1)
        labels = example.masked_labels.array[..., None]
        log_z = jax.nn.logsumexp(logits, axis=2)
        nll = log_z - jnp.take_along_axis(logits, labels, axis=2)[..., 0]
        weights = example.masked_weights.array
        return ((nll + Z_LOSS * log_z**2) * weights).sum() / weights.sum()

    (loss, _), grads = whole
    full_loss, full_grads = full_head(model)
    np.testing.assert_allclose(loss, full_loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(full_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("masked_per_example", [None, 0.0, 3.0])
def test_nothing_masked(
    model: RobertaForMaskedLM, example: MlmExample, masked_per_example: float | None
):
    per_example = None
    if masked_per_example is not None:
        per_example = hax.named(jnp.float32(masked_per_example), ())
    nothing = dataclasses.replace(
        example,
        masked_weights=hax.zeros_like(example.masked_weights),
        masked_per_example=per_example,
    )
    (loss, metrics), grads = compiled(model, nothing)
    assert loss == 0
    assert {name: float(metric) for name, metric in metrics.items()} == {
        "masked_accuracy": 0.0,
        "num_masked": 0.0,
        "z_loss": 0.0,
    }
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(grads))


def test_untrained_loss_is_uniform(whole: Result):
    (loss, metrics), _ = whole
    nats = float(loss) - Z_LOSS * float(metrics["z_loss"])
    assert nats == pytest.approx(math.log(VOCAB_SIZE), abs=0.05)
    assert float(metrics["z_loss"]) == pytest.approx(math.log(VOCAB_SIZE) ** 2, rel=0.02)
    assert float(metrics["num_masked"]) == 24


def test_padding_columns_take_no_probability(model: RobertaForMaskedLM, example: MlmExample):
    # 28 columns of logit 0 would add ln(128 / 100) to an otherwise uniform loss.
    flat = jax.tree.map(lambda leaf: leaf * 0 if eqx.is_inexact_array(leaf) else leaf, model)
    loss, _ = eqx.filter_jit(masked_lm_loss)(flat, example)
    np.testing.assert_allclose(loss.array, math.log(VOCAB_SIZE), rtol=1e-6)


def test_totals_by_kind(model: RobertaForMaskedLM, example: MlmExample, whole: Result):
    totals = eqx.filter_jit(masked_lm_totals)(model, example)
    (loss, metrics), _ = whole
    weights, kinds = example.masked_weights.array, example.masked_kinds.array
    assert totals.count.array.tolist() == [int(weights[kinds == k].sum()) for k in MaskKind]
    nats = float(loss) - Z_LOSS * float(metrics["z_loss"])
    assert totals.nll.array.sum() / totals.count.array.sum() == pytest.approx(nats, rel=1e-6)
    accuracy = float(metrics["masked_accuracy"])
    assert totals.correct.array.sum() / totals.count.array.sum() == pytest.approx(accuracy)


def test_totals_of_parts_add_up(model: RobertaForMaskedLM, example: MlmExample):
    compiled_totals = eqx.filter_jit(masked_lm_totals)
    whole = compiled_totals(model, example)
    parts = [
        compiled_totals(model, keep_rows(example, np.arange(Batch.size) % 2 == parity))
        for parity in (0, 1)
    ]
    together = parts[0] + parts[1]
    np.testing.assert_allclose(together.nll.array, whole.nll.array, rtol=1e-6)
    np.testing.assert_array_equal(together.correct.array, whole.correct.array)
    np.testing.assert_array_equal(together.count.array, whole.count.array)


def keep_rows(example: MlmExample, kept: np.ndarray) -> MlmExample:
    weights = example.masked_weights * hax.named(kept.astype(np.float32), Batch)
    return dataclasses.replace(example, masked_weights=weights)


def test_perfect_predictions_are_correct(model: RobertaForMaskedLM, example: MlmExample):
    # A bias alone predicts token 7 everywhere.
    bias = hax.nn.one_hot(7, model.Vocab, dtype=jnp.float32) * 1e3
    certain = eqx.tree_at(lambda m: m.lm_head.bias, model, bias)
    sevens = dataclasses.replace(example, masked_labels=hax.full_like(example.masked_labels, 7))
    loss, metrics = eqx.filter_jit(masked_lm_loss)(certain, sevens)
    assert float(loss.array) < 1e-6
    assert float(metrics["masked_accuracy"]) == 1
    totals: Mapping[str, NamedArray] = vars(eqx.filter_jit(masked_lm_totals)(certain, sevens))
    np.testing.assert_array_equal(totals["correct"].array, totals["count"].array)


def test_loss_is_float32_under_bfloat16_compute(model: RobertaForMaskedLM, example: MlmExample):
    half = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, model
    )
    loss, metrics = eqx.filter_jit(masked_lm_loss)(half, example)
    assert loss.dtype == jnp.float32
    assert float(loss.array) == pytest.approx(math.log(VOCAB_SIZE), abs=0.05)
    assert float(metrics["num_masked"]) == 24
