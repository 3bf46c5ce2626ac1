"""What to do after training died: again, another way, or not at all. Pure.

Levanter's exit contract (``levanter.recovery.types``) stands: 124 is a stall and 125 a poisoned
device, both worth a fresh process; when the budget is spent they are handed on unchanged, for
whatever supervises us.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from mlm_recipe.guard.types import Failure, FailureKind

_TRANSIENT = frozenset({FailureKind.INFRASTRUCTURE, FailureKind.TIMEOUT})
_STOPS = frozenset(
    {
        FailureKind.CONFIG_ERROR,
        FailureKind.ENVIRONMENT,
        FailureKind.UNSUPPORTED_HERE,
        FailureKind.NUMERIC_MISMATCH,
        FailureKind.AUDIT_FAILED,
    }
)


class Action(StrEnum):
    """What the launcher does next."""

    STOP = "stop"
    RESTART = "restart"
    """The same variant, from the last checkpoint."""
    NEXT_VARIANT = "next_variant"
    """Another variant, proved first, from the last checkpoint."""


@dataclass
class RestartPolicy:
    """Decides after each death of one training.

    Args:
        budget: restarts of any kind.
    """

    budget: int
    deaths: list[Failure] = field(default_factory=list)

    def decide(self, failure: Failure) -> Action:
        """Record a death and say what follows.

        An unknown death is tried again as it is, once; the same signature twice is deterministic.
        """
        seen = [death.signature for death in self.deaths]
        self.deaths.append(failure)
        if failure.kind in _STOPS or failure.reason == "interrupted":
            return Action.STOP
        if len(self.deaths) > self.budget:
            return Action.STOP
        if failure.transient or failure.kind in _TRANSIENT:
            return Action.RESTART
        if not failure.ladder:
            return Action.STOP
        if failure.name or failure.signature in seen:
            return Action.NEXT_VARIANT
        return Action.RESTART
