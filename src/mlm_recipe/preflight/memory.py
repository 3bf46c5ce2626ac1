"""Does it fit? XLA:GPU never asks (it compiles a step of terabytes), so this does."""

from collections.abc import Callable
from typing import Any

from mlm_recipe.preflight.targets import Target


def memory_verdict(compiled: Any, target: Target, limit: Callable[[str], float]) -> dict[str, Any]:
    """Bytes per device by kind, against the device's budget.

    need = arguments + outputs - aliased + temporaries + code: donated arguments and the outputs
    that take their place are one buffer.

    Args:
        compiled: ``jax.stages.Compiled``.
        target: gives the budget.
        limit: gives ``memory_warn`` and ``memory_refuse``, as shares of the budget.

    Returns:
        ``arguments, outputs, alias, temporary, code, need, budget, fraction, verdict``; verdict is
        ``ok``, ``warn``, ``refuse``, or ``unknown`` without a budget.
    """
    stats = compiled.memory_analysis()
    parts = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "alias": stats.alias_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    need = sum(parts.values()) - 2 * parts["alias"]
    verdict, fraction = judge(need, target.budget_bytes, limit)
    return parts | {
        "need": need,
        "budget": target.budget_bytes,
        "fraction": fraction,
        "verdict": verdict,
    }


def judge(
    need: float, budget: float | None, limit: Callable[[str], float]
) -> tuple[str, float | None]:
    """``(verdict, need / budget)``."""
    if budget is None or budget <= 0:
        return "unknown", None
    fraction = need / budget
    if fraction > limit("memory_refuse"):
        return "refuse", fraction
    return ("warn" if fraction > limit("memory_warn") else "ok"), fraction
