"""The child: what it leaves behind, on one and on eight virtual devices, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlm_recipe.guard.status import Phase

ENTRY = str(Path(__file__).with_name("fault_entry.py")) + ":build"


def run_child(directory: Path, *, devices: int = 1, **spec):
    """Run one child; its exit code and result."""
    content = {"entry": ENTRY, "directory": str(directory), **spec}
    (directory / "spec.json").write_text(json.dumps(content))
    environ = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", "mlm_recipe.preflight", "--spec", directory / "spec.json"]
    done = subprocess.run(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    path = directory / "result.json"
    result: Any = json.loads(path.read_text()) if path.exists() else None
    return done, result


@pytest.fixture(scope="module", params=[1, 8])
def passed(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(f"on{request.param}")
    done, result = run_child(directory, devices=request.param, numerics="measure")
    assert done.returncode == 0, done.stdout
    return request.param, directory, result


def test_all_phases_are_reached_in_order(passed):
    _, directory, _ = passed
    content = json.loads((directory / "phase.json").read_text())
    assert content["phase"] == "done"
    assert list(content["at"]) == [phase.value for phase in Phase]
    assert list(content["at"].values()) == sorted(content["at"].values())


def test_evidence_is_written_before_the_compiler_runs(passed):
    _, directory, _ = passed
    began = json.loads((directory / "phase.json").read_text())["at"]["compile_begin"]
    started = (directory / "spec.json").stat().st_mtime
    for name in ("sgd.stablehlo.mlir", "sgd.jaxpr.txt", "options.json", "environment.json"):
        assert (directory / name).stat().st_mtime <= started + began + 30
    assert "stablehlo" in (directory / "sgd.stablehlo.mlir").read_text()


def test_what_it_measured_is_right(passed):
    devices, _, result = passed
    (program,) = result["programs"]
    assert result["verdict"] == "ok", result
    assert result["target"]["count"] == devices and not result["target"]["absent"]
    memory = program["memory"]
    weights = 4 * (16 * 32 + 32 * 4)
    assert memory["arguments"] == weights + 4 * 8 * 16  # replicated, and a shard of the batch
    assert memory["alias"] == weights
    assert memory["need"] == memory["arguments"] + memory["outputs"] + memory["temporary"] + (
        memory["code"] - memory["alias"]
    )
    reduced = program["collectives"]["all-reduce"]
    assert (reduced["count"] > 0) == (devices > 1)
    if devices > 1:
        assert reduced["bytes"] == weights + 4  # the gradient and the loss, once
    assert {audit["verdict"] for audit in program["audits"]} == {"ok"}
    assert len(program["audits"]) == 8


def test_two_steps_were_run_and_the_loss_fell(passed):
    _, _, result = passed
    first, second = result["execution"]["losses"]
    assert 0 < second < first


def test_the_gradient_is_the_same_on_any_number_of_devices(passed, tmp_path):
    devices, _, result = passed
    done, reference = run_child(
        tmp_path, numerics="reference", arguments={"gradient_rows": 8 * devices}
    )
    assert done.returncode == 0, done.stdout
    measured, expected = result["numerics"], reference["numerics"]
    assert measured["rows"] == expected["rows"] or devices > 1
    assert measured["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert measured["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-5)


def test_a_nan_is_refused(tmp_path):
    done, result = run_child(tmp_path, arguments={"nan": True})
    assert done.returncode == 3
    assert result["failure"]["kind"] == "numeric_mismatch"
    assert "loss of step 0" in result["failure"]["message"]


@pytest.mark.parametrize("callback", ["ordered", "breakpoint"])
def test_a_callback_is_refused_with_its_line_before_anything_is_lowered(tmp_path, callback):
    done, result = run_child(tmp_path, arguments={"callback": callback})
    assert done.returncode == 3
    failure = result["failure"]
    assert failure["kind"] == "audit_failed" and not failure["ladder"]
    text = Path(__file__).with_name("fault_entry.py").read_text().splitlines()
    call = "io_callback(" if callback == "ordered" else "breakpoint()"
    line = next(number for number, source in enumerate(text, 1) if call in source)
    assert f"fault_entry.py:{line}" in failure["message"]
    assert not list(tmp_path.glob("*.mlir"))


def test_audits_can_be_turned_down(tmp_path):
    severities = {"host_callbacks": "warn", "ordered_effects": "off"}
    done, result = run_child(
        tmp_path, arguments={"callback": "ordered"}, audits=severities, execute_steps=0
    )
    assert done.returncode == 0, done.stdout
    assert result["verdict"] == "warn"
    names = [audit["name"] for audit in result["programs"][0]["audits"]]
    assert "ordered_effects" not in names and "host_callbacks" in names


def test_a_step_that_does_not_fit_is_refused_by_arithmetic(tmp_path):
    done, result = run_child(tmp_path, limits={"memory_warn": 1e-12, "memory_refuse": 1e-12})
    assert done.returncode == 3
    assert result["failure"]["kind"] == "out_of_memory" and result["failure"]["ladder"]
    assert result["failure"]["reason"] == "device"


def test_a_misspelt_spec_is_an_error_that_names_the_key(tmp_path):
    done, result = run_child(tmp_path, nummerics="measure")
    assert done.returncode == 1 and result is None
    assert "nummerics" in done.stdout
