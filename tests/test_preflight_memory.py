"""The budget's arithmetic, and the time that a step cannot beat."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlm_recipe.guard.targets import TargetSpec, parse_target
from mlm_recipe.preflight.memory import judge, memory_verdict
from mlm_recipe.preflight.roofline import roofline_seconds
from mlm_recipe.preflight.targets import Target

LIMITS = {"memory_warn": 0.85, "memory_refuse": 0.95}


def target(budget: float | None, spec: TargetSpec | None = None, count: int = 1) -> Target:
    spec = spec or parse_target("h200")
    return Target(spec, [None] * count, spec.platform, "some", True, budget, budget)


def compiled(stats: Any) -> Any:
    return SimpleNamespace(memory_analysis=lambda: stats)


def sizes(**given: int) -> Any:
    names = ("argument", "output", "alias", "temp", "generated_code")
    found = {f"{name}_size_in_bytes": given.get(name, 0) for name in names}
    return SimpleNamespace(**found, peak_memory_in_bytes=1)


def test_donated_arguments_count_once():
    stats = sizes(argument=1000, output=700, alias=600, temp=50, generated_code=7)
    found = memory_verdict(compiled(stats), target(10_000), LIMITS.__getitem__)
    assert found["need"] == 1000 + 700 - 600 + 50 + 7
    assert found["fraction"] == pytest.approx(1157 / 10_000)
    assert found["verdict"] == "ok"
    assert (found["arguments"], found["alias"], found["temporary"]) == (1000, 600, 50)


def test_nothing_is_made_up_where_xla_does_not_tell():
    found = memory_verdict(compiled(None), target(10_000), LIMITS.__getitem__)
    assert found["verdict"] == "unknown"
    assert found["need"] is found["arguments"] is found["fraction"] is None


@pytest.mark.parametrize(
    ("need", "verdict"),
    [(0, "ok"), (850, "ok"), (851, "warn"), (950, "warn"), (951, "refuse"), (3000, "refuse")],
)
def test_limits(need, verdict):
    assert judge(need, 1000, LIMITS.__getitem__) == (verdict, pytest.approx(need / 1000))


def test_no_budget_is_not_the_same_as_no_memory():
    assert judge(10, None, LIMITS.__getitem__) == ("unknown", None)
    assert judge(10, -5, LIMITS.__getitem__)[0] == "refuse"


@pytest.mark.parametrize(
    ("precision", "flops", "state", "seconds"),
    [
        ("bfloat16", 989e12, 1e9, 1.0),  # arithmetic
        ("float32", 989e12, 1e9, 989 / 494),  # TF32
        ("bfloat16", 1e12, 48e9, 10e-3),  # reading the state
        (None, 494e12, 1e9, 1.0),
        ("int8", 1e12, 1e9, None),
        ("bfloat16", None, 1e9, None),
    ],
)
def test_roofline(precision, flops, state, seconds):
    memory = {"arguments": state, "outputs": 0}
    found = roofline_seconds(flops, memory, precision, target(1e9))
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_roofline_shares_the_arithmetic_among_devices():
    memory = {"arguments": 1.0, "outputs": 1.0}
    eight = target(1e9, parse_target("h200:8"), count=8)
    assert roofline_seconds(8 * 989e12, memory, "bfloat16", eight) == pytest.approx(1.0)


def test_roofline_of_unknown_devices_is_unknown():
    auto = target(1e9, cast(TargetSpec, parse_target("auto")))
    memory = {"arguments": 1.0, "outputs": 1.0}
    assert roofline_seconds(1e12, memory, "float32", auto) is None
