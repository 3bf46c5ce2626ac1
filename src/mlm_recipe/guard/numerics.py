"""The numeric gate: a fallback must give the loss and the gradient that the reference gives."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlm_recipe.guard.types import Failure, FailureKind


@dataclass(frozen=True)
class Limits:
    """Largest distances allowed; relative, but for the cosine."""

    loss: float
    gradient_norm: float
    gradient: float | None
    """Of the L2 distance of gradients; None leaves it to the cosine."""
    cosine: float


LIMITS: Mapping[str, Limits] = {
    "float32": Limits(loss=1e-5, gradient_norm=1e-4, gradient=1e-3, cosine=1 - 1e-6),
    "bfloat16": Limits(loss=1e-3, gradient_norm=1e-2, gradient=None, cosine=0.995),
}
"""By compute precision. Variants of a small encoder on 8 CPU devices drift by at most 8e-8 (loss),
8e-8 (norm), 5e-7 (gradient) in float32 and 1.2e-5, 1.1e-3, cosine 0.9993 in bfloat16."""

_TINY = 1e-30


def compare(reference: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, float]:
    """Distances between two ``numerics`` of result.json: loss, gradient_norm, gradient, cosine.

    The sketch is a linear signed projection of the gradient, so distance and angle of gradients
    are those of sketches within a few per cent.

    Raises:
        ValueError: the sketches differ in length, or there is none.
    """
    first, second = reference["sketch"], measured["sketch"]
    if len(first) != len(second) or not first:
        raise ValueError(f"sketches of {len(first)} and {len(second)} numbers")
    norm_first, norm_second = _norm(first), _norm(second)
    apart = _norm([a - b for a, b in zip(first, second, strict=True)])
    dot = math.fsum(a * b for a, b in zip(first, second, strict=True))
    both_zero = norm_first < _TINY and norm_second < _TINY
    cosine = 1.0 if both_zero else dot / max(norm_first * norm_second, _TINY)
    return {
        "loss": _relative(reference["loss"], measured["loss"]),
        "gradient_norm": _relative(reference["gradient_norm"], measured["gradient_norm"]),
        "gradient": apart / max(norm_first, _TINY) if not both_zero else 0.0,
        "cosine": cosine,
    }


def check_numerics(
    reference: Mapping[str, Any] | None, measured: Mapping[str, Any] | None
) -> Failure | None:
    """None where ``measured`` agrees with ``reference``, otherwise what does not and by how much.

    Missing numbers, other precisions and anything that is not finite disagree.
    """
    if reference is None or measured is None:
        which = "reference" if reference is None else "variant"
        return _failure("missing", f"the {which} gave no numbers to compare")
    for which, numbers in (("reference", reference), ("variant", measured)):
        if not _finite(numbers):
            return _failure("not finite", f"loss or gradient of the {which} is not finite")
    precisions = reference.get("precision"), measured.get("precision")
    if precisions[0] != precisions[1] or precisions[0] not in LIMITS:
        return _failure("precision", f"precisions {precisions[0]} and {precisions[1]}")
    limits = LIMITS[str(precisions[0])]
    try:
        found = compare(reference, measured)
    except ValueError as error:
        return _failure("missing", str(error))
    for name in ("loss", "gradient_norm", "gradient"):
        limit = getattr(limits, name)
        if limit is not None and not found[name] < limit:
            label = name.replace("_", " ")
            return _failure(name, f"{label} is off by {found[name]:.3g}, limit {limit:g}", found)
    if not found["cosine"] > limits.cosine:
        text = f"cosine of gradients is {found['cosine']:.8f}, limit {limits.cosine:g}"
        return _failure("cosine", text, found)
    return None


def _failure(what: str, message: str, found: Mapping[str, float] | None = None) -> Failure:
    if found:
        figures = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
        message = f"{message} (all: {figures})"
    return Failure(
        kind=FailureKind.NUMERIC_MISMATCH,
        signature=f"numeric gate: {what.replace('_', ' ')}",
        reason=what.replace(" ", "_"),
        message=message,
        advice="this variant computes something else; it is not used",
    )


def _norm(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))


def _relative(reference: float, measured: float) -> float:
    return abs(measured - reference) / max(abs(reference), _TINY)


def _finite(numbers: Mapping[str, Any]) -> bool:
    try:
        values = [numbers["loss"], numbers["gradient_norm"], *numbers["sketch"]]
        return all(math.isfinite(value) for value in values)
    except (KeyError, TypeError):
        return False
