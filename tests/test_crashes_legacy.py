"""The two crash reports this project began with, on the jax they were filed against.

``LEGACY_GPU_PYTHON`` and ``LEGACY_CPU_PYTHON`` name interpreters with ``tests/legacy/*.txt``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mlm_recipe
from mlm_recipe.guard.catalogue import load_catalogue
from mlm_recipe.guard.classify import HostFacts, classify
from mlm_recipe.guard.supervise import Limits, supervise

pytestmark = pytest.mark.legacy_jax

TESTS = Path(__file__).parent
CRASHES = TESTS / "crashes"
FLAG = "--xla_gpu_enable_dynamic_slice_fusion=false"


def interpreter(name: str) -> str:
    path = os.environ.get(name)
    if not path:
        pytest.fail(f"set {name} to an interpreter with tests/legacy's requirements installed")
    return path


def environment(**extra: str) -> dict[str, str]:
    """Ours, with this package to be found, and without the suite's flags."""
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    source = str(Path(mlm_recipe.__file__).parents[1])
    return {
        **inherited,
        "PYTHONPATH": source,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        **extra,
    }


def run(python: str, program: Path, tmp_path: Path, **extra: str):
    host = HostFacts.now()
    ended = supervise(
        [python, str(program)],
        env=environment(**extra),
        log_path=tmp_path / "log.txt",
        limits=Limits(seconds=300),
    )
    failure = classify(ended, load_catalogue(), host=host) if ended.returncode else None
    return ended, failure


def test_levanter_727_is_read_from_its_abort(tmp_path):
    ended, failure = run(interpreter("LEGACY_GPU_PYTHON"), CRASHES / "levanter_727.py", tmp_path)
    assert ended.returncode == -6, ended.log_tail
    assert failure is not None
    assert (failure.kind, failure.phase) == ("compile_crash", "compile_begin")
    assert failure.signature == (
        "shape_tree.cc: result->children_start_id >= 0 (DynamicSliceFusion)"
    )
    assert failure.remedies[0] == "no_dynamic_slice_fusion"
    assert "marin-community/levanter#727" in failure.refs


def test_levanter_727_is_cured_by_the_flag(tmp_path):
    python = interpreter("LEGACY_GPU_PYTHON")
    ended, _ = run(python, CRASHES / "levanter_727.py", tmp_path, XLA_FLAGS=FLAG)
    assert ended.returncode == 0, ended.log_tail
    assert "COMPILED OK" in ended.log_tail


def test_levanter_727_is_survived_by_the_whole_guard(tmp_path):
    """Guard, child and catalogue, all on jax 0.4.34: the flag alone is the minimal variant."""
    done = subprocess.run(
        [interpreter("LEGACY_GPU_PYTHON"), TESTS / "legacy" / "prove.py", tmp_path],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["verdict"], report["exit_code"]) == ("fallback", 10)
    assert report["variant"]["xla_flags"] == {"xla_gpu_enable_dynamic_slice_fusion": "false"}
    assert not report["variant"]["env"] and not report["variant"]["overrides"]
    died, cured = report["attempts"]
    assert (died["returncode"], died["failure"]["kind"]) == (-6, "compile_crash")
    assert (cured["returncode"], cured["phase"]) == (0, "done")
    assert report["versions"]["jax"] == "0.4.34"


def test_the_breakpoint_is_refused_before_the_compiler_sees_it(tmp_path):
    """With the audits as they are by default."""
    entry = f"{TESTS / 'legacy' / 'entries.py'}:levanter_727"
    (tmp_path / "spec.json").write_text(json.dumps({"entry": entry, "target": "h100"}))
    done = subprocess.run(
        [
            interpreter("LEGACY_GPU_PYTHON"),
            *("-m", "mlm_recipe.preflight", "--spec", tmp_path / "spec.json"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    failure = json.loads((tmp_path / "result.json").read_text())["failure"]
    assert failure["kind"] == "audit_failed"
    assert "entries.py" in failure["message"] and "breakpoint" in failure["message"]
    assert json.loads((tmp_path / "phase.json").read_text())["phase"] == "traced"


@pytest.mark.parametrize("order", ["shard_first", "plain_first"])
def test_jax_25671_is_the_ordered_token(order, tmp_path):
    ended, failure = run(
        interpreter("LEGACY_CPU_PYTHON"), CRASHES / "jax_25671.py", tmp_path, ORDER=order
    )
    assert ended.returncode == -6, ended.log_tail
    assert failure is not None
    assert (failure.kind, failure.reason) == ("runtime_crash", "ordered_token")
    assert failure.signature.startswith("pjrt_client.h: on_device_shape().has_layout()")
    assert failure.remedies == () and not failure.ladder
    assert "unordered" in failure.advice and "newer jax" in failure.advice


def test_jax_25671_passes_on_todays_jax(tmp_path):
    ended, _ = run(sys.executable, CRASHES / "jax_25671.py", tmp_path)
    assert ended.returncode == 0, ended.log_tail


def test_the_child_passes_on_jax_0_4_37(tmp_path):
    """Eight virtual devices, two real steps."""
    entry = f"{TESTS / 'fault_entry.py'}:build"
    (tmp_path / "spec.json").write_text(json.dumps({"entry": entry, "numerics": "measure"}))
    done = subprocess.run(
        [
            interpreter("LEGACY_CPU_PYTHON"),
            *("-m", "mlm_recipe.preflight", "--spec", tmp_path / "spec.json"),
        ],
        env=environment(XLA_FLAGS="--xla_force_host_platform_device_count=8"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["versions"]["jax"] == "0.4.37"
    assert result["target"]["count"] == 8
    assert len(result["execution"]["losses"]) == 2
    (program,) = result["programs"]
    assert program["memory"]["verdict"] == "ok" and program["memory"]["need"] > 0
    assert program["collectives"]["all-reduce"]["bytes"] == 4 * (16 * 32 + 32 * 4) + 4
