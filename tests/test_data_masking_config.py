"""MaskingConfig: decoding, schedules, slots, and the refusal of values that cannot be meant."""

import dataclasses

import draccus
import numpy as np
import pytest

from mlm_recipe.data.masking_config import MaskingConfig, RateStage
from mlm_recipe.errors import ConfigError


def test_draccus_decodes_the_block():
    config = draccus.decode(
        MaskingConfig,
        {
            "rate": 0.3,
            "rate_schedule": [{"step": 100, "rate": 0.15}, {"step": 200, "mask_fraction": 0.9}],
            "unit": "span",
            "max_masked": None,
        },
    )
    stages = (RateStage(100, 0.15), RateStage(200, mask_fraction=0.9))
    assert config == MaskingConfig(rate=0.3, rate_schedule=stages, unit="span")
    assert draccus.decode(MaskingConfig, draccus.encode(config)) == config


def test_schedule_is_piecewise_and_stages_inherit():
    stages = (RateStage(10, rate=0.2), RateStage(20, mask_fraction=1.0, random_fraction=0.0))
    config = MaskingConfig(rate=0.4, rate_schedule=stages)
    assert config.rates_at(0) == (0.4, 0.8, 0.1)
    assert config.rates_at(9) == (0.4, 0.8, 0.1)
    assert config.rates_at(10) == (0.2, 0.8, 0.1)
    assert config.rates_at(10**9) == (0.2, 1.0, 0.0)
    linear = dataclasses.replace(config, interpolation="linear")
    rates = linear.rates_at(np.array([0, 5, 10, 15, 30]))
    expected = [[0.4, 0.3, 0.2, 0.2, 0.2], [0.8, 0.8, 0.8, 0.9, 1.0], [0.1, 0.1, 0.1, 0.05, 0.0]]
    np.testing.assert_allclose(np.asarray(rates), expected)
    first = dataclasses.replace(config, rate_schedule=(RateStage(0, rate=0.25),))
    assert first.rates_at(0).rate == 0.25
    assert config.for_eval().rates_at(10**6) == (0.15, 0.8, 0.1)


@pytest.mark.parametrize(
    ("changes", "seq_len", "documents", "slots"),
    [
        ({}, 512, 1, 80),  # ceil(76.8) = 77
        ({}, 160, 1, 24),  # 24 exactly
        ({}, 8, 1, 8),
        ({}, 512, 200, 200),
        ({"min_per_document": 2}, 64, 10, 24),
        ({"rate": 1.0}, 500, 1, 500),
        ({"rate_schedule": (RateStage(5, rate=0.3),)}, 512, 1, 160),
        ({"selection": "bernoulli"}, 512, 1, 128),  # 76.8 + 6 * 8.08
        ({"unit": "whole_word"}, 512, 1, 96),
        ({"unit": "span"}, 512, 1, 104),
        ({"max_masked": 77}, 512, 1, 77),
        ({"max_masked": 77, "rate": 0.1}, 64, 1, 64),
    ],
)
def test_number_of_slots(changes, seq_len, documents, slots):
    assert MaskingConfig(**changes).num_masked_slots(seq_len, documents) == slots


def test_too_few_slots_are_refused():
    with pytest.raises(ConfigError, match=r"masking.max_masked = 76: 77 masks") as error:
        MaskingConfig(max_masked=76).num_masked_slots(512)
    assert error.value.fix.startswith("set it to 77 or more")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rate": 0.0}, "masking.rate"),
        ({"rate": 1.5}, "masking.rate"),
        ({"rate": float("nan")}, "masking.rate"),
        ({"eval_rate": -0.1}, "masking.eval_rate"),
        ({"mask_fraction": 1.1}, "masking.mask_fraction"),
        ({"random_fraction": -0.1}, "masking.random_fraction"),
        ({"mask_fraction": 0.95}, "masking.mask_fraction"),
        ({"span_geometric_p": 0.0}, "masking.span_geometric_p"),
        ({"span_max_length": 0}, "masking.span_max_length"),
        ({"min_per_document": -1}, "masking.min_per_document"),
        ({"max_masked": 0}, "masking.max_masked"),
        ({"unit": "word"}, "masking.unit"),
        ({"selection": "top_k"}, "masking.selection"),
        ({"interpolation": "cosine"}, "masking.interpolation"),
        ({"rate_schedule": (RateStage(5, rate=2.0),)}, "masking.rate_schedule[0].rate"),
        ({"rate_schedule": (RateStage(5), RateStage(5))}, "masking.rate_schedule[1].step"),
        ({"rate_schedule": (RateStage(-1),)}, "masking.rate_schedule[0].step"),
        (
            {"rate_schedule": (RateStage(0), RateStage(5, random_fraction=0.3))},
            "masking.rate_schedule[1].mask_fraction",
        ),
    ],
)
def test_impossible_values_are_refused(changes, field):
    with pytest.raises(ConfigError) as error:
        MaskingConfig(**changes)
    assert error.value.field == field
    assert error.value.fix
