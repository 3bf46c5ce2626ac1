"""Live against torch: logits, loss, gradients, one AdamW step, and both ways through files."""

from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax import NamedArray
from safetensors.numpy import load_file, save_file
from transformers import RobertaConfig as HfRobertaConfig

from mlm_recipe.data.example import MlmExample
from mlm_recipe.loss import masked_lm_loss
from mlm_recipe.model import hf
from mlm_recipe.model.config import RobertaConfig
from mlm_recipe.model.position_ids import roberta_position_ids
from mlm_recipe.model.roberta import RobertaForMaskedLM
from mlm_recipe.optim import RobertaAdamWConfig

pytestmark = pytest.mark.parity

Tensors = dict[str, np.ndarray]

PAD, LENGTH = 1, 20
BASE = {
    "vocab_size": 203,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": LENGTH + 2,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
CONFIGS = {
    "base": BASE,
    "one layer, one head": BASE | {"num_hidden_layers": 1, "num_attention_heads": 1},
    "two token types": BASE | {"type_vocab_size": 2},
    "another epsilon, narrow": BASE | {"layer_norm_eps": 1e-3, "intermediate_size": 8},
    "spare positions": BASE | {"max_position_embeddings": 40},
}


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[request.param]


@pytest.fixture(scope="module")
def batch() -> Tensors:
    """Rows that are full, padded on either side, and padded within."""
    rng = np.random.default_rng(0)
    input_ids = rng.integers(5, BASE["vocab_size"], (4, LENGTH))
    input_ids[1, 12:] = input_ids[2, :5] = input_ids[3, 7:9] = PAD
    real = input_ids != PAD
    chosen = real & (rng.random(real.shape) < 0.3)
    labels = np.where(chosen, rng.integers(5, BASE["vocab_size"], real.shape), -100)
    return {"input_ids": input_ids, "attention_mask": real.astype(np.int64), "labels": labels}


@pytest.fixture(scope="module")
def directory(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that transformers saved."""
    pytest.importorskip("torch")
    import torch_reference

    directory = tmp_path_factory.mktemp("torch")
    torch_reference.save(config, directory)
    return directory


@pytest.fixture(scope="module")
def model(directory: Path) -> RobertaForMaskedLM:
    config = RobertaConfig.from_hf_config(HfRobertaConfig.from_pretrained(directory))
    assert config.vocab_size is not None
    Vocab = config.vocab_axis(config.vocab_size)
    return hf.from_hf_state_dict(config, Vocab, load_file(directory / "model.safetensors"))


def named(values: np.ndarray, axis: str = "position") -> NamedArray:
    return hax.named(values.astype(np.int32), ("batch", axis))


def example(batch: Tensors) -> MlmExample:
    """Every position is a slot; those with a label carry weight."""
    input_ids, segment_ids = named(batch["input_ids"]), named(batch["attention_mask"] - 1)
    labelled = batch["labels"] != -100
    everywhere = np.arange(LENGTH) * np.ones_like(batch["labels"])
    return MlmExample(
        input_ids=input_ids,
        segment_ids=segment_ids,
        position_ids=roberta_position_ids(input_ids, segment_ids, PAD),
        masked_positions=named(everywhere, "masked"),
        masked_labels=named(np.maximum(batch["labels"], 0), "masked"),
        masked_weights=named(labelled, "masked").astype(np.float32),
        masked_kinds=named(np.zeros_like(labelled), "masked"),
    )


@eqx.filter_jit
def forward(
    model: RobertaForMaskedLM, input_ids: NamedArray, segment_ids: NamedArray | None
) -> jax.Array:
    return model(input_ids, segment_ids)["vocab", : model.vocab_size].array


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss_and_gradients(model: RobertaForMaskedLM, example: MlmExample) -> jax.Array:
    return masked_lm_loss(model, example)[0].scalar()


def exported(model: RobertaForMaskedLM) -> Tensors:
    return jax.device_get(eqx.filter_jit(hf.to_hf_state_dict)(model))


def test_logits(directory: Path, model: RobertaForMaskedLM, batch: Tensors):
    import torch_reference

    reference, _ = torch_reference.load(directory)
    segment_ids = named(batch["attention_mask"] - 1)
    real = batch["attention_mask"] == 1
    ours = np.asarray(forward(model, named(batch["input_ids"]), segment_ids))
    theirs = torch_reference.logits(reference, batch)
    np.testing.assert_allclose(ours[real], theirs[real], rtol=0, atol=1e-5)

    unmasked = {"input_ids": batch["input_ids"]}
    ours = forward(model, named(batch["input_ids"]), None)
    theirs = torch_reference.logits(reference, unmasked)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_loss_gradients_and_one_adamw_step(
    directory: Path, model: RobertaForMaskedLM, batch: Tensors
):
    import torch_reference

    reference, _ = torch_reference.load(directory)
    loss, gradients = loss_and_gradients(model, example(batch))
    their_loss, their_gradients = torch_reference.loss_and_gradients(reference, batch)
    np.testing.assert_allclose(loss, their_loss, rtol=1e-6)
    ours = exported(gradients)
    assert ours.keys() == their_gradients.keys()
    for name, gradient in ours.items():
        theirs = their_gradients[name]
        np.testing.assert_allclose(gradient, theirs, rtol=1e-4, atol=1e-6, err_msg=name)

    optimizer = RobertaAdamWConfig(
        learning_rate=1e-3, weight_decay=0.1, warmup=0, lr_schedule="constant"
    ).build(num_train_steps=10)
    parameters = eqx.filter(model, eqx.is_inexact_array)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(parameters), parameters)
    stepped = exported(eqx.apply_updates(model, updates))
    theirs = torch_reference.adamw_step(reference, learning_rate=1e-3, decay=0.1)
    for name, weight in stepped.items():
        np.testing.assert_allclose(weight, theirs[name], rtol=0, atol=1e-5, err_msg=name)


def test_transformers_loads_what_we_export(
    directory: Path, model: RobertaForMaskedLM, batch: Tensors, tmp_path: Path
):
    import torch_reference

    tensors = exported(model)
    assert tensors.keys() == load_file(directory / "model.safetensors").keys()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.config.to_hf_config(model.vocab_size).save_pretrained(tmp_path)

    original, _ = torch_reference.load(directory)
    reloaded, unmatched = torch_reference.load(tmp_path)
    assert not unmatched
    np.testing.assert_array_equal(
        torch_reference.logits(reloaded, batch), torch_reference.logits(original, batch)
    )
