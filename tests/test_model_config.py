"""RobertaConfig: what it refuses, its Hugging Face form, its FLOPs and parameters."""

import dataclasses
import subprocess
import sys
from typing import Any

import draccus
import equinox as eqx
import haliax as hax
import jax
import levanter.config  # noqa: F401  registers how a checkpointing policy is decoded
import pytest
from haliax import Axis, NamedArray, ScanCheckpointPolicy
from levanter.models.lm_model import LmConfig
from transformers import RobertaConfig as HfRobertaConfig

from mlm_recipe.errors import ConfigError
from mlm_recipe.model.checks import check_roberta
from mlm_recipe.model.config import RobertaConfig
from mlm_recipe.model.roberta import RobertaForMaskedLM

BASE = RobertaConfig()


def test_defaults_are_roberta_base():
    hf_config = BASE.to_hf_config(50265)
    assert hf_config.architectures == ["RobertaForMaskedLM"]
    assert hf_config.max_position_embeddings == 514
    assert hf_config.layer_norm_eps == 1e-5
    assert hf_config.type_vocab_size == 1
    assert hf_config.tie_word_embeddings is True
    assert (hf_config.bos_token_id, hf_config.pad_token_id, hf_config.eos_token_id) == (0, 1, 2)
    assert hf_config.vocab_size == 50265
    assert "position_embedding_type" not in hf_config.to_dict()


def test_parameters_of_roberta_base():
    # transformers: RobertaForMaskedLM(RobertaConfig of roberta-base).num_parameters()
    assert BASE.total_trainable_params(50265) == 124_697_433


def test_decodes_as_levanter_model_type():
    block = {
        "type": "roberta",
        "hidden_dim": 128,
        "num_heads": 2,
        "gradient_checkpointing": "offload",
        "attn_backend": "jax_flash",
    }
    config = draccus.decode(LmConfig, block)
    assert isinstance(config, RobertaConfig)
    assert config.hidden_dim == 128
    policy = ScanCheckpointPolicy.from_bool_or_str("offload")
    assert config.gradient_checkpointing == policy


@pytest.mark.parametrize(
    "changes, field, fix",
    [
        ({"max_seq_len": 512, "max_position_embeddings": 512}, "max_seq_len", "to 514"),
        ({"max_seq_len": 513, "max_position_embeddings": 514}, "max_seq_len", "to 515"),
        ({"max_position_embeddings": 514, "pad_token_id": 3}, "max_seq_len", "to 510"),
        ({"hidden_dim": 100}, "hidden_dim", "108"),
        ({"num_layers": 0}, "num_layers", "positive"),
        ({"vocab_multiple": 0}, "vocab_multiple", "positive"),
        ({"hidden_dropout": 1.0}, "hidden_dropout", "[0, 1)"),
        ({"attention_dropout": -0.1}, "attention_dropout", "[0, 1)"),
        ({"layer_norm_epsilon": 0.0}, "layer_norm_epsilon", "above 0"),
        ({"pad_token_id": -1}, "pad_token_id", "tokenizer"),
        ({"vocab_size": 2}, "eos_token_id", "vocab_size"),
        ({"gradient_checkpointing": "some"}, "gradient_checkpointing", "nested"),
        ({"flash_attention_block_size": 0}, "flash_attention_block_size", "divisor"),
    ],
)
def test_impossible_geometry_is_refused(changes: dict[str, Any], field: str, fix: str):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(BASE, **changes)
    assert error.value.field == f"model.{field}"
    assert error.value.value == changes.get(field, getattr(BASE, field))
    assert fix in error.value.fix


def test_positions_up_to_the_table_are_accepted():
    assert dataclasses.replace(BASE, max_position_embeddings=514).PositionTable.size == 514
    assert dataclasses.replace(BASE, max_position_embeddings=600).PositionTable.size == 600
    assert dataclasses.replace(BASE, max_seq_len=128).PositionTable.size == 130


def test_checks_run_without_jax():
    program = (
        "import sys, mlm_recipe.model.checks, mlm_recipe.model.flops\n"
        "sys.exit(bool({'jax', 'haliax', 'levanter', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    check_roberta(vars(BASE))


def test_hf_config_round_trip():
    config = dataclasses.replace(
        BASE, hidden_dim=96, num_heads=3, max_position_embeddings=130, max_seq_len=128
    )
    back = RobertaConfig.from_hf_config(config.to_hf_config(777))
    assert back == dataclasses.replace(config, vocab_size=777)


@pytest.mark.parametrize(
    "field, value",
    [
        ("hidden_act", "gelu_new"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("tie_word_embeddings", False),
    ],
)
def test_other_architectures_are_refused(field: str, value: object):
    hf_config = HfRobertaConfig(max_position_embeddings=514, type_vocab_size=1)
    RobertaConfig.from_hf_config(hf_config)
    setattr(hf_config, field, value)
    with pytest.raises(ConfigError, match=field):
        RobertaConfig.from_hf_config(hf_config)


def xla_flops(config: RobertaConfig, vocab_size: int, masked: int, *, backward: bool) -> float:
    """XLA's count for one row; nothing is executed or compiled."""
    Vocab, Pos = config.vocab_axis(vocab_size), config.max_Pos
    model = eqx.filter_eval_shape(
        lambda key: RobertaForMaskedLM.init(Vocab, config, vocab_size=vocab_size, key=key),
        jax.random.key(0),
    )
    shapes, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def squared_logits(
        shapes: Any, input_ids: NamedArray, masked_positions: NamedArray
    ) -> jax.Array:
        model = eqx.combine(shapes, static)
        segment_ids, position_ids = hax.zeros_like(input_ids), input_ids
        logits = model(
            input_ids,
            segment_ids,
            position_ids=position_ids,
            masked_positions=masked_positions,
        )
        return hax.sum(hax.square(logits)).scalar()

    program = jax.grad(squared_logits) if backward else squared_logits
    input_ids = hax.zeros(Pos, dtype=int)
    masked_positions = hax.zeros(Axis("masked", masked), dtype=int)
    cost = jax.jit(program).lower(shapes, input_ids, masked_positions).cost_analysis()
    assert cost is not None
    return cost["flops"]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("masked", [20, 128])
def test_flops_agree_with_xla(masked: int, backward: bool):
    # Unrolled, as XLA counts the body of a loop once; not recomputed, as that work is no model's.
    config = RobertaConfig(
        max_seq_len=128, num_layers=2, scan_layers=False, gradient_checkpointing=False
    )
    ours = config.flops_per_token(8000, 128, masked / 128) * 128
    theirs = xla_flops(config, 8000, masked, backward=backward)
    assert theirs == pytest.approx(ours * (3 if backward else 1), rel=0.05)


def test_head_is_counted_where_it_runs():
    encoder = 12 * (4 * 768**2 + 2 * 768 * 3072 + 2 * 512 * 768)
    head = 768**2 + 768 * 50304  # columns rounded up to a multiple of 64
    assert BASE.flops_per_token(50265, 512, 1.0) == 2 * (encoder + head) == 267_190_272
    assert BASE.flops_per_token(50265, 512, 0.25) == 2 * encoder + head / 2
