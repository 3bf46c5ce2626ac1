"""How the search compares variants and attempts."""

from mlm_recipe.guard.attempts import Attempted
from mlm_recipe.guard.status import Phase
from mlm_recipe.guard.types import Failure, FailureKind, Variant

_PHASES = [str(phase) for phase in Phase]


def content(variant: Variant) -> str:
    """What a variant does, whatever its name."""
    parts = (variant.xla_flags, variant.env, variant.overrides)
    return repr([sorted(part.items()) for part in parts])


def family(variant: Variant) -> str:
    """Flags are related where the variants set the same ones, or both tune matrix products."""
    names = " ".join(sorted(variant.xla_flags))
    tuning = any(word in names for word in ("autotun", "gemm"))
    return "tuning" if tuning else names


def promise(done: Attempted) -> tuple[float, float]:
    """Sort key: who needs least memory, or came furthest, first."""
    result = done.tried.result or {}
    needs = [p.get("memory", {}).get("need") or 0 for p in result.get("programs", [])]
    phase = done.failure.phase if done.failure else None
    if phase is None and done.tried.exit is not None:
        phase = done.tried.exit.phase
    reached = _PHASES.index(phase) if phase in _PHASES else -1
    return -float(reached), float(max(needs, default=0))


def out_of_device(failure: Failure | None) -> bool:
    return (
        failure is not None
        and failure.kind is FailureKind.OUT_OF_MEMORY
        and failure.reason != "host"
    )
