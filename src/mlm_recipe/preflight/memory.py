"""Does it fit? XLA:GPU never asks (it compiles a step of terabytes), so this does."""

from collections.abc import Callable
from typing import Any

from mlm_recipe.preflight.targets import Target

_PARTS = (
    ("arguments", "argument"),
    ("outputs", "output"),
    ("alias", "alias"),
    ("temporary", "temp"),
    ("code", "generated_code"),
)


def memory_verdict(compiled: Any, target: Target, limit: Callable[[str], float]) -> dict[str, Any]:
    """Bytes per device by kind, against the device's budget.

    need = arguments + outputs - aliased + temporaries + code: donated arguments and the outputs
    that take their place are one buffer. XLA's own ``peak_memory_in_bytes`` (0.11.2) is not used:
    it leaves temporaries out on a CPU and counts on-chip memory with HBM on a TPU; on a GPU it is
    this sum.

    Args:
        compiled: ``jax.stages.Compiled``.
        target: gives the budget.
        limit: gives ``memory_warn`` and ``memory_refuse``, as shares of the budget.

    Returns:
        ``arguments, outputs, alias, temporary, code, need, budget, fraction, verdict``; verdict is
        ``ok``, ``warn``, ``refuse``, or ``unknown`` without a budget or where XLA does not tell
        (compile-only GPUs of jax 0.4.34: the sizes are None).
    """
    stats = compiled.memory_analysis()
    parts: dict[str, Any] = {
        name: getattr(stats, f"{prefix}_size_in_bytes", None) for name, prefix in _PARTS
    }
    need = None if stats is None else sum(parts.values()) - 2 * parts["alias"]
    verdict, fraction = judge(need, target.budget_bytes, limit)
    return parts | {
        "need": need,
        "budget": target.budget_bytes,
        "fraction": fraction,
        "verdict": verdict,
    }


def judge(
    need: float | None, budget: float | None, limit: Callable[[str], float]
) -> tuple[str, float | None]:
    """``(verdict, need / budget)``."""
    if need is None or budget is None:
        return "unknown", None
    fraction = need / max(budget, 1.0)  # reserves can exceed the device's memory
    if fraction > limit("memory_refuse"):
        return "refuse", fraction
    return ("warn" if fraction > limit("memory_warn") else "ok"), fraction
