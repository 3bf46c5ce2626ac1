"""One death: how it ended, what its log says, and where in the program that was."""

import re
import signal
from dataclasses import dataclass

from mlm_recipe.guard import raised as raised_rules
from mlm_recipe.guard.evidence import Evidence, read_evidence
from mlm_recipe.guard.frames import Frame, innermost, phase_of, phase_of_threads
from mlm_recipe.guard.normalise import check_signature, plain
from mlm_recipe.guard.record import signal_name
from mlm_recipe.guard.status import Phase
from mlm_recipe.guard.types import ChildExit

_DEADLY = frozenset({4, 5, 6, 7, 8, 11})  # ILL, TRAP, ABRT, BUS, FPE, SEGV
_RUNTIME_SOURCE = re.compile(
    r"(pjrt_|.*thunk|.*executable|rendezvous|stream|.*buffer|.*allocator|.*event|transfer|tracked_"
    r"|nccl|.*communicator|gpu_executor|cuda_)"
)
_RUNTIME_NATIVE = re.compile(r"Thunk\w*::|::Execute\w*\(|PyArray|PyHostValue|PjRtBuffer|Executor::")
_COMPILE_NATIVE = re.compile(r"HloPass|Compiler|Compile\w*\(|IrEmitter|RunBackend|llvm::|mlir::")


@dataclass(frozen=True)
class Case:
    """Everything that is known of one death."""

    exit: ChildExit
    evidence: Evidence
    phase: str | None
    place: Frame | None
    """The frame that tells where it died."""
    signal: int | None
    """That ended it, or, by its exit code, a process that a shell ran for it."""


def read_case(exit: ChildExit) -> Case:
    """Reads the log, and finds out where it died."""
    evidence = read_evidence(exit)
    phase, place = _where(exit, evidence)
    return Case(exit, evidence, phase, place, _signal(exit))


def _signal(exit: ChildExit) -> int | None:
    if exit.signal is not None:
        return exit.signal
    number = exit.returncode - 128  # a shell says so of the process it ran
    return number if number in _DEADLY or number == signal.SIGKILL else None


def _where(exit: ChildExit, evidence: Evidence) -> tuple[str | None, Frame | None]:
    """From the phase file, else from frames of the exception, of faulthandler, of native code."""
    phase, place = None, None
    if evidence.threads and (evidence.fault or exit.timed_out):
        phase, place = phase_of_threads(evidence.threads)
        inner = innermost(evidence.threads[0])
        if place is None or (inner is not None and not inner.in_jax):
            place = inner  # the program's own code, perhaps in a callback
    for found in evidence.raised if phase is None else ():
        phase, found_place = phase_of(found.frames)
        place = place or found_place
        if phase is not None:
            break
    if phase is None and exit.phase is None:
        phase = _native_phase(evidence)
    return exit.phase or (str(phase) if phase else None), place


def _native_phase(evidence: Evidence) -> Phase | None:
    for name in evidence.native:
        if _RUNTIME_NATIVE.search(f"{name}("):
            return Phase.BUDGETED
        if _COMPILE_NATIVE.search(f"{name}("):
            return Phase.COMPILE_BEGIN
    source = evidence.fatal.source if evidence.fatal else ""
    if source.startswith("parse_flags_from_env"):
        return Phase.JAX_IMPORTED
    if _RUNTIME_SOURCE.match(source):
        return Phase.BUDGETED
    return None


def signature_of(case: Case) -> str:
    """Normalised; of native code's last words, of the exception, of the signal, in that order."""
    evidence = case.evidence
    decided = evidence.fatal and not (case.signal is None and evidence.raised)
    if evidence.fatal and decided:
        return check_signature(evidence.fatal.source, evidence.fatal.message)
    if evidence.raised and case.signal is None:
        return raised_rules.signature(evidence.raised[0])
    if case.signal is not None:
        where = f" in {case.place.name}" if case.place else ""
        at = f" at {case.phase}" if case.phase and not where else ""
        return f"{signal_name(case.signal)}{where}{at}"
    return f"exit code {case.exit.returncode}"


def message_of(case: Case) -> str:
    """The decisive line."""
    evidence = case.evidence
    if case.exit.timed_out:
        place = f", last seen in {case.place.name}" if case.place else ""
        return f"ended after {case.exit.seconds:.0f} s{place}"
    if evidence.fatal and (case.signal is not None or not evidence.raised):
        return plain(f"{evidence.fatal.source}: {evidence.fatal.message}")
    if evidence.raised and case.signal is None:
        return plain(raised_rules.message(evidence.raised[0]))
    if case.signal is not None:
        return signature_of(case)
    last = [line for line in evidence.text.splitlines() if line.strip()]
    return plain(last[-1]) if last else f"exit code {case.exit.returncode}, and no output"
