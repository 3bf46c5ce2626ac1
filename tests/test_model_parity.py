"""The model gives the numbers of transformers' RobertaForMaskedLM (eager, float32).

``golden/hf_tiny_roberta`` holds a checkpoint with random weights and what torch computed from
it; ``versions.json`` there says with which versions. ``test_parity_torch.py`` repeats this live.
"""

import dataclasses
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax import NamedArray
from levanter.layers.attention import AttentionMask
from safetensors.numpy import load_file
from scipy import special
from transformers import RobertaConfig as HfRobertaConfig

from mlm_recipe.data.example import MlmExample
from mlm_recipe.loss import masked_lm_loss
from mlm_recipe.model import hf
from mlm_recipe.model.config import RobertaConfig
from mlm_recipe.model.position_ids import roberta_position_ids
from mlm_recipe.model.roberta import RobertaForMaskedLM
from mlm_recipe.optim import RobertaAdamWConfig

GOLDEN = Path(__file__).parent / "golden" / "hf_tiny_roberta"
CASES = ("padded", "full", "maxlen", "leftpad")
ROWS, LENGTH, SLOTS = 4, 64, 24  # one shape for all cases, so that each program compiles once
PAD = 1
FULL_GRADIENTS = (
    "lm_head.bias",
    "roberta.embeddings.position_embeddings.weight",
    "roberta.encoder.layer.0.attention.self.query.weight",
    "roberta.encoder.layer.2.output.LayerNorm.bias",
)

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def golden() -> Tensors:
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return load_file(GOLDEN / "model.safetensors")


@pytest.fixture(scope="module")
def model(weights: Tensors) -> RobertaForMaskedLM:
    config = RobertaConfig.from_hf_config(HfRobertaConfig.from_pretrained(GOLDEN))
    config = dataclasses.replace(config, gradient_checkpointing=False)
    return hf.from_hf_state_dict(config, config.vocab_axis(1000), weights)


@pytest.fixture(scope="module")
def losses(model: RobertaForMaskedLM, golden: Tensors) -> dict[str, float]:
    return {case: float(loss_and_gradients(model, example(golden, case))[0]) for case in CASES}


@pytest.fixture(scope="module")
def gradients(model: RobertaForMaskedLM, golden: Tensors) -> RobertaForMaskedLM:
    return loss_and_gradients(model, example(golden, "padded"))[1]


def exported(model: RobertaForMaskedLM) -> Tensors:
    return jax.device_get(eqx.filter_jit(hf.to_hf_state_dict)(model))


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss_and_gradients(model: RobertaForMaskedLM, example: MlmExample) -> jax.Array:
    return masked_lm_loss(model, example)[0].scalar()


@eqx.filter_jit
def forward(
    model: RobertaForMaskedLM, input_ids: NamedArray, segment_ids: NamedArray | None
) -> NamedArray:
    return model(input_ids, segment_ids)["vocab", : model.vocab_size]


@eqx.filter_jit
def hidden_states(
    model: RobertaForMaskedLM, input_ids: NamedArray, segment_ids: NamedArray
) -> list[NamedArray]:
    mask = AttentionMask().with_segment_ids(segment_ids)
    position_ids = roberta_position_ids(input_ids, segment_ids, PAD)
    states = [model.embeddings(input_ids, position_ids, key=None)]
    for layer in model.layers.unstacked():
        states.append(layer(states[-1], mask))
    return states


def rows(values: np.ndarray, *, fill: int, axis: str = "position") -> NamedArray:
    """Int rows, filled up to the common shape."""
    size = LENGTH if axis == "position" else SLOTS
    padding = [(0, ROWS - values.shape[0]), (0, size - values.shape[1])]
    return hax.named(
        np.pad(values.astype(np.int32), padding, constant_values=fill), ("batch", axis)
    )


def inputs(golden: Tensors, case: str) -> tuple[NamedArray, NamedArray]:
    """Token ids, and segments: 0 where transformers' attention mask is 1, else -1."""
    input_ids = rows(golden[f"{case}.input_ids"], fill=PAD)
    return input_ids, rows(golden[f"{case}.attention_mask"] - 1, fill=-1)


def example(golden: Tensors, case: str) -> MlmExample:
    """The labelled positions (label != -100) of a case, gathered into ``masked`` slots."""
    input_ids, segment_ids = inputs(golden, case)
    labels = golden[f"{case}.labels"]
    positions = np.zeros((len(labels), SLOTS), np.int32)
    used = np.zeros_like(positions)
    for row, row_labels in enumerate(labels):
        labelled = np.flatnonzero(row_labels != -100)
        positions[row, : len(labelled)] = labelled
        used[row, : len(labelled)] = 1
    targets = np.maximum(np.take_along_axis(labels, positions, axis=1), 0)
    return MlmExample(
        input_ids=input_ids,
        segment_ids=segment_ids,
        position_ids=roberta_position_ids(input_ids, segment_ids, PAD),
        masked_positions=rows(positions, fill=0, axis="masked"),
        masked_labels=rows(targets, fill=0, axis="masked"),
        masked_weights=rows(used, fill=0, axis="masked").astype(np.float32),
        masked_kinds=rows(np.zeros_like(positions), fill=0, axis="masked"),
    )


def real_tokens(golden: Tensors, case: str, values: NamedArray) -> np.ndarray:
    """The values at positions whose attention mask is 1, in order."""
    mask = golden[f"{case}.attention_mask"]
    return np.asarray(values.array)[: mask.shape[0], : mask.shape[1]][mask == 1]


@pytest.mark.parametrize("case", ["padded", "full", "maxlen"])
def test_logits(model: RobertaForMaskedLM, golden: Tensors, case: str):
    logits = forward(model, *inputs(golden, case))
    expected = golden[f"{case}.logits"][golden[f"{case}.attention_mask"] == 1]
    np.testing.assert_allclose(real_tokens(golden, case, logits), expected, rtol=0, atol=1e-5)


def test_logits_of_a_row_padded_on_the_left(model: RobertaForMaskedLM, golden: Tensors):
    logits = forward(model, *inputs(golden, "leftpad"))["batch", 1, "position", :32]
    real = golden["leftpad.attention_mask"][1] == 1
    expected = golden["leftpad.logits_row1"][real]
    np.testing.assert_allclose(logits.array[real], expected, rtol=0, atol=1e-5)


def test_without_segments_padding_is_attended_to(model: RobertaForMaskedLM, golden: Tensors):
    input_ids = hax.named(golden["padded.input_ids"][1], "position")
    logits = forward(model, input_ids, None)
    np.testing.assert_allclose(logits.array, golden["nomask.logits_row1"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["padded", "leftpad", "maxlen"])
def test_hidden_states(model: RobertaForMaskedLM, golden: Tensors, case: str):
    for index, states in enumerate(hidden_states(model, *inputs(golden, case))):
        expected = golden[f"{case}.hidden_states.{index}"]
        expected = expected[golden[f"{case}.attention_mask"] == 1]
        np.testing.assert_allclose(real_tokens(golden, case, states), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["padded", "leftpad"])
def test_position_ids(golden: Tensors, case: str):
    position_ids = roberta_position_ids(*inputs(golden, case), PAD)
    expected = rows(golden[f"{case}.position_ids"], fill=PAD)
    np.testing.assert_array_equal(position_ids.array, expected.array)


@pytest.mark.parametrize("case", CASES)
def test_loss(losses: dict[str, float], golden: Tensors, case: str):
    np.testing.assert_allclose(losses[case], golden[f"{case}.loss"][0], rtol=1e-6)


def test_loss_is_closer_to_float64_than_float32_rounds(losses: dict[str, float], golden: Tensors):
    np.testing.assert_allclose(losses["padded"], golden["padded.loss_f64"][0], rtol=2.0**-22)


@pytest.mark.parametrize("case", CASES)
def test_loss_of_each_token(model: RobertaForMaskedLM, golden: Tensors, case: str):
    labels = golden[f"{case}.labels"][golden[f"{case}.attention_mask"] == 1]
    logits = real_tokens(golden, case, forward(model, *inputs(golden, case)))
    labelled = labels != -100
    logits, labels = logits[labelled].astype(np.float64), labels[labelled]
    nll = -special.log_softmax(logits, axis=1)[np.arange(len(labels)), labels]
    expected = golden[f"{case}.token_nll"][golden[f"{case}.labels"] != -100]
    np.testing.assert_allclose(nll, expected, rtol=0, atol=1e-5)


def test_gradients(gradients: RobertaForMaskedLM, golden: Tensors):
    ours = exported(gradients)
    for name in FULL_GRADIENTS:
        np.testing.assert_allclose(ours[name], golden[f"padded.grad.{name}"], rtol=1e-4, atol=1e-6)
    words = "roberta.embeddings.word_embeddings.weight"
    np.testing.assert_allclose(
        ours[words][:32], golden[f"padded.grad.{words}.rows0_32"], rtol=1e-4, atol=1e-6
    )


def test_gradient_norms_of_all_parameters(gradients: RobertaForMaskedLM, golden: Tensors):
    norms = {name: np.linalg.norm(g) for name, g in exported(gradients).items()}
    prefix = "padded.gradnorm."
    expected = {
        name.removeprefix(prefix): value[0]
        for name, value in golden.items()
        if name.startswith(prefix)
    }
    total = expected.pop("__global__")
    assert norms.keys() == expected.keys()
    for name, norm in norms.items():
        # The bias of a key shifts every score of a query alike: its exact gradient is 0.
        np.testing.assert_allclose(norm, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(np.linalg.norm(list(norms.values())), total, rtol=1e-5)


def adamw(weight: np.ndarray, gradient: np.ndarray, *, decay: float) -> np.ndarray:
    """The first step of torch.optim.AdamW at rate 1e-3, betas (0.9, 0.98), eps 1e-6, in f64."""
    weight, gradient = weight.astype(np.float64), gradient.astype(np.float64)
    mean = (1 - 0.9) * gradient / (1 - 0.9)
    variance = (1 - 0.98) * gradient**2 / (1 - 0.98)
    return weight * (1 - 1e-3 * decay) - 1e-3 * mean / (np.sqrt(variance) + 1e-6)


def test_one_adamw_step(
    model: RobertaForMaskedLM, gradients: RobertaForMaskedLM, golden: Tensors, weights: Tensors
):
    config = RobertaAdamWConfig(
        learning_rate=1e-3, weight_decay=0.1, warmup=0, lr_schedule="constant"
    )
    optimizer = config.build(num_train_steps=10)
    parameters = eqx.filter(model, eqx.is_inexact_array)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(parameters), parameters)
    stepped = exported(eqx.apply_updates(model, updates))

    for name, gradient in exported(gradients).items():
        decay = 0.0 if name.endswith("bias") or "ayer_norm" in name or "LayerNorm" in name else 0.1
        expected = adamw(weights[name], np.asarray(gradient), decay=decay)
        np.testing.assert_allclose(stepped[name], expected, rtol=0, atol=1e-7, err_msg=name)
        if name in FULL_GRADIENTS:
            expected = adamw(weights[name], golden[f"padded.grad.{name}"], decay=decay)
            np.testing.assert_allclose(stepped[name], expected, rtol=0, atol=1e-5, err_msg=name)


def test_export_gives_back_the_checkpoint(model: RobertaForMaskedLM, weights: Tensors):
    tensors = exported(model)
    assert tensors.keys() == weights.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, weights[name], err_msg=name)
