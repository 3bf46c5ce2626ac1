"""The report: what was tried for each target, and what came of it. ``report.schema.json``."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlm_recipe.guard.attempts import Attempted, Outcome
from mlm_recipe.guard.exits import ExitCode, overall
from mlm_recipe.guard.types import Variant
from mlm_recipe.guard.variants import is_fallback
from mlm_recipe.guard.verdicts import failure_as_json

SCHEMA_VERSION = 1
GIB = 2**30


@dataclass(frozen=True)
class AttemptRecord:
    """One child, or a remembered one."""

    variant: str
    role: str
    verdict: str
    """``ok``, ``warn`` or ``failed``."""
    seconds: float
    failure: Mapping[str, Any] | None = None
    moved: bool = False
    remembered: bool = False
    phase: str | None = None
    returncode: int | None = None
    signal: int | None = None
    timed_out: bool = False
    peak_rss: int = 0
    log_path: str = ""
    bundle: str = ""
    """Directory of the reproducer, of a death."""


@dataclass(frozen=True)
class TargetReport:
    """One target."""

    target: Mapping[str, Any]
    """As in the child's result.json."""
    verdict: str
    """``ok``, ``warn``, ``fallback`` or ``failed``."""
    exit_code: int
    variant: Mapping[str, Any] | None
    """The chosen one, with flags, environment, overrides, neutrality and cost."""
    attempts: tuple[AttemptRecord, ...]
    seconds: float
    failure: Mapping[str, Any] | None = None
    programs: tuple[Mapping[str, Any], ...] = ()
    """Of the attempt that passed, or of the last that came so far."""
    execution: Mapping[str, Any] | None = None
    numerics: Mapping[str, Any] | None = None
    """Without the sketch."""
    versions: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    dropped_flags: tuple[str, ...] = ()
    stopped_by: str = ""


@dataclass(frozen=True)
class Report:
    """All targets of one preflight."""

    targets: tuple[TargetReport, ...]
    created: str
    """UTC, ISO 8601."""
    seconds: float
    strict: bool = False
    host: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """Of the gravest target."""
        return overall((target.exit_code for target in self.targets), strict=self.strict)

    def as_json(self) -> dict[str, Any]:
        """What ``preflight.json`` holds."""
        return {
            "schema_version": SCHEMA_VERSION,
            "created": self.created,
            "seconds": round(self.seconds, 3),
            "strict": self.strict,
            "exit_code": int(self.exit_code),
            "host": dict(self.host),
            "targets": [_target_json(target) for target in self.targets],
        }

    def write(self, path: Path) -> None:
        """Atomically."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)


def _target_json(target: TargetReport) -> dict[str, Any]:
    raw = dict(vars(target))
    raw["attempts"] = [dict(vars(attempt)) for attempt in target.attempts]
    for name in ("programs", "dropped_flags"):
        raw[name] = list(raw[name])
    return raw


def read_report(path: Path) -> Report:
    """What ``Report.write`` wrote.

    Raises:
        OSError, ValueError, KeyError, TypeError: it cannot be read, or is something else.
    """
    raw = json.loads(path.read_text(encoding="utf-8"))
    targets = []
    for entry in raw["targets"]:
        attempts = tuple(AttemptRecord(**attempt) for attempt in entry["attempts"])
        tuples = {name: tuple(entry[name]) for name in ("programs", "dropped_flags")}
        targets.append(TargetReport(**{**entry, **tuples, "attempts": attempts}))
    return Report(tuple(targets), raw["created"], raw["seconds"], raw["strict"], raw["host"])


def variant_as_json(variant: Variant) -> dict[str, Any]:
    """A Variant as JSON values."""
    return {
        "name": variant.name,
        "xla_flags": dict(variant.xla_flags),
        "env": dict(variant.env),
        "overrides": dict(variant.overrides),
        "neutrality": variant.neutrality.value,
        "cost": variant.cost,
    }


def target_report(
    outcome: Outcome,
    *,
    target: Mapping[str, Any] | None = None,
    bundles: Mapping[str, str] | None = None,
) -> TargetReport:
    """The report of one target from the end of its ladder.

    Args:
        outcome: of ``run_ladder``.
        target: for children that died before they could say; ``{"name": ...}`` suffices.
        bundles: directory of a child -> directory of its reproducer.
    """
    results = [done.tried.result for done in outcome.attempts if done.tried.result]
    result = (outcome.winner.tried.result if outcome.winner else None) or _last(results)
    numerics = dict(result.get("numerics") or {})
    numerics.pop("sketch", None)
    return TargetReport(
        target=result.get("target") or target or {"name": "auto"},
        verdict=_verdict(outcome, result),
        exit_code=int(outcome.exit_code),
        variant=variant_as_json(outcome.chosen) if outcome.chosen else None,
        attempts=tuple(_record(done, bundles or {}) for done in outcome.attempts),
        seconds=round(outcome.seconds, 3),
        failure=failure_as_json(outcome.failure) if outcome.failure else None,
        programs=tuple(result.get("programs") or ()),
        execution=result.get("execution"),
        numerics=numerics or None,
        versions=result.get("versions") or {},
        skipped=outcome.skipped,
        dropped_flags=outcome.dropped_flags,
        stopped_by=outcome.stopped_by,
    )


def _last(results: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    return results[-1] if results else {}


def _verdict(outcome: Outcome, result: Mapping[str, Any]) -> str:
    if outcome.chosen is None:
        return "failed"
    if outcome.exit_code is ExitCode.FALLBACK and is_fallback(outcome.chosen):
        return "fallback"
    return "warn" if result.get("verdict") == "warn" else "ok"


def _record(done: Attempted, bundles: Mapping[str, str]) -> AttemptRecord:
    ended, failure = done.tried.exit, done.failure
    verdict = "failed" if failure else str((done.tried.result or {}).get("verdict", "ok"))
    return AttemptRecord(
        variant=done.variant.name,
        role=done.role,
        verdict="failed" if verdict == "refused" else verdict,
        seconds=round(done.seconds, 3),
        failure=failure_as_json(failure) if failure else None,
        moved=done.moved,
        remembered=done.tried.remembered,
        phase=ended.phase if ended else failure.phase if failure else None,
        returncode=ended.returncode if ended else None,
        signal=ended.signal if ended else None,
        timed_out=bool(ended and ended.timed_out),
        peak_rss=ended.peak_rss if ended else 0,
        log_path=ended.log_path if ended else "",
        bundle=bundles.get(done.tried.directory, ""),
    )


def largest_memory(target: TargetReport) -> Mapping[str, Any]:
    """``memory`` of the program that needs most; empty where none was budgeted."""
    found = [p["memory"] for p in target.programs if p.get("memory")]
    return max(found, key=lambda memory: memory.get("need") or 0, default={})


def wandb_summary(report: Report) -> dict[str, str | int | float | bool]:
    """Scalars under ``guard/``; of the first target, with seconds and exit code of all."""
    summary: dict[str, str | int | float | bool] = {
        "guard/seconds": round(report.seconds, 3),
        "guard/exit_code": int(report.exit_code),
        "guard/targets": len(report.targets),
    }
    if not report.targets:
        return summary
    target = report.targets[0]
    memory = largest_memory(target)
    failures = [a.failure for a in target.attempts if a.failure]
    hits = [p.get("cache_hit") for p in target.programs if p.get("cache_hit") is not None]
    values = {
        "verdict": target.verdict,
        "variant": target.variant["name"] if target.variant else "",
        "kind": (target.failure or (failures[0] if failures else {})).get("kind", ""),
        "signature": (target.failure or (failures[0] if failures else {})).get("signature", ""),
        "attempts": len(target.attempts),
        "remembered": any(a.remembered for a in target.attempts),
        "memory_gib": round(memory["need"] / GIB, 4) if memory.get("need") else None,
        "memory_fraction": memory.get("fraction"),
        "cache_hit": all(hits) if hits else None,
        "compile_seconds": sum(p.get("compile_seconds") or 0 for p in target.programs),
    }
    return summary | {f"guard/{k}": v for k, v in values.items() if v is not None}


def attempts_rows(report: Report) -> tuple[list[Any], list[Any]]:
    """Columns and rows of all attempts, for a W&B table."""
    columns = ["target", "variant", "role", "verdict", "kind", "signature", "phase", "seconds"]
    rows = [
        [
            target.target.get("name", "auto"),
            attempt.variant,
            attempt.role,
            attempt.verdict,
            (attempt.failure or {}).get("kind", ""),
            (attempt.failure or {}).get("signature", ""),
            attempt.phase or "",
            attempt.seconds,
        ]
        for target, attempt in _all_attempts(report.targets)
    ]
    return columns, rows


def _all_attempts(
    targets: Iterable[TargetReport],
) -> Iterable[tuple[TargetReport, AttemptRecord]]:
    return ((target, attempt) for target in targets for attempt in target.attempts)
