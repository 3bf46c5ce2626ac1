"""What a search is made of: attempts, bounds, and where it ended."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlm_recipe.guard.exits import ExitCode
from mlm_recipe.guard.types import ChildExit, Failure, FailureKind, Variant


@dataclass(frozen=True)
class Tried:
    """What ``attempt`` found out about one variant."""

    failure: Failure | None
    """None: it holds."""
    exit: ChildExit | None = None
    """None where it was remembered."""
    result: Mapping[str, Any] | None = None
    """The child's result.json."""
    remembered: bool = False
    directory: str = ""
    """Where the child left its files."""


class Attempt(Protocol):
    """Runs one variant in a child, or remembers how that went."""

    def __call__(self, variant: Variant, *, breadcrumbs: bool = False) -> Tried:
        """Args: breadcrumbs: let XLA log its passes, so that the last one is known."""
        ...


Gate = Callable[[Variant, Tried], Failure | None]
"""Compares a variant that passed with the reference; None where the numbers agree."""


@dataclass(frozen=True)
class Budget:
    """When to stop."""

    attempts: int = 8
    """Children, retries and the numeric gate's own excluded."""
    seconds: float = 2700.0
    """From the first attempt; the one that is running may end."""


@dataclass(frozen=True)
class Attempted:
    """One row of the report."""

    variant: Variant
    role: str
    """``first``, ``retry``, ``breadcrumbs``, ``flags dropped``, ``remedy``, ``generic``,
    ``stacked``, ``pair`` or ``minimise``."""
    tried: Tried
    failure: Failure | None
    """After the numeric gate."""
    seconds: float
    moved: bool = False
    """It failed otherwise than the first attempt did."""


@dataclass(frozen=True)
class Outcome:
    """Where the ladder ended."""

    attempts: tuple[Attempted, ...]
    chosen: Variant | None
    """The least that holds; None where nothing does."""
    winner: Attempted | None
    """The attempt that proved ``chosen``."""
    failure: Failure | None
    """What is wrong, where nothing holds: of the variant that came furthest."""
    exit_code: ExitCode
    seconds: float
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Variant -> why it was not tried."""
    dropped_flags: tuple[str, ...] = ()
    """Unknown flags of the user that were left out."""
    stopped_by: str = ""
    """``attempts`` or ``seconds``, where a bound ended the search."""


STOP = frozenset(
    {
        FailureKind.CONFIG_ERROR,
        FailureKind.ENVIRONMENT,
        FailureKind.UNSUPPORTED_HERE,
        FailureKind.AUDIT_FAILED,
        FailureKind.INFRASTRUCTURE,
        FailureKind.UNKNOWN_FLAG,
    }
)
"""Kinds that no variant helps against, when what was configured meets them."""

STOP_ANYWHERE = frozenset({FailureKind.ENVIRONMENT, FailureKind.INFRASTRUCTURE})
"""Kinds that no further variant helps against either, when a fallback meets them."""
