"""Runs preflight children: one directory, one spec and one process for each variant."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlm_recipe.guard.attempts import Tried
from mlm_recipe.guard.catalogue import Catalogue
from mlm_recipe.guard.classify import HostFacts, classify
from mlm_recipe.guard.config import GuardConfig
from mlm_recipe.guard.numerics import check_numerics
from mlm_recipe.guard.status import Phase
from mlm_recipe.guard.supervise import Limits, supervise
from mlm_recipe.guard.types import ChildExit, Failure, FailureKind, Neutrality, Variant
from mlm_recipe.guard.variants import apply_flags

EXIT_REFUSED = 3

_BREADCRUMBS = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "hlo_pass_pipeline=1"}
_WITHOUT_DEVICES = {
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "TPU_SKIP_MDS_QUERY": "1",
}
_BEFORE_COMPILATION = (
    *(Phase.START, Phase.JAX_IMPORTED, Phase.BACKEND_READY, Phase.CONFIGURED),
    *(Phase.TRACED, Phase.AUDITED, Phase.LOWERED),
)
_SHARED_CACHE = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")


@dataclass(frozen=True)
class Job:
    """What is to be proved, whatever the variant."""

    entry: str
    """``pkg.mod:build`` or ``path/file.py:build``."""
    arguments: Callable[[Variant], Mapping[str, Any]]
    """The entry's arguments, under a variant's overrides."""
    target: str
    """``auto``, or a target that is not there."""
    environ: Mapping[str, str]
    """Of the training program; children get it under the variant's."""
    directory: Path
    """Each child has its own directory below."""
    reference_arguments: Callable[[int], Mapping[str, Any]] | None = None
    """Arguments for one CPU device, given the examples of the gate; None: no gate, no fallback."""

    @property
    def absent(self) -> bool:
        """The devices are not there."""
        return self.target != "auto"


@dataclass
class Children:
    """Attempts at a job, in order. Call it as the ladder's ``attempt``."""

    job: Job
    config: GuardConfig
    catalogue: Catalogue
    host: HostFacts | None = None
    made: int = 0
    _references: dict[int, Tried] = field(default_factory=dict)

    def __call__(self, variant: Variant, *, breadcrumbs: bool = False) -> Tried:
        """Run one variant in a child."""
        measured = not self.job.absent and variant.neutrality is not Neutrality.SAME_PLAN
        environ = apply_flags(variant, self.job.environ)
        if breadcrumbs:
            environ |= _BREADCRUMBS
        if self.job.absent:
            environ = _without(environ, _SHARED_CACHE) | _WITHOUT_DEVICES
        return self._run(
            variant.name,
            environ,
            arguments=self.job.arguments(variant),
            target=self.job.target,
            numerics="measure" if measured else "none",
        )

    def gate(self, variant: Variant, tried: Tried) -> Failure | None:
        """The variant's loss and gradient against the reference; None where they agree.

        On absent devices nothing can run: the variant passes, and the report says that its
        numbers are not proved.
        """
        if self.job.absent:
            return None
        measured = (tried.result or {}).get("numerics")
        if measured is None or self.job.reference_arguments is None:
            return _mismatch(
                "the program names no gradient, so nothing vouches for a fallback's numbers"
            )
        reference = self._reference(int(measured.get("rows") or 0))
        if reference.failure is not None:
            return _mismatch(f"there is no reference: {reference.failure.message}")
        return check_numerics((reference.result or {}).get("numerics"), measured)

    def _reference(self, rows: int) -> Tried:
        """The same numbers on one CPU device, one operation at a time; once per size."""
        assert self.job.reference_arguments is not None
        if rows not in self._references:
            names = (*_SHARED_CACHE, "XLA_FLAGS", "LIBTPU_INIT_ARGS")
            self._references[rows] = self._run(
                "reference",
                _without(self.job.environ, names) | _WITHOUT_DEVICES,
                arguments=self.job.reference_arguments(rows),
                target="auto",
                numerics="reference",
            )
        return self._references[rows]

    def _run(
        self, name: str, environ: Mapping[str, str], *, arguments: Any, target: str, numerics: str
    ) -> Tried:
        self.made += 1
        directory = self.job.directory / f"{self.made:02d}-{name}"
        directory.mkdir(parents=True)
        spec = {
            "entry": self.job.entry,
            "arguments": arguments,
            "variant": name,
            "target": target,
            "directory": str(directory),
            "audits": self.config.audit_severities(),
            "limits": self.config.limits(),
            "execute_steps": self.config.execute_steps,
            "numerics": numerics,
        }
        spec_file = directory / "spec.json"
        spec_file.write_text(json.dumps(spec, indent=1), encoding="utf-8")
        exit = supervise(
            [sys.executable, "-m", "mlm_recipe.preflight", "--spec", str(spec_file)],
            env=environ,
            log_path=directory / "log.txt",
            limits=self._limits(),
            phase_file=directory / "phase.json",
        )
        return self._read(exit, directory)

    def _limits(self) -> Limits:
        config = self.config
        return Limits(
            seconds=config.max_seconds,
            phase_seconds={
                **{phase: config.start_seconds for phase in _BEFORE_COMPILATION},
                Phase.COMPILE_BEGIN: config.compile_seconds,
                Phase.COMPILED: config.start_seconds,  # reads what was compiled
                Phase.BUDGETED: config.execute_seconds,
                Phase.EXECUTED: config.execute_seconds,  # the numeric gate's measurement
            },
            memory_bytes=int(config.host_memory_gib * 2**30) if config.host_memory_gib else None,
        )

    def _read(self, exit: ChildExit, directory: Path) -> Tried:
        result = _result(directory / "result.json")
        if exit.returncode == 0 and result is not None:
            return Tried(None, exit, result, directory=str(directory))
        if exit.returncode == EXIT_REFUSED and result is not None and result["failure"]:
            failure = _refused(result["failure"], exit.phase)
        else:
            failure = classify(exit, self.catalogue, host=self.host)
        return Tried(failure, exit, result, directory=str(directory))


def _result(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _refused(found: Mapping[str, Any], phase: str | None) -> Failure:
    return Failure(
        kind=FailureKind(found["kind"]),
        signature=found["signature"],
        reason=found.get("reason", ""),
        message=found["message"],
        advice=found.get("advice", ""),
        phase=phase,
        ladder=bool(found.get("ladder")),
    )


def _mismatch(message: str) -> Failure:
    return Failure(
        FailureKind.NUMERIC_MISMATCH, "no reference", reason="no_reference", message=message
    )


def _without(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key not in names}
