"""Tensor parallelism over heads, feed-forward width and vocabulary changes no number."""

import os
import subprocess
import sys

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import Mesh

from mlm_recipe.data.example import MlmExample
from mlm_recipe.loss import masked_lm_loss
from mlm_recipe.model.config import RobertaConfig
from mlm_recipe.model.position_ids import roberta_position_ids
from mlm_recipe.model.roberta import RobertaForMaskedLM

CONFIG = RobertaConfig(
    max_seq_len=16,
    hidden_dim=32,
    intermediate_dim=64,
    num_layers=2,
    num_heads=4,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
VOCAB_SIZE = 100
TENSOR_PARALLEL = {"heads": "model", "mlp": "model", "vocab": "model"}
COMPUTE = {"batch": "data", **TENSOR_PARALLEL}
PARAMETERS = {"embed": "data", **TENSOR_PARALLEL}


@pytest.mark.slow
def test_eight_devices_give_the_numbers_of_one():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, __file__], env=environment, check=True, timeout=300)


def example() -> MlmExample:
    Batch, Masked = Axis("batch", 4), Axis("masked", 3)
    rng = np.random.default_rng(0)
    segments = np.repeat([0, 1, 1, -1], 4) * np.ones((Batch.size, 1), np.int32)
    input_ids = np.where(segments < 0, 1, rng.integers(5, VOCAB_SIZE, segments.shape))
    tokens = hax.named(input_ids.astype(np.int32), (Batch, CONFIG.max_Pos))
    segment_ids = hax.named(segments.astype(np.int32), (Batch, CONFIG.max_Pos))

    def drawn(low: int, high: int) -> hax.NamedArray:
        values = rng.integers(low, high, (Batch.size, Masked.size))
        return hax.named(values.astype(np.int32), (Batch, Masked))

    return MlmExample(
        input_ids=tokens,
        segment_ids=segment_ids,
        position_ids=roberta_position_ids(tokens, segment_ids, 1),
        masked_positions=drawn(0, 12),
        masked_labels=drawn(5, VOCAB_SIZE),
        masked_weights=drawn(0, 2).astype(np.float32),
        masked_kinds=drawn(0, 3),
    )


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss_and_gradients(model: RobertaForMaskedLM, example: MlmExample) -> jax.Array:
    return masked_lm_loss(model, example)[0].scalar()


def main() -> None:
    assert jax.device_count() == 8
    init = eqx.filter_jit(RobertaForMaskedLM.init)
    model = init(
        CONFIG.vocab_axis(VOCAB_SIZE), CONFIG, vocab_size=VOCAB_SIZE, key=jax.random.key(0)
    )
    expected = loss_and_gradients(model, example())

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    with jax.set_mesh(mesh), hax.axis_mapping(COMPUTE):
        sharded = hax.shard(model, PARAMETERS)
        actual = loss_and_gradients(sharded, hax.shard(example(), COMPUTE))

    query = sharded.layers.stacked.attention.query.weight.array
    assert query.sharding.shard_shape(query.shape) == (2, 1, 8, 16)  # a head each, half of embed
    words = sharded.embeddings.word_embeddings.weight.array
    assert words.sharding.shard_shape(words.shape) == (32, 16)
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for a, b in leaves:
        np.testing.assert_allclose(jax.device_get(a), b, rtol=0, atol=1e-6)


if __name__ == "__main__":
    main()
