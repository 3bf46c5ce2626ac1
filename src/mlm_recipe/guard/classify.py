"""Reads a death: log text first, then the phase, then the exit status."""

import signal
from dataclasses import replace

from mlm_recipe.guard.case import Case, message_of, read_case, signature_of
from mlm_recipe.guard.catalogue import Catalogue
from mlm_recipe.guard.host import HostFacts
from mlm_recipe.guard.known import look_up
from mlm_recipe.guard.raised import JAX_ERRORS, by_exception
from mlm_recipe.guard.record import signal_name
from mlm_recipe.guard.status import Phase
from mlm_recipe.guard.types import ChildExit, Failure, FailureKind

__all__ = ["HostFacts", "classify"]

NOTHING_KNOWN = "No flag is known to help; "
_COMPILES = frozenset(
    {Phase.TRACED, Phase.AUDITED, Phase.LOWERED, Phase.COMPILE_BEGIN, Phase.COMPILED}
)
_RUNS = frozenset({Phase.BUDGETED, Phase.EXECUTED, Phase.DONE})
_INTERRUPTS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_OOM_SHARE = 0.6


def classify(exit: ChildExit, catalogue: Catalogue, *, host: HostFacts | None) -> Failure:
    """What the end of a child means. For a child that failed: exit code 0 has no failure.

    Args:
        exit: how it ended, with its log.
        catalogue: of known deaths; the first entry that holds wins.
        host: taken before the child started, to tell the kernel's kills for want of memory from
            others; None knows nothing of the host.
    """
    case = read_case(exit)
    failure = (
        _ended_by_supervisor(case, catalogue)
        or _interrupted(case)
        or _killed(case, host)
        or look_up(case, catalogue)
        or _by_contract(case)
        or _fatal(case)
        or _raised(case)
        or _by_status(case)
    )
    message = failure.message or message_of(case)
    return replace(
        failure,
        phase=failure.phase or case.phase,
        message=message,
        last_pass=case.evidence.last_pass,
    )


def _ended_by_supervisor(case: Case, catalogue: Catalogue) -> Failure | None:
    if case.exit.over_memory:
        return Failure(
            FailureKind.OUT_OF_MEMORY,
            "host memory ceiling",
            reason="host",
            message=f"passed the memory ceiling at {case.exit.peak_rss / 2**30:.2f} GiB",
            advice="The processes need more host memory than they may have. Raise the ceiling, "
            "or compile with fewer threads.",
            remedies=("single_threaded_compile", "scanned_layers"),
        )
    if not case.exit.timed_out:
        return None
    known = look_up(case, catalogue)
    if known is not None:
        return known
    place = f" in {case.place.name}" if case.place else ""
    return Failure(
        FailureKind.TIMEOUT,
        f"timeout{f' at {case.phase}' if case.phase else ''}{place}",
        reason="stall",
        advice="It did not end in its time and does not say why. Look at the Python frames in the "
        "log. While it runs on several devices, a collective that not all of them reach looks "
        "like this; otherwise give it more time.",
    )


def _interrupted(case: Case) -> Failure | None:
    exit = case.exit
    by_signal = exit.signal in _INTERRUPTS or exit.returncode in (129, 130, 143)
    asked = [found.name for found in case.evidence.raised[:1]] == ["KeyboardInterrupt"]
    if not by_signal and not asked:
        return None
    return Failure(
        FailureKind.INFRASTRUCTURE,
        "interrupted",
        reason="interrupted",
        message=f"interrupted ({signal_name(exit.signal) or f'exit code {exit.returncode}'})",
        advice="Somebody stopped it. Start it again to go on.",
        ladder=False,
    )


def _killed(case: Case, host: HostFacts | None) -> Failure | None:
    if case.signal != signal.SIGKILL:
        return None
    before, now = host, HostFacts.now() if host else None
    rose = bool(before and now and (now.oom_kills or 0) > (before.oom_kills or 0))
    share = case.exit.peak_rss / before.memory_bytes if before and before.memory_bytes else 0.0
    if rose or share > _OOM_SHARE:
        return Failure(
            FailureKind.OUT_OF_MEMORY,
            "SIGKILL for want of host memory",
            reason="host",
            message=f"killed by the kernel at {case.exit.peak_rss / 2**30:.2f} GiB",
            advice="The host ran out of memory. Give it more, run fewer processes beside it, or "
            "compile with fewer threads.",
            remedies=("single_threaded_compile", "scanned_layers"),
        )
    return Failure(
        FailureKind.INFRASTRUCTURE,
        "SIGKILL",
        reason="killed from outside",
        advice="Somebody or something killed it, and not for want of memory as far as can be "
        "seen. Try again, and ask the scheduler.",
        transient=True,
    )


def _raised(case: Case) -> Failure | None:
    """By the exception; one of Python's own ends no process by a signal: it had been handled."""
    of_jax = any(found.name in JAX_ERRORS for found in case.evidence.raised)
    if case.signal is not None and not of_jax:
        return None
    return by_exception(case.evidence, case.phase)


def _by_contract(case: Case) -> Failure | None:
    """Exit codes that mean something: Levanter's, the shell's, and this project's own 2."""
    code = case.exit.returncode
    if code == 124:
        advice = "It made no progress and ended itself. Try again; if it stalls again, look at "
        advice += "the frames in the log."
        return Failure(
            FailureKind.TIMEOUT, "exit code 124", reason="stall", advice=advice, transient=True
        )
    if code == 125:
        advice = "It found its device poisoned. Start it again in a fresh process, on another node "
        advice += "if it comes back."
        return Failure(
            FailureKind.INFRASTRUCTURE,
            "exit code 125",
            reason="sticky",
            advice=advice,
            transient=True,
        )
    if code in (126, 127):
        return Failure(
            FailureKind.CONFIG_ERROR,
            f"exit code {code}",
            reason="command",
            advice="The command cannot be run. Check its name and its permissions.",
            ladder=False,
        )
    if code == 2 and not case.evidence.raised:
        return Failure(
            FailureKind.CONFIG_ERROR,
            "exit code 2",
            reason="usage",
            advice="The program refuses its input. Correct what it names.",
            ladder=False,
        )
    return None


def _fatal(case: Case) -> Failure | None:
    """Native code said why it died, in words that no entry knows."""
    fatal, exit = case.evidence.fatal, case.exit
    if fatal is None or (case.signal is None and case.evidence.raised):
        return None
    compiler = fatal.source == "LLVM" or fatal.source.endswith((".cc", ".h", ".cpp"))
    kind = _death(case.phase, FailureKind.COMPILE_CRASH if compiler else FailureKind.UNKNOWN)
    if case.phase in (Phase.START, Phase.JAX_IMPORTED) and exit.signal is None:
        kind = FailureKind.ENVIRONMENT
    return Failure(kind, signature_of(case), advice=_nothing_known(kind, case.phase))


def _death(phase: str | None, otherwise: FailureKind = FailureKind.UNKNOWN) -> FailureKind:
    if phase in _COMPILES:
        return FailureKind.COMPILE_CRASH
    return FailureKind.RUNTIME_CRASH if phase in _RUNS else otherwise


def _nothing_known(kind: FailureKind, phase: str | None) -> str:
    if kind is FailureKind.COMPILE_CRASH:
        rest = "the compiler died on this program. Leave out the HLO pass that ran last, write the "
        return f"{NOTHING_KNOWN}{rest}step otherwise, or try another jaxlib."
    if kind is FailureKind.RUNTIME_CRASH:
        rest = "the program compiled and died while it ran. A flag that only stops the death can "
        return f"{NOTHING_KNOWN}{rest}leave wrong numbers: compare them before trusting one."
    where = f" at {phase}" if phase else ""
    return f"{NOTHING_KNOWN}it died{where} for a reason that the log does not give."


def _by_status(case: Case) -> Failure:
    if case.signal is not None:
        if case.signal == signal.SIGILL and case.phase not in _RUNS | _COMPILES:
            return Failure(
                FailureKind.ENVIRONMENT,
                signature_of(case),
                reason="cpu",
                advice="This CPU lacks instructions that the installed packages use.",
                ladder=False,
            )
        kind = _death(case.phase)
        return Failure(kind, signature_of(case), advice=_nothing_known(kind, case.phase))
    return Failure(
        FailureKind.UNKNOWN,
        signature_of(case),
        advice="It failed without a word that is known. Look at the log.",
    )
