"""Faults planted in real children of a small step: the guard ends with what holds, or says why."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import ROOT

from mlm_recipe.guard.children import Job
from mlm_recipe.guard.config import GuardConfig
from mlm_recipe.guard.entry import flags_only
from mlm_recipe.guard.prove import prove
from mlm_recipe.guard.variants import Context, load_variants
from mlm_recipe.guard.verdicts import VerdictMemory

sys.path.insert(0, str(ROOT / "scripts"))
from inject_fault import fault_environment  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.slow

ENTRY = str(Path(__file__).with_name("fault_entry.py")) + ":build"
SHORT = {"start_seconds": 40.0, "compile_seconds": 40.0, "execute_seconds": 40.0}


def prove_with(directory, fault="", *, arguments=None, users=None, reference=True, **config):
    """Prove the small step with a fault in its child as configured."""
    environ = {**fault_environment(fault), "JAX_PLATFORMS": "cpu"}
    given = arguments or (lambda variant: {})
    job = Job(
        ENTRY,
        given,
        "auto",
        environ,
        directory / "children",
        reference_arguments=(lambda rows: {"gradient_rows": rows}) if reference else None,
    )
    return prove(
        job,
        config=GuardConfig(**{**SHORT, **config}),
        variants=flags_only(load_variants(users)),
        context=Context(environ=environ, devices=1),
        memory=VerdictMemory(directory / "verdicts"),
        key=lambda variant: variant.name,
    )


def test_without_a_fault_one_child_is_enough(tmp_path):
    report = prove_with(tmp_path)
    assert (report.verdict, report.exit_code, len(report.attempts)) == ("ok", 0, 1)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("abort@start", "unknown"),
        ("abort@backend_ready", "unknown"),
        ("abort@traced", None),
        ("segv@compile_begin", "compile_crash"),
        ("abort@budgeted", "runtime_crash"),
        ("exception@compile_begin", "compile_error"),
        ("hang@traced", "timeout"),
        ("hang@compile_begin", "timeout"),
        ("hang@budgeted", "timeout"),
    ],
)
def test_a_fallback_passes_where_as_configured_dies(tmp_path, fault, kind):
    extra: dict[str, Any] = (
        {"start_seconds": 25.0, "compile_seconds": 15.0, "execute_seconds": 15.0}
        if "hang" in fault
        else {}
    )
    extra |= {"host_memory_gib": 4.0} if "memory" in fault else {}
    report = prove_with(tmp_path, fault, **extra)
    assert report.exit_code in (0, 10), report.failure
    first = report.attempts[0]
    assert first.variant == "as_configured" and first.failure is not None
    assert first.phase == fault.partition("@")[2]
    if kind is not None:
        assert first.failure["kind"] == kind
    assert report.variant is not None and report.variant["name"] != "as_configured"
    assert report.numerics is None or report.numerics["precision"] == "float32"


def test_a_host_without_memory_is_called_that_where_no_flag_helps(tmp_path):
    report = prove_with(tmp_path, "memory@compile_begin", host_memory_gib=4.0)
    first = report.attempts[0]
    assert first.failure is not None and first.failure["kind"] == "out_of_memory"
    assert first.failure["reason"] == "host" and first.peak_rss > 4.0 * 2**30
    assert report.exit_code == 21


def test_every_death_leaves_a_reproducer_with_the_program(tmp_path):
    report = prove_with(tmp_path, "abort@compile_begin")
    bundle = Path(report.attempts[0].bundle)
    assert {"repro.sh", "report.md", "sgd.stablehlo.mlir", "versions.json"} <= {
        path.name for path in bundle.iterdir()
    }


def test_a_variant_with_other_numbers_is_refused(tmp_path):
    users = {"wrong": {"env": {"PLANTED": "1"}}}
    catalogue = tmp_path / "catalogue.yaml"
    entry = {"name": "planted", "kind": "compile_crash", "patterns": ["Fatal Python error"]}
    catalogue.write_text(json.dumps({"entries": [{**entry, "advice": "x", "remedies": ["wrong"]}]}))
    report = prove_with(
        tmp_path,
        "abort@compile_begin",
        users=users,
        arguments=lambda variant: {"wrong": "wrong" in variant.name},
        catalogue=str(catalogue),
        max_attempts=2,
    )
    (wrong,) = [a for a in report.attempts if a.variant == "wrong"]
    assert wrong.failure is not None and wrong.failure["kind"] == "numeric_mismatch"
    assert report.exit_code == 23 and report.variant is None


def test_without_a_reference_no_fallback_counts(tmp_path):
    report = prove_with(tmp_path, "abort@compile_begin", reference=False, max_attempts=2)
    assert report.exit_code == 23
    assert report.failure is not None and "nothing vouches" in report.failure["message"]


def test_verdicts_are_remembered_fallback_and_all(tmp_path):
    first = prove_with(tmp_path, "segv@compile_begin")
    again = prove_with(tmp_path, "segv@compile_begin")
    assert again.exit_code == first.exit_code == 10
    assert again.variant == first.variant
    assert all(attempt.remembered for attempt in again.attempts if attempt.role != "breadcrumbs")
    assert os.listdir(tmp_path / "verdicts")
