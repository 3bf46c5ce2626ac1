"""Checkpoints in Hugging Face's form: what is read, and what is refused by name."""

import equinox as eqx
import jax
import numpy as np
import pytest

from mlm_recipe.errors import ConfigError
from mlm_recipe.model import hf
from mlm_recipe.model.config import RobertaConfig
from mlm_recipe.model.roberta import RobertaForMaskedLM

VOCAB_SIZE = 100
CONFIG = RobertaConfig(
    max_seq_len=16, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4
)
VOCAB = CONFIG.vocab_axis(VOCAB_SIZE)

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    model = eqx.filter_jit(RobertaForMaskedLM.init)(
        VOCAB, CONFIG, vocab_size=VOCAB_SIZE, key=jax.random.key(0)
    )
    return exported(model)


def exported(model: RobertaForMaskedLM) -> Tensors:
    return jax.device_get(eqx.filter_jit(hf.to_hf_state_dict)(model))


def read(tensors: Tensors) -> RobertaForMaskedLM:
    return hf.from_hf_state_dict(CONFIG, VOCAB, tensors, vocab_size=VOCAB_SIZE)


def test_older_checkpoints_are_read(tensors: Tensors):
    older = tensors | {
        "roberta.embeddings.position_ids": np.arange(18)[None],
        "roberta.pooler.dense.weight": np.zeros((32, 32), np.float32),
        "lm_head.decoder.weight": tensors["roberta.embeddings.word_embeddings.weight"],
        "lm_head.decoder.bias": tensors["lm_head.bias"],
    }
    back = exported(read(older))
    assert back.keys() == tensors.keys()
    for name, value in back.items():
        np.testing.assert_array_equal(value, tensors[name], err_msg=name)


def test_half_precision_checkpoints_are_read_in_float32(tensors: Tensors):
    model = read({name: value.astype(np.float16) for name, value in tensors.items()})
    assert {leaf.dtype for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))} == {
        np.dtype(np.float32)
    }


def test_padding_rows_are_zero(tensors: Tensors):
    model = read({name: np.ones_like(value) for name, value in tensors.items()})
    words = np.asarray(model.embeddings.word_embeddings.weight.array)
    assert (words[:VOCAB_SIZE] == 1).all() and (words[VOCAB_SIZE:] == 0).all()
    assert (np.asarray(model.lm_head.bias.array)[VOCAB_SIZE:] == 0).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lm_head.bias": None}, r"lm_head\.bias.*missing"),
        ({"lm_head.bias": np.zeros(101, np.float32)}, r"lm_head\.bias.*\(101,\).*\(100,\)"),
        ({"lm_head.extra": np.zeros(1)}, r"lm_head\.extra.*no place"),
        ({"lm_head.decoder.bias": np.ones(100)}, r"lm_head\.decoder\.bias.*differs"),
        (
            {"roberta.encoder.layer.2.output.dense.bias": np.zeros(32)},
            r"layer\.2\.output\.dense\.bias.*no place",
        ),
    ],
)
def test_other_checkpoints_are_refused_by_name(
    tensors: Tensors, change: dict[str, np.ndarray | None], message: str
):
    changed = {**tensors, **change}
    with pytest.raises(ConfigError, match=message):
        read({name: value for name, value in changed.items() if value is not None})
