"""Rules for Python exceptions that no catalogue entry knows."""

import re

from mlm_recipe.guard.evidence import TRACEBACK, Evidence, Raised
from mlm_recipe.guard.normalise import normalised
from mlm_recipe.guard.status import Phase
from mlm_recipe.guard.types import Failure, FailureKind

_STATUS = re.compile(r"^([A-Z]+(?:_[A-Z]+)*): ?(.*)", re.DOTALL)
JAX_ERRORS = frozenset({"JaxRuntimeError", "XlaRuntimeError"})
_COMPILES = frozenset({Phase.LOWERED, Phase.COMPILE_BEGIN, Phase.COMPILED})
_RUNS = frozenset({Phase.BUDGETED, Phase.EXECUTED, Phase.DONE})
_TRANSIENT = frozenset({"UNAVAILABLE", "ABORTED", "CANCELLED", "DATA_LOSS"})

_USERS = frozenset(
    "TypeError ValueError NameError UnboundLocalError AttributeError KeyError IndexError "
    "LookupError AssertionError ZeroDivisionError OverflowError SyntaxError IndentationError "
    "TabError RecursionError UnicodeDecodeError UnicodeEncodeError StopIteration EOFError "
    "IndivisibleError ShardingTypeError ConfigError JSONDecodeError YAMLError ParserError "
    "ScannerError ConcretizationTypeError TracerArrayConversionError TracerBoolConversionError "
    "TracerIntegerConversionError UnexpectedTracerError NonConcreteBooleanIndexError "
    "KeyReuseError LeakError NonHashableStaticArgumentsError MutableArrayError "
    "DecodingError ParsingError ValidationError CalledProcessError BeartypeCallHintViolation "
    "TypeCheckError EquinoxTracetimeError ArgumentError UsageError ModuleConflictError".split()
)
_FILES = frozenset(
    {"FileNotFoundError", "PermissionError", "IsADirectoryError", "NotADirectoryError"}
    | {"FileExistsError"}
)
_NETWORK = re.compile(
    r"Connection\w*Error|BrokenPipeError|TimeoutError|gaierror|URLError|HTTPError|SSLError"
    r"|Connect\w*Timeout|ReadTimeout\w*|RemoteDisconnected|LocalEntryNotFoundError|ProxyError"
)
_BACKEND = re.compile(
    r"platform|backend|interpret mode|not (?:found|supported|implemented) (?:for|on)"
)
_NO_DEVICE = re.compile(r"Unknown backend|no platforms that are instances of|initialize backend")


def signature(raised: Raised) -> str:
    """``TypeError: unsupported operand ...``, ``JaxRuntimeError INTERNAL: ...``."""
    first = message(raised).partition("\n")[0]
    return f"{raised.name}: {normalised(first.removeprefix(f'{raised.name}: '))}".rstrip(": ")


def message(raised: Raised) -> str:
    """Type and message; of an error that carries a callback's traceback, that one's last line."""
    lines = [line for line in raised.message.splitlines() if line.strip()]
    if lines and lines[0].endswith(TRACEBACK):
        lines = [f"{lines[0].removesuffix(TRACEBACK)}{lines[-1].strip()}"]
    return f"{raised.name}: {chr(10).join(lines)}"


def by_exception(evidence: Evidence, phase: str | None) -> Failure | None:
    """What the exception that ended the process means; None without one."""
    if not evidence.raised:
        return None
    raised = _telling(evidence.raised)
    status = _STATUS.match(raised.message)
    if raised.name in JAX_ERRORS or (status and "_" in status[1]):
        return _by_status(raised, status[1] if status else "", phase)
    return _by_type(raised, phase)


def _telling(chain: tuple[Raised, ...]) -> Raised:
    """The last, unless it only wraps what came before."""
    for raised in chain:
        if raised.name not in ("RuntimeError", "Exception", "SystemExit", "ExceptionGroup"):
            if not raised.name.startswith("JaxStackTrace"):
                return raised
    return chain[0]


def _by_status(raised: Raised, status: str, phase: str | None) -> Failure:
    kind = FailureKind.RUNTIME_CRASH
    if phase in _COMPILES or phase == Phase.AUDITED:
        kind = FailureKind.COMPILE_ERROR
    reason, advice = status.lower(), ""
    if status == "UNIMPLEMENTED":
        kind = FailureKind.UNSUPPORTED_HERE
        advice = "This backend has no implementation of it. Use another backend, or write the "
        advice += "step without it; no flag is known to help."
    elif status in _TRANSIENT:
        kind = FailureKind.INFRASTRUCTURE
        advice = "A service or another process went away. Try again."
    elif status == "DEADLINE_EXCEEDED":
        kind, reason = FailureKind.TIMEOUT, "stall"
        advice = "Something waited in vain, for another process as a rule. Try again, and look at "
        advice += "the logs of all processes."
    elif status in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
        kind = FailureKind.ENVIRONMENT
        advice = "Something may not be read or written. Check permissions."
    elif kind is FailureKind.COMPILE_ERROR:
        advice = "No flag is known to help; the compiler refuses this program."
    else:
        advice = "No flag is known to help; it compiled and failed while it ran."
    transient = status in _TRANSIENT or status == "DEADLINE_EXCEEDED"
    ladder = kind not in (FailureKind.UNSUPPORTED_HERE, FailureKind.ENVIRONMENT)
    return Failure(
        kind, signature(raised), reason=reason, advice=advice, transient=transient, ladder=ladder
    )


def _by_type(raised: Raised, phase: str | None) -> Failure:
    name, text = raised.name, raised.message

    def stop(kind: FailureKind, reason: str, advice: str, *, again: bool = False) -> Failure:
        given = signature(raised)
        return Failure(kind, given, reason=reason, advice=advice, transient=again, ladder=False)

    if name in ("ImportError", "ModuleNotFoundError"):
        advice = "A module cannot be imported. Install what is missing, or correct its name."
        return stop(FailureKind.ENVIRONMENT, "import", advice)
    if name in _FILES:
        advice = "A file or directory is not what the program expects. Correct the path."
        return stop(FailureKind.CONFIG_ERROR, "file", advice)
    if _NETWORK.fullmatch(name):
        advice = "The network, or a service on it, failed. Try again."
        return stop(FailureKind.INFRASTRUCTURE, "network", advice, again=True)
    if name == "FloatingPointError":
        advice = "The numbers are no longer finite. Look at data, learning rate and precision."
        return stop(FailureKind.NUMERIC_MISMATCH, "non_finite", advice)
    if name in ("NotImplementedError", "ValueError") and _BACKEND.search(text):
        if name == "NotImplementedError" or "interpret mode" in text:
            advice = "This backend cannot do it. Use another backend or implementation."
            return stop(FailureKind.UNSUPPORTED_HERE, "backend", advice)
    if _NO_DEVICE.search(text):
        advice = "The backend that the program asks for is not there. Check JAX_PLATFORMS, driver "
        advice += "and installation."
        return stop(FailureKind.ENVIRONMENT, "backend", advice)
    if name in _USERS or name == "NotImplementedError" or _is_jax_type_error(raised):
        advice = "The program or its configuration is wrong; no way of running it helps. The "
        advice += "traceback in the log names the line."
        return stop(FailureKind.CONFIG_ERROR, "program", advice)
    return _by_phase(raised, phase)


def _is_jax_type_error(raised: Raised) -> bool:
    return raised.type.startswith(("jax.", "jax._src.")) and raised.name.endswith("Error")


def _by_phase(raised: Raised, phase: str | None) -> Failure:
    given = signature(raised)
    if phase in _COMPILES:
        advice = "No flag is known to help; the compiler refuses this program."
        return Failure(FailureKind.COMPILE_ERROR, given, advice=advice)
    if phase in _RUNS:
        advice = "No flag is known to help; it compiled and failed while it ran."
        return Failure(FailureKind.RUNTIME_CRASH, given, advice=advice)
    advice = "It raised an error that is not known. The traceback in the log names the line."
    return Failure(FailureKind.UNKNOWN, given, advice=advice)
