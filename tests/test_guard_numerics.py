"""The numeric gate."""

import math
import random
from typing import Any

import pytest

from mlm_recipe.guard.numerics import LIMITS, check_numerics, compare
from mlm_recipe.guard.types import FailureKind

RANDOM = random.Random(0)
SKETCH = [RANDOM.gauss(0, 1) for _ in range(4096)]


def numbers(**changes: Any) -> dict[str, Any]:
    base = {"precision": "float32", "loss": 10.8, "gradient_norm": 2.5, "sketch": SKETCH}
    return {**base, **changes}


def turned(angle: float) -> list[float]:
    """The sketch, turned by an angle towards an orthogonal direction of its length."""
    other = [RANDOM.gauss(0, 1) for _ in SKETCH]
    dot = math.fsum(a * b for a, b in zip(SKETCH, other, strict=True))
    square = math.fsum(a * a for a in SKETCH)
    other = [b - a * dot / square for a, b in zip(SKETCH, other, strict=True)]
    length = math.sqrt(square / math.fsum(b * b for b in other))
    pairs = zip(SKETCH, other, strict=True)
    return [a * math.cos(angle) + b * length * math.sin(angle) for a, b in pairs]


def test_equal_numbers_and_the_drift_of_real_variants_pass() -> None:
    assert check_numerics(numbers(), numbers()) is None
    drift = numbers(loss=10.8 * (1 + 8e-8), sketch=turned(5e-7))
    assert check_numerics(numbers(), drift) is None
    reference = numbers(precision="bfloat16")
    drift = numbers(precision="bfloat16", gradient_norm=2.5 * 1.0011, sketch=turned(3.7e-2))
    assert check_numerics(reference, drift) is None


@pytest.mark.parametrize(
    ("precision", "changes", "reason"),
    [
        ("float32", {"loss": 10.8 * (1 + 2e-5)}, "loss"),
        ("float32", {"gradient_norm": 2.5 * (1 - 2e-4)}, "gradient_norm"),
        ("float32", {"sketch": [1.002 * value for value in SKETCH]}, "gradient"),
        ("bfloat16", {"loss": 10.8 * (1 + 2e-3)}, "loss"),
        ("bfloat16", {"gradient_norm": 2.5 * 1.02}, "gradient_norm"),
        ("bfloat16", {"sketch": turned(0.15)}, "cosine"),
        ("float32", {"sketch": [-value for value in SKETCH]}, "gradient"),
        ("float32", {"loss": math.nan}, "not_finite"),
        ("float32", {"gradient_norm": math.inf}, "not_finite"),
        ("float32", {"sketch": [math.nan, *SKETCH[1:]]}, "not_finite"),
        ("float32", {"loss": None}, "not_finite"),
        ("float32", {"precision": "bfloat16"}, "precision"),
        ("float32", {"sketch": SKETCH[:10]}, "missing"),
    ],
)
def test_a_planted_difference_is_refused(
    precision: str, changes: dict[str, Any], reason: str
) -> None:
    reference = numbers(precision=precision)
    failure = check_numerics(reference, {**reference, **changes})
    assert failure is not None
    assert (failure.kind, failure.reason) == (FailureKind.NUMERIC_MISMATCH, reason)


def test_a_turn_of_the_gradient_is_seen_at_equal_norm() -> None:
    found = compare(numbers(), numbers(sketch=turned(0.002)))
    assert found["gradient"] == pytest.approx(0.002, rel=1e-3)
    assert 1 - found["cosine"] == pytest.approx(0.002**2 / 2, rel=1e-3)
    failure = check_numerics(numbers(), numbers(sketch=turned(0.002)))
    assert failure is not None and "0.002" in failure.message


def test_missing_numbers_are_refused_and_zero_gradients_agree() -> None:
    assert check_numerics(None, numbers()) is not None
    assert check_numerics(numbers(), None) is not None
    zero = numbers(gradient_norm=0.0, sketch=[0.0] * 8)
    assert check_numerics(zero, zero) is None
    assert check_numerics(zero, numbers(gradient_norm=0.0, sketch=SKETCH[:8])) is not None


def test_limits_are_those_that_are_documented() -> None:
    assert LIMITS["float32"].loss == 1e-5 and LIMITS["float32"].gradient_norm == 1e-4
    assert LIMITS["bfloat16"].cosine == 0.995
