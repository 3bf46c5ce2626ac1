"""GuardConfig: the YAML block ``guard``. Importable without jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from mlm_recipe.errors import ConfigError
from mlm_recipe.guard.variants import make_spec

Severity = Literal["refuse", "warn", "off"]
"""What an audit's finding does: end the run, stand in the report, or not be looked for."""


@dataclass(frozen=True)
class AuditsConfig:
    """What is looked for in the program before it is compiled, and after."""

    ordered_effects: Severity = "refuse"
    """Ordered callbacks and prints, ``jax.debug.breakpoint`` included: they have crashed XLA."""
    host_callbacks: Severity = "refuse"
    """Any call back to Python from inside the step."""
    float64: Severity = "refuse"
    """Double precision anywhere in the step."""
    donation: Severity = "warn"
    """Donated buffers that XLA does not reuse: the state is held twice."""
    replicated_parameters: Severity = "warn"
    """Large parameters whole on every device, under a mesh that shards parameters."""
    captured_constants: Severity = "warn"
    """Arrays baked into the program, above ``captured_constants_mib``."""
    captured_constants_mib: float = 1.0
    """Size in MiB from which a captured constant counts."""
    resharding: Severity = "warn"
    """State that leaves a step sharded otherwise than it entered: step 2 recompiles."""
    rematerialization: Severity = "warn"
    """XLA replicates a tensor to reshard it ("involuntary full rematerialization")."""


@dataclass(frozen=True)
class VariantConfig:
    """A user's own variant; ``--variant NAME`` starts with it, and catalogues may name it."""

    xla_flags: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Flag, without dashes -> value; laid over ``XLA_FLAGS``."""
    env: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Environment variables."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Dotted path of the configuration -> value."""
    after: list[str] = field(default_factory=list)
    """Kinds of failure after which it may be tried; empty is any."""
    platforms: list[str] = field(default_factory=list)
    """``cuda``, ``tpu``, ``cpu``; empty is all."""
    neutrality: Literal["same_plan", "reassociation", "objective"] = "reassociation"
    """What it may change in the numbers; ``objective`` is never tried automatically."""
    cost: str = ""
    """Its price, in plain words, for the report."""


@dataclass(frozen=True)
class GuardConfig:
    """How a run is proved before it starts, and what is done when it dies.

    Raises ConfigError for values that cannot be meant (``check_guard``).
    """

    preflight: bool = True
    """Prove the train step in a child process before training; false trains at once."""
    cache_dir: str = "cache/guard"
    """Remembered verdicts, children's files, and the compilation cache shared with training."""
    max_attempts: int = 8
    """Most children for one target, retries not counted."""
    max_seconds: float = 2700.0
    """Wall time after which no further variant is tried."""
    start_seconds: float = 300.0
    """Longest that each phase before compilation may take: imports, backend, building, tracing."""
    compile_seconds: float = 1800.0
    """Longest compilation of one variant."""
    execute_seconds: float = 600.0
    """Longest that the real steps of one variant may take."""
    host_memory_gib: float | None = None
    """GiB of host memory a child may take; null leaves it to the system."""
    execute_steps: int = 2
    """Real steps on attached devices before training; 0 only compiles."""
    memory_warn: float = 0.85
    """Share of the device's budget above which the report warns."""
    memory_refuse: float = 0.95
    """Share of the device's budget above which a variant is refused."""
    gpu_memory_fraction: float = 0.75
    """Share of a GPU's memory that XLA's allocator takes."""
    gpu_reserve_gib: float = 1.5
    """GiB per GPU left to NCCL, cuDNN and cuBLAS."""
    remember_days: float = 14.0
    """Age at which a remembered failure is tried again; 0 remembers none. Passes have no age."""
    catalogue: str | None = None
    """YAML file of further crash signatures, looked at before the package's."""
    variants: dict[str, VariantConfig] = field(default_factory=dict)
    """Further variants by name, or other versions of the package's."""
    audits: AuditsConfig = field(default_factory=AuditsConfig)
    """What the program is audited for."""
    variant: str = "as_configured"
    """What the run was started as; the launcher writes it, and ``--variant NAME`` asks for it."""
    restarts: int = 3
    """Restarts of training from its last checkpoint after a backend died."""

    def __post_init__(self):
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["audits"] = vars(self.audits)
        values["variants"] = {name: vars(entry) for name, entry in self.variants.items()}
        check_guard(values)

    def audit_severities(self) -> dict[str, str]:
        """Audit -> ``refuse``, ``warn`` or ``off``, as the child's spec has them."""
        return {name: value for name, value in vars(self.audits).items() if isinstance(value, str)}

    def limits(self) -> dict[str, float]:
        """Limits by name, as the child's spec has them."""
        shares = {name: getattr(self, name) for name in (*_FRACTIONS, "gpu_reserve_gib")}
        return {**shares, "captured_constants_mib": self.audits.captured_constants_mib}


_FRACTIONS = ("memory_warn", "memory_refuse", "gpu_memory_fraction")
_POSITIVE = ("max_seconds", "start_seconds", "compile_seconds", "execute_seconds")
_NOT_NEGATIVE = ("execute_steps", "gpu_reserve_gib", "remember_days", "restarts")


def check_guard(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first value of the raw block ``guard`` that cannot be meant.

    What is left out is at its default; types are already right.
    """
    defaults = {f.name: f.default for f in fields(GuardConfig)}
    given = {**defaults, **{key: value for key, value in values.items() if value is not None}}
    for name in _FRACTIONS:
        problem = "it is no share in (0, 1]"
        _require(0 < given[name] <= 1, name, given[name], problem, "give e.g. 0.85")
    for name in _POSITIVE:
        _require(given[name] > 0, name, given[name], "it must be above 0", "give seconds")
    for name in _NOT_NEGATIVE:
        _require(given[name] >= 0, name, given[name], "it must not be negative", "0 turns it off")
    ceiling = given["host_memory_gib"]
    fits = ceiling is None or ceiling > 0
    _require(fits, "host_memory_gib", ceiling, "it must be above 0", "give GiB, or null")
    attempts = given["max_attempts"]
    _require(attempts >= 1, "max_attempts", attempts, "nothing could be tried", "give 1 or more")
    _require(
        given["memory_warn"] <= given["memory_refuse"],
        "memory_warn",
        given["memory_warn"],
        f"it is above guard.memory_refuse = {given['memory_refuse']}, so nothing could warn",
        "make it smaller, or guard.memory_refuse larger",
    )
    _check_audits(values.get("audits") or {})
    for name, entry in (values.get("variants") or {}).items():
        make_spec(name, entry or {})


def _check_audits(audits: Mapping[str, Any]) -> None:
    for name, value in audits.items():
        if name == "captured_constants_mib":
            _require(value >= 0, f"audits.{name}", value, "it must not be negative", "give MiB")
            continue
        words = get_args(Severity)
        if value is False:  # YAML 1.1 reads a bare off as false
            problem, fix = "YAML reads a bare off as false", 'write "off" with quotes'
            raise ConfigError(f"guard.audits.{name}", value, problem, fix)
        fix = f"use one of: {', '.join(words)}"
        _require(value in words, f"audits.{name}", value, "there is no such answer", fix)


def _require(holds: bool, name: str, value: object, problem: str, fix: str) -> None:
    if not holds:
        raise ConfigError(f"guard.{name}", value, problem, fix)
