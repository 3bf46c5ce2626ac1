"""What is remembered: one JSON file per question, so that the same question is asked once.

A question is a program, on these versions, for this target, in this environment, as this variant.
"""

import hashlib
import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlm_recipe.guard.flags import parse_flags
from mlm_recipe.guard.types import Failure, FailureKind, Variant

SCHEMA_VERSION = 1
DETERMINISTIC = frozenset(
    {
        FailureKind.COMPILE_CRASH,
        FailureKind.COMPILE_ERROR,
        FailureKind.NUMERIC_MISMATCH,
        FailureKind.AUDIT_FAILED,
        FailureKind.UNSUPPORTED_HERE,
    }
)
"""Kinds that come again. Out of memory does too, but only where arithmetic says so
(``reason`` is ``device`` and the compiler or the budget found it)."""

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "libtpu",
    "marin-levanter",
    "marin-haliax",
    "equinox",
    "optax",
    "numpy",
)
_NATIVE = frozenset(name for name in _PACKAGES if name.startswith(("jaxlib", "jax-cuda", "libtpu")))
_VARIABLES = (
    "LIBTPU_INIT_ARGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "CUDA_VISIBLE_DEVICES",
    "TPU_VISIBLE_CHIPS",
)
_NOT_MEANT = ("JAX_COMPILATION_CACHE", "JAX_ENABLE_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
_NOT_MEANT += ("JAX_LOG", "JAX_DEBUG_LOG", "JAX_DUMP", "JAX_TRACEBACK")


@dataclass(frozen=True)
class Verdict:
    """A remembered answer."""

    passed: bool
    failure: Failure | None
    payload: Mapping[str, Any]
    """What the caller kept: chosen variant, memory, result of the child; JSON values."""
    created: float
    """Seconds since the epoch."""


def versions(digests: Path | None = None) -> dict[str, str]:
    """Versions of Python and of what compiles, with a digest of each native library.

    Reads package metadata only; imports nothing. A version number can be stale or be built twice,
    the library's bytes cannot. Digests are cached by path, size and time of change.

    Args:
        digests: file of the cache; None reads every library.
    """
    import platform

    known = _read(digests) or {}
    found, fresh = {"python": platform.python_version()}, {}
    for name in _PACKAGES:
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = package.version
        for entry in (package.files or ()) if name in _NATIVE else ():
            if entry.name.endswith(".so") or ".so." in entry.name:
                _digest(f"{name}:{entry}", Path(str(package.locate_file(entry))), known, fresh)
    for name in sorted({label.partition(":")[0] for label in fresh}):
        parts = sorted((k, e["sha256"]) for k, e in fresh.items() if k.startswith(f"{name}:"))
        found[f"{name} native"] = hashlib.sha256(repr(parts).encode()).hexdigest()
    if digests is not None and fresh != known:
        _write(digests, fresh)
    return found


def _digest(label: str, path: Path, known: Mapping[str, Any], fresh: dict[str, Any]) -> None:
    try:
        stat = path.stat()
        identity = [str(path), stat.st_size, stat.st_mtime_ns]
        if known.get(label, {}).get("identity") == identity:
            fresh[label] = known[label]
            return
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return
    fresh[label] = {"identity": identity, "sha256": sha256}


def effective_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The part of the environment that decides what is compiled and how it runs.

    ``XLA_FLAGS`` as a mapping without its dump flags, ``LIBTPU_INIT_ARGS``, allocator settings,
    and ``JAX_*`` but for caches and logging.
    """
    flags = parse_flags(environ.get("XLA_FLAGS", ""))
    kept = {
        name: value
        for name, value in environ.items()
        if name in _VARIABLES or (name.startswith("JAX_") and not name.startswith(_NOT_MEANT))
    }
    meant = {name: v for name, v in flags.items() if not name.startswith("xla_dump_")}
    return {"xla_flags": meant, "variables": kept}


def verdict_key(
    *,
    program: str,
    versions: Mapping[str, str],
    target: Mapping[str, Any] | str,
    environ: Mapping[str, str],
    variant: Variant,
    mode: str,
) -> str:
    """64 hex digits; equal for equal questions, in whatever order mappings are.

    Args:
        program: a digest of the program: of its StableHLO, or of the configuration and the code
            that make it.
        versions: from ``versions``.
        target: the target as JSON; for attached devices ``hardware_identity()``.
        environ: with the variant's flags applied.
        variant: its overrides count, its name and price do not.
        mode: e.g. ``compile`` or ``execute:2``.
    """
    question = {
        "schema_version": SCHEMA_VERSION,
        "program": program,
        "versions": dict(versions),
        "target": target if isinstance(target, str) else dict(target),
        "environment": effective_environment(environ),
        "overrides": dict(variant.overrides),
        "variant_env": {k: v for k, v in variant.env.items() if not k.startswith(_NOT_MEANT)},
        "mode": mode,
    }
    text = json.dumps(question, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def worth_remembering(failure: Failure | None) -> bool:
    """Passes, and failures that come again: nothing transient, timed, or of this one machine."""
    if failure is None:
        return True
    if failure.transient:
        return False
    if failure.kind is FailureKind.OUT_OF_MEMORY:
        return failure.reason == "device" and failure.phase in ("compile_begin", "compiled")
    return failure.kind in DETERMINISTIC


class VerdictMemory:
    """The directory of verdicts. Two writers of one key write the same, one after the other."""

    def __init__(self, directory: Path, *, remember_days: float = 14.0, force: bool = False):
        self._directory, self._days, self._force = directory, remember_days, force

    def find(self, key: str, *, now: float | None = None) -> Verdict | None:
        """The remembered answer; None where there is none, it is too old, or ``force`` is set."""
        raw = None if self._force else _read(self._path(key))
        if raw is None or raw.get("schema_version") != SCHEMA_VERSION:
            return None
        try:
            failure = failure_from_json(raw["failure"]) if raw["failure"] else None
            verdict = Verdict(raw["failure"] is None, failure, raw["payload"], raw["created"])
        except (KeyError, TypeError, ValueError):
            return None
        age = (time.time() if now is None else now) - verdict.created
        expired = not verdict.passed and not 0 <= age < self._days * 86400
        return None if expired else verdict

    def remember(
        self,
        key: str,
        failure: Failure | None,
        payload: Mapping[str, Any],
        *,
        now: float | None = None,
    ) -> bool:
        """Write an answer down, if it is worth it (``worth_remembering``); says whether it was."""
        if not worth_remembering(failure) or (failure is not None and self._days <= 0):
            return False
        content = {
            "schema_version": SCHEMA_VERSION,
            "created": time.time() if now is None else now,
            "failure": failure_as_json(failure) if failure else None,
            "payload": dict(payload),
        }
        return _write(self._path(key), content)

    def forget(self, key: str) -> None:
        """Remove an answer that turned out wrong, such as a pass that died in training."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.json"


def failure_as_json(failure: Failure) -> dict[str, Any]:
    """A Failure as JSON values."""
    return {**vars(failure), "kind": failure.kind.value}


def failure_from_json(raw: Mapping[str, Any]) -> Failure:
    """Raises KeyError, TypeError or ValueError for anything else than ``failure_as_json`` gave."""
    values = dict(raw)
    for name in ("remedies", "refs", "flags"):
        values[name] = tuple(values.get(name) or ())
    return replace(Failure(**values), kind=FailureKind(values["kind"]))


def _read(path: Path | None) -> dict[str, Any] | None:
    """A JSON mapping; None where the file is absent, torn or something else."""
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _write(path: Path, content: Mapping[str, Any]) -> bool:
    """Atomically, in a directory of the user's own; memory that cannot be written is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(partial, path)
    except OSError:
        return False
    return True
