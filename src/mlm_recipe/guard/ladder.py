"""The ladder: which variant next, and when to stop. Knows no processes: ``attempt`` runs them."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from mlm_recipe.guard.attempts import (
    STOP,
    STOP_ANYWHERE,
    Attempt,
    Attempted,
    Budget,
    Gate,
    Outcome,
    Tried,
)
from mlm_recipe.guard.exits import ExitCode, exit_code_of, furthest
from mlm_recipe.guard.search import Search
from mlm_recipe.guard.types import AS_CONFIGURED, Failure, Variant
from mlm_recipe.guard.variants import Context, Variants, is_fallback

__all__ = [
    "STOP",
    "STOP_ANYWHERE",
    "Attempt",
    "Attempted",
    "Budget",
    "Gate",
    "Outcome",
    "Tried",
    "run_ladder",
]


def run_ladder(
    start: Variant,
    attempt: Attempt,
    *,
    variants: Variants,
    context: Context,
    budget: Budget | None = None,
    gate: Gate | None = None,
    dead_flags: Callable[[], Mapping[str, str]] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Find the first variant that holds, and of that the least part that is needed.

    As configured, then the remedies that the signature names, then the generic order, then pairs.
    Variants that change the objective are never tried. A failure whose kind is in ``STOP`` or
    that says ``ladder=False`` ends it at once.

    Args:
        start: as configured, or what the user asked for; it passes no gate.
        attempt: runs one child.
        variants: what there is to try.
        context: configuration, platform, devices, environment.
        budget: bounds; the defaults are ``Budget()``.
        gate: for every fallback that is not ``same_plan``; None refuses them all.
        dead_flags: probes flags, called once and only if a variant with flags comes up.
        clock: seconds.
    """
    search = Search(
        attempt=attempt,
        variants=variants,
        context=context,
        budget=budget or Budget(),
        gate=gate,
        probe=dead_flags or dict,
        clock=clock,
    )
    winner = search.run(start)
    failed = [done.failure for done in search.done if done.failure is not None]
    failure = None if winner else (search.stopped_on or furthest(failed))
    return Outcome(
        attempts=tuple(search.done),
        chosen=winner.variant if winner else None,
        winner=winner,
        failure=failure,
        exit_code=_code(start, winner, failure, search.stopped_by),
        seconds=search.elapsed(),
        skipped=dict(search.skipped),
        dropped_flags=tuple(search.dropped),
        stopped_by="" if winner else search.stopped_by,
    )


def _code(
    start: Variant, winner: Attempted | None, failure: Failure | None, stopped_by: str
) -> ExitCode:
    if winner is not None:
        as_asked = winner.variant.name == start.name or not is_fallback(winner.variant)
        if start.name != AS_CONFIGURED and not as_asked:
            as_asked = _without_environment(winner.variant) == _without_environment(start)
        return ExitCode.OK if as_asked else ExitCode.FALLBACK
    if failure is None:
        return ExitCode.BUG
    return ExitCode.TIME if stopped_by == "seconds" else exit_code_of(failure)


def _without_environment(variant: Variant) -> tuple[Any, ...]:
    return dict(variant.xla_flags), dict(variant.overrides)
