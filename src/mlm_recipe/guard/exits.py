"""Exit codes: what a process says when nobody reads its report."""

from collections.abc import Iterable
from enum import IntEnum

from mlm_recipe.guard.status import Phase
from mlm_recipe.guard.types import Failure, FailureKind


class ExitCode(IntEnum):
    """Away from Python's (1, 2 for usage), Levanter's (124, 125) and the shell's (126 up)."""

    OK = 0
    """As configured."""
    FALLBACK = 10
    """A neutral fallback passed."""
    CONFIG = 2
    """The configuration or the program must be corrected."""
    NO_VARIANT_COMPILES = 20
    NONE_FITS = 21
    """None fits into memory."""
    NONE_RUNS = 22
    """Some compile, none runs."""
    NUMERIC = 23
    """Some run, with other numbers."""
    AUDIT = 24
    """An audit refused the program."""
    ENVIRONMENT = 31
    """The machine or the installation must be mended."""
    UNSUPPORTED = 32
    """Not decidable, or not possible, on this backend or in this mode."""
    TIME = 40
    """The time budget is spent."""
    RANKS = 41
    """Ranks disagree on what to run."""
    BUG = 70
    """A bug of the guard itself."""


_SIMPLE = {
    FailureKind.CONFIG_ERROR: ExitCode.CONFIG,
    FailureKind.ENVIRONMENT: ExitCode.ENVIRONMENT,
    FailureKind.INFRASTRUCTURE: ExitCode.ENVIRONMENT,
    FailureKind.UNKNOWN_FLAG: ExitCode.ENVIRONMENT,
    FailureKind.UNSUPPORTED_HERE: ExitCode.UNSUPPORTED,
    FailureKind.COMPILE_CRASH: ExitCode.NO_VARIANT_COMPILES,
    FailureKind.COMPILE_ERROR: ExitCode.NO_VARIANT_COMPILES,
    FailureKind.OUT_OF_MEMORY: ExitCode.NONE_FITS,
    FailureKind.RUNTIME_CRASH: ExitCode.NONE_RUNS,
    FailureKind.NUMERIC_MISMATCH: ExitCode.NUMERIC,
    FailureKind.AUDIT_FAILED: ExitCode.AUDIT,
}

# How far a variant came; of several, the one that came furthest says what is wrong.
_REACH = (
    ExitCode.TIME,
    ExitCode.NO_VARIANT_COMPILES,
    ExitCode.NONE_FITS,
    ExitCode.NONE_RUNS,
    ExitCode.NUMERIC,
)
_COMPILED = frozenset({Phase.COMPILED, Phase.BUDGETED, Phase.EXECUTED, Phase.DONE})

# Several targets: the code that asks for the most attention first.
_GRAVITY = (
    ExitCode.BUG,
    ExitCode.CONFIG,
    ExitCode.RANKS,
    ExitCode.ENVIRONMENT,
    ExitCode.AUDIT,
    ExitCode.NUMERIC,
    ExitCode.NONE_RUNS,
    ExitCode.NONE_FITS,
    ExitCode.NO_VARIANT_COMPILES,
    ExitCode.UNSUPPORTED,
    ExitCode.TIME,
    ExitCode.FALLBACK,
    ExitCode.OK,
)


def exit_code_of(failure: Failure) -> ExitCode:
    """The code of one failure."""
    if failure.kind in _SIMPLE:
        return _SIMPLE[failure.kind]
    compiled = failure.phase in _COMPILED or failure.reason == "rendezvous"
    if compiled:
        return ExitCode.NONE_RUNS
    timed_out = failure.kind is FailureKind.TIMEOUT
    return ExitCode.TIME if timed_out else ExitCode.NO_VARIANT_COMPILES


def furthest(failures: Iterable[Failure]) -> Failure | None:
    """The failure of the variant that came furthest; the first of equals; None without any."""
    best, best_rank = None, -2
    for failure in failures:
        code = exit_code_of(failure)
        rank = _REACH.index(code) if code in _REACH else -1
        if rank > best_rank:
            best, best_rank = failure, rank
    return best


def overall(codes: Iterable[int], *, strict: bool = False) -> ExitCode:
    """One code for several targets: the gravest; without targets 0.

    Args:
        codes: of the targets.
        strict: a fallback is a failure: 10 becomes 20, or what is graver.
    """
    given = [ExitCode(code) for code in codes]
    if strict:
        given = [
            ExitCode.NO_VARIANT_COMPILES if code is ExitCode.FALLBACK else code for code in given
        ]
    return min(given, key=_GRAVITY.index, default=ExitCode.OK)
