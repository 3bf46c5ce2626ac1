"""The child's way through its phases. Each step is small; any of them may be the last."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from mlm_recipe.guard.status import Phase, PhaseFile
from mlm_recipe.preflight import audits, compiled_audits, evidence
from mlm_recipe.preflight.audits import AuditResult
from mlm_recipe.preflight.collectives import collectives, rematerialization_warnings
from mlm_recipe.preflight.compiles import CompileCounts
from mlm_recipe.preflight.entry import build_programs, load_entry
from mlm_recipe.preflight.execute import NonFiniteError, execute
from mlm_recipe.preflight.memory import memory_verdict
from mlm_recipe.preflight.numerics import measure
from mlm_recipe.preflight.program import BuildContext, StepProgram
from mlm_recipe.preflight.roofline import roofline_seconds
from mlm_recipe.preflight.spec import Spec
from mlm_recipe.preflight.targets import (
    TARGET_CONFIG,
    TargetUnavailableError,
    layouts_of,
    open_target,
)

EXIT_REFUSED = 3


class RefusedError(Exception):
    """The child itself has found a reason not to train."""

    def __init__(self, kind: str, signature: str, message: str, **details: Any):
        super().__init__(message)
        defaults = {"advice": "", "reason": "", "ladder": False}
        self.failure = {"kind": kind, "signature": signature, "message": message}
        self.failure |= {**defaults, **details}


@dataclass
class Progress:
    """One program on its way."""

    program: StepProgram
    record: dict[str, Any]
    traced: Any = None
    lowered: Any = None
    compiled: Any = None


def run(spec: Spec, phases: PhaseFile) -> int:
    """Go through all phases; returns 0, or 3 after a refusal. Dies as it must."""
    result: dict[str, Any] = {
        "schema_version": 1,
        "verdict": "ok",
        "failure": None,
        "versions": evidence.versions(),
        "programs": [],
        "execution": None,
        "numerics": None,
    }
    try:
        _phases(spec, phases, result)
    except RefusedError as error:
        result["verdict"], result["failure"] = "refused", error.failure
    if result["verdict"] == "ok" and any(_warned(record) for record in result["programs"]):
        result["verdict"] = "warn"
    evidence.write_json(spec.directory / "result.json", result)
    if result["failure"] is not None:
        return EXIT_REFUSED
    phases.reach(Phase.DONE)
    return 0


def _warned(record: dict[str, Any]) -> bool:
    found = [audit["verdict"] for audit in record["audits"]]
    return "warn" in [*found, record.get("memory", {}).get("verdict")]


def _phases(spec: Spec, phases: PhaseFile, result: dict[str, Any]) -> None:
    counts = CompileCounts()
    try:
        target = open_target(spec.target, spec.limit)
    except TargetUnavailableError as error:
        raise RefusedError("environment", "target unavailable", str(error)) from error
    if target.absent:
        # Executables for absent devices are untuned and cannot be read back: no shared cache.
        jax.config.update("jax_enable_compilation_cache", False)
    result["target"] = target.as_json()
    phases.reach(Phase.BACKEND_READY)
    context = BuildContext(spec.arguments, target.devices, absent=target.absent)
    programs = build_programs(load_entry(spec.entry), context)
    phases.reach(Phase.CONFIGURED)
    if spec.numerics == "reference":
        result["numerics"] = _numerics(programs, operation_by_operation=True)
        return
    todo = [Progress(program, {"name": program.name, "audits": []}) for program in programs]
    result["programs"] = [item.record for item in todo]
    _trace_and_audit(spec, phases, todo)
    _lower(spec, phases, todo, result, target)
    _compile(phases, todo, counts)
    _budget(spec, phases, todo, target)
    if not target.absent:
        _execute(spec, todo, result)
    phases.reach(Phase.EXECUTED)
    if spec.numerics == "measure":
        result["numerics"] = _numerics(programs, operation_by_operation=False)


def _trace_and_audit(spec: Spec, phases: PhaseFile, todo: list[Progress]) -> None:
    for item in todo:
        with item.program.context():
            item.traced = item.program.step.trace(*item.program.abstract_args)
    phases.reach(Phase.TRACED)
    limit = spec.limit("captured_constants_mib") * 2**20
    for item in todo:
        jaxpr = item.traced.jaxpr
        _look(item, spec, "ordered_effects", audits.audit_ordered_effects, jaxpr)
        _look(item, spec, "host_callbacks", audits.audit_host_callbacks, jaxpr)
        _look(item, spec, "float64", audits.audit_float64, jaxpr)
        _look(item, spec, "captured_constants", audits.audit_captured_constants, jaxpr, limit)
    _refuse_what_audits_refuse(todo)
    phases.reach(Phase.AUDITED)


def _look(
    item: Progress, spec: Spec, name: str, audit: Callable[..., AuditResult], *what: Any
) -> None:
    """One audit, at the severity that the spec gives it."""
    severity = spec.audit(name)
    if severity != "off":
        item.record["audits"].append(audit(*what, severity).as_json())


def _refuse_what_audits_refuse(todo: list[Progress]) -> None:
    for item in todo:
        for found in item.record["audits"]:
            if found["verdict"] == "refuse":
                raise RefusedError(
                    "audit_failed",
                    f"audit {found['name']}",
                    f"{item.program.name}: {found['message']}",
                    reason=found["name"],
                    advice=f"mend it, or set guard.audits.{found['name']} to warn",
                )


def _lower(
    spec: Spec, phases: PhaseFile, todo: list[Progress], result: dict[str, Any], target: Any
) -> None:
    for item in todo:
        with item.program.context():
            item.lowered = item.traced.lower()
        item.record["facts"] = dict(item.program.facts)
        item.record["stablehlo_sha256"] = evidence.write_program(
            spec.directory,
            item.program.name,
            jaxpr=item.traced.jaxpr,
            stablehlo=item.lowered.as_text(),
        )
    evidence.write_json(spec.directory / "versions.json", result["versions"])
    evidence.write_json(spec.directory / "environment.json", evidence.environment())
    evidence.write_json(spec.directory / "options.json", target.compile_options())
    if target.description:
        (spec.directory / TARGET_CONFIG).write_text(target.description, encoding="utf-8")
    phases.reach(Phase.LOWERED)


def _compile(phases: PhaseFile, todo: list[Progress], counts: CompileCounts) -> None:
    for item in todo:
        phases.reach(Phase.COMPILE_BEGIN, program=item.program.name)
        started, before = time.perf_counter(), counts.cached.total()
        with item.program.context():
            item.compiled = item.lowered.compile()
        item.record["compile_seconds"] = round(time.perf_counter() - started, 3)
        item.record["cache_hit"] = counts.cached.total() > before
    phases.reach(Phase.COMPILED)


def _budget(spec: Spec, phases: PhaseFile, todo: list[Progress], target: Any) -> None:
    log = spec.directory / "log.txt"
    warnings = rematerialization_warnings(
        log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    )
    for item in todo:
        record, program, compiled = item.record, item.program, item.compiled
        record["memory"] = memory_verdict(compiled, target, spec.limit)
        text = compiled.as_text() or ""
        record["collectives"] = collectives(text)
        record["flops"] = program.flops
        precision = program.facts.get("precision")
        record["roofline_seconds"] = roofline_seconds(
            program.flops, record["memory"], precision, target
        )
        record["layouts"] = layouts_of(target, program, compiled)
        for name, audit, what in (
            (
                "donation",
                compiled_audits.audit_donation,
                (item.lowered, compiled, record["memory"]["alias"]),
            ),
            (
                "replicated_parameters",
                compiled_audits.audit_replicated_parameters,
                (program, compiled.input_shardings[0]),
            ),
            (
                "resharding",
                compiled_audits.audit_resharding,
                (program, item.traced, compiled),
            ),
            ("rematerialization", compiled_audits.audit_rematerialization, (warnings,)),
        ):
            _look(item, spec, name, audit, *what)
    _refuse_what_audits_refuse(todo)
    _refuse_what_does_not_fit(todo)
    phases.reach(Phase.BUDGETED)


def _refuse_what_does_not_fit(todo: list[Progress]) -> None:
    for item in todo:
        memory = item.record["memory"]
        if memory["verdict"] == "refuse":
            gib = {key: memory[key] / 2**30 for key in ("need", "budget")}
            raise RefusedError(
                "out_of_memory",
                "memory budget",
                f"{item.program.name} needs {gib['need']:.2f} GiB per device of a budget of "
                f"{gib['budget']:.2f} GiB ({100 * memory['fraction']:.0f} %)",
                reason="device",
                ladder=True,
            )


def _execute(spec: Spec, todo: list[Progress], result: dict[str, Any]) -> None:
    if spec.execute_steps == 0:
        return
    for item in todo:
        try:
            with item.program.context():
                ran = execute(item.program, item.compiled, spec.execute_steps)
        except NonFiniteError as error:
            raise RefusedError(
                "numeric_mismatch",
                "non-finite values",
                str(error),
                reason="non_finite",
                ladder=True,
            ) from error
        result["execution"] = result["execution"] or ran


def _numerics(
    programs: list[StepProgram], *, operation_by_operation: bool
) -> dict[str, Any] | None:
    program = programs[0]
    if program.gradient is None:
        return None
    with program.context():
        return measure(program.gradient, operation_by_operation=operation_by_operation)
