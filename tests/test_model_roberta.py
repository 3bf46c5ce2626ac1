"""RobertaForMaskedLM: initialisation, packing, padding, dropout, execution variants."""

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionBackend
from levanter.utils.tree_utils import inference_mode

from mlm_recipe.errors import ConfigError
from mlm_recipe.model import hf
from mlm_recipe.model.config import RobertaConfig
from mlm_recipe.model.roberta import RobertaForMaskedLM

PAD, VOCAB_SIZE = 1, 100
CONFIG = RobertaConfig(
    max_seq_len=16,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=2,
    num_heads=4,
    gradient_checkpointing=False,
)
KEY = jax.random.key(0)
DROPOUT_KEY = jax.random.key(1, impl="unsafe_rbg")  # compiles in a fraction of threefry's time


def initialised(config: RobertaConfig, key: jax.Array) -> RobertaForMaskedLM:
    Vocab = config.vocab_axis(VOCAB_SIZE)
    return RobertaForMaskedLM.init(Vocab, config, vocab_size=VOCAB_SIZE, key=key)


@pytest.fixture(scope="module")
def model() -> RobertaForMaskedLM:
    """Weights large enough for attention to matter."""
    model = eqx.filter_jit(initialised)(CONFIG, KEY)
    return jax.tree.map(lambda leaf: leaf * 4 if eqx.is_inexact_array(leaf) else leaf, model)


def variant(model: RobertaForMaskedLM, **changes: Any) -> RobertaForMaskedLM:
    """The same weights under another configuration."""
    config = dataclasses.replace(CONFIG, **changes)
    template = eqx.filter_eval_shape(initialised, config, KEY)
    return jax.tree.unflatten(jax.tree.structure(template), jax.tree.leaves(model))


def forward(
    model: RobertaForMaskedLM,
    input_ids: NamedArray,
    segment_ids: NamedArray | None,
    key: jax.Array | None = None,
) -> np.ndarray:
    """Logits of a row, ``(position, vocab)``, without the padding columns."""
    return np.asarray(compiled(model, input_ids, segment_ids, key=key).array)[:, :VOCAB_SIZE]


@eqx.filter_jit
def compiled(model: RobertaForMaskedLM, *args: Any, **kwargs: Any) -> NamedArray:
    return model(*args, **kwargs)


@dataclass(frozen=True)
class Executable:
    """The mean log-partition of a row and its gradients, and the program that gave them."""

    value: np.ndarray
    gradients: RobertaForMaskedLM
    flops: float
    loops: bool

    @staticmethod
    def compile(model: RobertaForMaskedLM) -> "Executable":
        @eqx.filter_value_and_grad
        def mean_log_partition(model: RobertaForMaskedLM, key: jax.Array) -> jax.Array:
            logits = model(PACKED, SEGMENTS, key=key)
            return hax.mean(hnn.logsumexp(logits, "vocab")).scalar()

        arrays, static = eqx.partition(model, eqx.is_array)
        program = jax.jit(lambda arrays, key: mean_log_partition(eqx.combine(arrays, static), key))
        executable = program.lower(arrays, DROPOUT_KEY).compile()
        value, gradients = jax.device_get(executable(arrays, DROPOUT_KEY))
        cost = executable.cost_analysis()
        assert cost is not None
        layers = re.compile(r" while\(.*scan\(layers\)")
        loops = layers.search(executable.as_text() or "") is not None
        return Executable(value, gradients, cost["flops"], loops)


def exported(model: RobertaForMaskedLM) -> dict[str, np.ndarray]:
    return jax.device_get(eqx.filter_jit(hf.to_hf_state_dict)(model))


def row(values: list[int]) -> NamedArray:
    return hax.named(np.array(values, np.int32), "position")


# One row: documents of 7 and 5 tokens, then padding.
FIRST = [0, 9, 33, 8, 71, 40, 2]
SECOND = [0, 50, 6, 17, 2]
PACKED = row([*FIRST, *SECOND, *[PAD] * 4])
SEGMENTS = row([*[0] * 7, *[1] * 5, *[-1] * 4])


def test_initialisation_is_robertas():
    config = dataclasses.replace(CONFIG, hidden_dim=128, intermediate_dim=512)
    model = jax.device_get(eqx.filter_jit(initialised)(config, KEY))
    embeddings = model.embeddings
    words = embeddings.word_embeddings.weight.array
    positions = embeddings.position_embeddings.weight.array
    assert (words[PAD] == 0).all() and (words[VOCAB_SIZE:] == 0).all()
    assert (positions[PAD] == 0).all()
    attention = model.layers.stacked.attention
    drawn = {
        "words": np.delete(words[:VOCAB_SIZE], PAD, axis=0),
        "positions": np.delete(positions, PAD, axis=0),
        "token types": embeddings.token_type_embeddings.weight.array,
        "query": attention.query.weight.array,
        "attention output": attention.output.weight.array,
        "intermediate": model.layers.stacked.intermediate.weight.array,
        "output": model.layers.stacked.output.weight.array,
        "head": model.lm_head.dense.weight.array,
    }
    for name, weight in drawn.items():
        standard_error = 0.02 / np.sqrt(weight.size)
        assert abs(weight.mean()) < 5 * standard_error, name
        assert abs(weight.std() - 0.02) < 5 * standard_error / np.sqrt(2), name
        assert len(np.unique(weight)) > 0.99 * weight.size, name
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = jax.tree_util.keystr(path)
        if ".bias" in name:
            assert (leaf == 0).all(), name
        elif "layer_norm" in name and ".weight" in name:
            assert (leaf == 1).all(), name


def test_decoder_is_the_word_embedding(model: RobertaForMaskedLM):
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    with_vocabulary = [leaf.shape for leaf in leaves if 128 in leaf.shape]
    assert sorted(with_vocabulary) == [(128,), (128, 32)]
    padding = 28 * (32 + 1)
    assert sum(leaf.size for leaf in leaves) == CONFIG.total_trainable_params(VOCAB_SIZE) + padding


def test_heads_are_an_axis(model: RobertaForMaskedLM):
    attention = model.layers.stacked.attention
    for projection in (attention.query, attention.key, attention.value):
        assert [axis.name for axis in projection.weight.axes] == [
            "layers",
            "heads",
            "head_size",
            "embed",
        ]
    assert [axis.name for axis in attention.output.weight.axes][1:] == [
        "embed",
        "heads",
        "head_size",
    ]


def test_vocabulary_larger_than_its_axis_is_refused():
    with pytest.raises(ConfigError, match=r"model.vocab_size = 101"):
        RobertaForMaskedLM.init(Axis("vocab", 100), CONFIG, vocab_size=101, key=KEY)


def test_packed_documents_equal_separate_ones(model: RobertaForMaskedLM):
    packed = forward(model, PACKED, SEGMENTS)
    for document, start in ((FIRST, 0), (SECOND, 7)):
        size, padding = len(document), 16 - len(document)
        alone = forward(
            model, row([*document, *[PAD] * padding]), row([*[0] * size, *[-1] * padding])
        )
        np.testing.assert_allclose(
            packed[start : start + size], alone[:size], rtol=0, atol=1e-5 * abs(alone).max()
        )


@pytest.mark.parametrize("dropout", [False, True])
def test_documents_do_not_leak(model: RobertaForMaskedLM, dropout: bool):
    key = DROPOUT_KEY if dropout else None
    changed = row([*FIRST, 0, 51, 7, 18, 2, *[PAD] * 4])
    before, after = (forward(model, ids, SEGMENTS, key) for ids in (PACKED, changed))
    np.testing.assert_array_equal(before[:7], after[:7])
    assert abs(before[7:12] - after[7:12]).max() > 1e-2


def test_one_segment_attends_everywhere(model: RobertaForMaskedLM):
    everywhere = forward(model, PACKED, None)
    one_segment = forward(model, PACKED, row([0] * 16))
    np.testing.assert_allclose(everywhere, one_segment, rtol=0, atol=1e-5 * abs(everywhere).max())
    assert abs(everywhere - forward(model, PACKED, SEGMENTS))[:7].max() > 1e-2


def test_padding_columns_are_never_predicted(model: RobertaForMaskedLM):
    logits = np.asarray(compiled(model, PACKED, SEGMENTS, key=None).array)
    assert logits.shape == (16, 128)
    assert (logits[:, VOCAB_SIZE:] == -np.inf).all()
    assert np.isfinite(logits[:, :VOCAB_SIZE]).all()
    assert exported(model)["lm_head.bias"].shape == (VOCAB_SIZE,)


EXECUTIONS = {
    "scan": {},
    "scan, recompute": {"gradient_checkpointing": True},
    "unroll": {"scan_layers": False},
    "unroll, recompute": {"scan_layers": False, "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def execute(model: RobertaForMaskedLM) -> Callable[[str], Executable]:
    """The same weights, compiled in every way the layers can be executed, on demand."""
    return functools.cache(lambda name: Executable.compile(variant(model, **EXECUTIONS[name])))


def test_rows_that_must_stay_zero_get_no_gradient(execute: Callable[[str], Executable]):
    grads = execute("scan").gradients
    words = grads.embeddings.word_embeddings.weight.array
    positions = grads.embeddings.position_embeddings.weight.array
    assert (positions[PAD] == 0).all() and (positions[2] != 0).all()
    assert (words[VOCAB_SIZE:] == 0).all()
    assert (grads.lm_head.bias.array[VOCAB_SIZE:] == 0).all()
    # The decoder trains the row of <pad>, as in torch.
    assert (words[PAD] != 0).all()


@pytest.mark.parametrize(
    "name", ["scan, recompute", pytest.param("unroll", marks=pytest.mark.slow), "unroll, recompute"]
)
def test_execution_changes_no_number(execute: Callable[[str], Executable], name: str):
    actual, expected = (
        jax.tree.leaves((execute(n).value, execute(n).gradients)) for n in (name, "scan")
    )
    largest = max(abs(leaf).max() for leaf in expected)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * largest)


def test_layers_are_a_loop_or_none(execute: Callable[[str], Executable]):
    assert execute("scan").loops
    assert not execute("unroll, recompute").loops


@pytest.mark.slow
def test_unrolled_layers_recompute_too(execute: Callable[[str], Executable]):
    # Without an optimization barrier XLA merges the recomputation with what it repeats.
    assert execute("unroll, recompute").flops > 1.1 * execute("unroll").flops


def test_dropout_needs_a_key_and_training_mode(model: RobertaForMaskedLM):
    evaluated = forward(model, PACKED, SEGMENTS)
    trained = forward(model, PACKED, SEGMENTS, DROPOUT_KEY)
    inference = forward(inference_mode(model, True), PACKED, SEGMENTS, DROPOUT_KEY)
    np.testing.assert_array_equal(evaluated, inference)
    assert abs(evaluated - trained).max() > 1e-2
    again = inference_mode(inference_mode(model, True), False)
    np.testing.assert_array_equal(trained, forward(again, PACKED, SEGMENTS, DROPOUT_KEY))


@pytest.mark.parametrize("rate", ["hidden_dropout", "attention_dropout"])
def test_each_dropout_rate_is_used(model: RobertaForMaskedLM, rate: str):
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    dropping = variant(model, **(off | {rate: 0.5}))
    first, second = (
        forward(dropping, PACKED, SEGMENTS, key) for key in jax.random.split(DROPOUT_KEY)
    )
    assert abs(first - second).max() > 1e-2


def test_fused_attention_gives_the_same_numbers(model: RobertaForMaskedLM):
    fused = variant(model, attn_backend=AttentionBackend.JAX_FLASH, flash_attention_block_size=8)
    actual, expected = (forward(m, PACKED, SEGMENTS) for m in (fused, model))
    assert not np.array_equal(actual, expected)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * abs(expected).max())
    # With dropout both take the plain path.
    actual, expected = (forward(m, PACKED, SEGMENTS, DROPOUT_KEY) for m in (fused, model))
    np.testing.assert_array_equal(actual, expected)


def test_bfloat16(model: RobertaForMaskedLM):
    half = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf, model
    )
    actual, expected = (forward(m, PACKED, SEGMENTS, DROPOUT_KEY) for m in (half, model))
    assert actual.dtype == jnp.bfloat16
    error = actual.astype(np.float32) - expected
    assert np.sqrt((error**2).mean() / (expected**2).mean()) < 0.02


@pytest.mark.parametrize("batch", [(), ("device", "batch")])
def test_head_at_masked_positions_is_the_full_head_there(
    model: RobertaForMaskedLM, batch: tuple[str, ...]
):
    shape = (2, 3)[: len(batch)]
    rng = np.random.default_rng(0)
    input_ids = hax.named(rng.integers(5, VOCAB_SIZE, (*shape, 16)), (*batch, "position"))
    where = hax.named(rng.integers(0, 16, (*shape, 5)), (*batch, "masked"))

    @eqx.filter_jit
    def logits(model: RobertaForMaskedLM) -> tuple[NamedArray, NamedArray]:
        return model(input_ids, None), model(input_ids, None, masked_positions=where)

    full, at_masked = logits(model)
    assert [axis.name for axis in at_masked.axes] == [*batch, "masked", "vocab"]
    expected = np.take_along_axis(
        np.asarray(full.array), np.asarray(where.array)[..., None], axis=-2
    )
    np.testing.assert_allclose(at_masked.array, expected, rtol=1e-5, atol=1e-4)
