"""Audits of a traced program: what would fail later, or fail only elsewhere.

Ordered effects and host callbacks are behind marin-community/levanter#727 and jax-ml/jax#25671;
``pure_callback`` leaves no trace in a jaxpr's effects, so the equations are walked.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from mlm_recipe.preflight.jaxpr import constants, equations, jaxprs, source_line

_WIDE = ("float64", "complex128")
_MOST_NAMED = 5


@dataclass(frozen=True)
class AuditResult:
    """What one audit found."""

    name: str
    verdict: str = "ok"
    """``ok``, ``warn`` or ``refuse``."""
    message: str = ""
    where: str | None = None
    """``file.py:123 (function)`` of the first finding."""
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def finding(
    name: str, severity: str, message: str, *, where: str | None = None, **details: Any
) -> AuditResult:
    """A result at the severity the user set."""
    return AuditResult(name, severity, message, where, details)


def audit_ordered_effects(jaxpr: Any, severity: str) -> AuditResult:
    """No ordered callback: its token aborts the runtime or poisons later calls."""
    found = [eqn for eqn in equations(jaxpr) if eqn.params.get("ordered") is True]
    return _callbacks("ordered_effects", severity, "ordered callback", found)


def audit_host_callbacks(jaxpr: Any, severity: str) -> AuditResult:
    """No callback into Python, breakpoints included: each stalls the device in every step."""
    found = [eqn for eqn in equations(jaxpr) if _is_callback(eqn)]
    return _callbacks("host_callbacks", severity, "host callback", found)


def _is_callback(eqn: Any) -> bool:
    name = eqn.primitive.name
    return "callback" in name or name in ("infeed", "outfeed", "debug_print", "outside_call")


def _callbacks(name: str, severity: str, what: str, found: list[Any]) -> AuditResult:
    if not found:
        return AuditResult(name)
    places = list(dict.fromkeys(source_line(eqn) for eqn in found))
    first = found[0]
    label = "jax.debug.breakpoint" if _is_breakpoint(first) else first.primitive.name
    message = f"{what} in the step: {label} at {places[0]}; remove it or move it out of the step"
    return finding(name, severity, message, where=places[0], places=places, count=len(found))


def _is_breakpoint(eqn: Any) -> bool:
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return any("jax/_src/debugger" in frame.file_name for frame in frames)


def audit_float64(jaxpr: Any, severity: str) -> AuditResult:
    """No 64-bit floats: twice the memory, and far slower, for nothing."""
    for eqn in equations(jaxpr):
        for var in eqn.outvars:
            dtype = str(getattr(var.aval, "dtype", ""))
            if dtype in _WIDE:
                where = source_line(eqn)
                return finding(
                    "float64", severity, f"{dtype} is computed at {where}; use float32", where=where
                )
    for inner in jaxprs(jaxpr):
        wide = [v for v in inner.invars if str(getattr(v.aval, "dtype", "")) in _WIDE]
        if wide:
            message = f"an argument is {wide[0].aval.dtype}; pass float32"
            return finding("float64", severity, message)
    return AuditResult("float64")


def audit_captured_constants(jaxpr: Any, limit_bytes: float, severity: str) -> AuditResult:
    """No large array baked into the program: it is copied into every executable and folded.

    Args:
        jaxpr: the closed jaxpr.
        limit_bytes: size above which an array counts.
        severity: of a finding.
    """
    arrays = list(constants(jaxpr))
    large = [a for a in arrays if getattr(a, "nbytes", 0) > limit_bytes]
    if not large:
        return AuditResult("captured_constants")
    large.sort(key=lambda a: -a.nbytes)
    listed = [f"{a.dtype}{list(a.shape)}" for a in large[:_MOST_NAMED]]
    message = (
        f"{len(large)} captured array(s), the largest {listed[0]} of "
        f"{large[0].nbytes / 2**20:.1f} MiB; pass them as arguments"
    )
    total = sum(a.nbytes for a in large)
    return finding("captured_constants", severity, message, arrays=listed, bytes=total)
