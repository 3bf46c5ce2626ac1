"""The guard's words: what is tried, how a child ended, and what that means. No jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

AS_CONFIGURED = "as_configured"


class FailureKind(StrEnum):
    """What a death means for what to do next."""

    CONFIG_ERROR = "config_error"
    """The user's program or configuration is wrong; no variant helps."""
    ENVIRONMENT = "environment"
    """The machine or installation is (a driver, ptxas, a stale cache)."""
    UNKNOWN_FLAG = "unknown_flag"
    """XLA does not know a flag or option; drop it."""
    UNSUPPORTED_HERE = "unsupported_here"
    """This backend, or this mode of preflight, cannot do it."""
    COMPILE_CRASH = "compile_crash"
    """The compiler killed the process."""
    COMPILE_ERROR = "compile_error"
    """The compiler raised."""
    OUT_OF_MEMORY = "out_of_memory"
    """Of the device or of the host; ``Failure.reason`` says which."""
    TIMEOUT = "timeout"
    """A phase did not end in its time."""
    RUNTIME_CRASH = "runtime_crash"
    """It compiled, and died or raised while it ran."""
    NUMERIC_MISMATCH = "numeric_mismatch"
    """It ran, with other numbers than the reference, or with none."""
    AUDIT_FAILED = "audit_failed"
    """An audit that is set to refuse found something."""
    INFRASTRUCTURE = "infrastructure"
    """A bad node, network or a kill from outside: the same variant may pass elsewhere."""
    UNKNOWN = "unknown"


class Neutrality(StrEnum):
    """What a variant may change in the numbers."""

    SAME_PLAN = "same_plan"
    """Nothing: the same program on the same plan."""
    REASSOCIATION = "reassociation"
    """The order of additions, hence the last bits."""
    OBJECTIVE = "objective"
    """The training objective; never tried automatically."""


@dataclass(frozen=True)
class Variant:
    """One way to run: XLA flags, environment and config overrides, nothing more."""

    name: str
    xla_flags: Mapping[str, str] = field(default_factory=dict)
    """Name without dashes -> value as text; laid over the user's ``XLA_FLAGS``."""
    env: Mapping[str, str] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Dotted path of the effective configuration -> value."""
    after: frozenset[FailureKind] = frozenset()
    """Kinds of failure after which it may be tried; empty is any."""
    neutrality: Neutrality = Neutrality.REASSOCIATION
    cost: str = ""
    """Known price, in plain words."""


@dataclass(frozen=True)
class ChildExit:
    """How a supervised process ended."""

    command: tuple[str, ...]
    returncode: int
    """As ``subprocess`` gives it: negative is a signal."""
    phase: str | None
    """Last phase in its phase file; None without one."""
    seconds: float
    timed_out: bool = False
    """The supervisor ended it because a deadline passed."""
    over_memory: bool = False
    """The supervisor ended it because it passed the memory ceiling."""
    peak_rss: int = 0
    """Bytes, over the whole process group, as sampled."""
    log_path: str = ""
    log_head: str = ""
    log_tail: str = ""
    """First and last part of stdout and stderr together; the whole is at ``log_path``."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds from start at which each phase was reached."""

    @property
    def signal(self) -> int | None:
        """Number of the signal that ended it."""
        return -self.returncode if self.returncode < 0 else None

    @property
    def log(self) -> str:
        """Head and tail, for matching."""
        return f"{self.log_head}\n{self.log_tail}"


@dataclass(frozen=True)
class Failure:
    """What a death means."""

    kind: FailureKind
    signature: str
    """Normalised and stable over versions, e.g. ``shape_tree.cc: children_start_id >= 0``."""
    name: str = ""
    """Name of the catalogue entry that matched; empty for none."""
    reason: str = ""
    """Finer than the kind: ``rendezvous``, ``constant_folding``, ``host``, ``device``, ..."""
    message: str = ""
    """The decisive line, for people."""
    advice: str = ""
    """What helps, in plain words; says so where nothing is known to."""
    phase: str | None = None
    remedies: tuple[str, ...] = ()
    """Names of variants, the most promising first."""
    refs: tuple[str, ...] = ()
    """Public issues, e.g. ``marin-community/levanter#727``."""
    flags: tuple[str, ...] = ()
    """Flags or options the message names as unknown."""
    last_pass: str | None = None
    """The HLO pass that ran last, where breadcrumbs were on."""
    transient: bool = False
    """The same variant may pass when tried again."""
    ladder: bool = True
    """False: no variant helps, stop."""
