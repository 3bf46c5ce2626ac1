"""Reproducer bundles: they die outside the package as the child did."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlm_recipe.guard.bundle import safe_environment, write_bundle
from mlm_recipe.guard.types import ChildExit, Failure, FailureKind, Variant

CRASHES = Path(__file__).parent / "crashes"
OPTIONS: dict[str, Any] = {
    "compiler_options": {},
    "num_partitions": 1,
    "num_replicas": 1,
    "platform": "cpu",
    "target": "auto",
    "absent": False,
    "device_count": 1,
    "use_shardy": True,
}
CRASH = Failure(
    FailureKind.COMPILE_CRASH,
    "a.cc: x",
    message="Check failed: x",
    phase="compile_begin",
    refs=("openxla/xla#1",),
    last_pass="algsimp",
)
EXIT = ChildExit(("python",), -6, "compile_begin", 8.5, log_tail="one\ntwo")


def child_directory(directory: Path, module: str, **options: Any) -> Path:
    directory.mkdir()
    (directory / "step.stablehlo.mlir").write_text(module)
    (directory / "step.jaxpr.txt").write_text("{ lambda ; }")
    (directory / "options.json").write_text(json.dumps({**OPTIONS, **options}))
    (directory / "versions.json").write_text('{"jax": "0.11.2"}')
    (directory / "log.txt").write_text("the log")
    return directory


def bundle(directory: Path, child: Path, **changes: Any) -> Path:
    arguments: dict[str, Any] = {
        "failure": CRASH,
        "exit": EXIT,
        "variant": Variant("no_autotune", {"xla_gpu_autotune_level": "0"}),
        "environ": {},
    }
    return write_bundle(directory, child, **{**arguments, **changes})


def test_everything_a_reader_needs_is_there(tmp_path: Path) -> None:
    child = child_directory(tmp_path / "child", "module {}")
    environ = {"XLA_FLAGS": "--xla_a='b c'", "WANDB_API_KEY": "k", "TPU_ACCESS_TOKEN": "t"}
    environ |= {"JAX_PLATFORMS": "cpu", "HOME": "/home/me", "JAX_COMPILATION_CACHE_DIR": "/c"}
    made = bundle(tmp_path / "b", child, environ=environ, tried={"no_fusion": "the same"})
    assert {path.name for path in made.iterdir()} == {
        "step.stablehlo.mlir",
        "step.jaxpr.txt",
        "options.json",
        "environment.json",
        "versions.json",
        "log.txt",
        "reproduce.py",
        "repro.sh",
        "report.md",
    }
    text = (made / "report.md").read_text()
    for part in (
        "# a.cc: x",
        "compile_crash in phase `compile_begin`, signal 6 after 8.5 s",
        "Last HLO pass: `algsimp`",
        "- jax 0.11.2",
        "sh repro.sh",
        "`--xla_gpu_autotune_level=0`",
        "- `no_fusion`: the same",
        "openxla/xla#1",
        "one\ntwo",
    ):
        assert part in text, part
    everything = "".join(path.read_text() for path in made.iterdir())
    assert "WANDB" not in everything and "TOKEN" not in everything
    assert "/home/me" not in everything
    script = (made / "repro.sh").read_text()
    assert "export XLA_FLAGS='--xla_a='\\''b c'\\'''" in script
    assert "COMPILATION_CACHE" not in script and "--execute" not in script


def test_the_program_that_was_being_compiled_is_the_one_to_reproduce(tmp_path: Path) -> None:
    child = child_directory(tmp_path / "child", "module {}")
    (child / "other.stablehlo.mlir").write_text("module {}")
    (child / "phase.json").write_text('{"phase": "compile_begin", "at": {}, "program": "step"}')
    assert json.loads((bundle(tmp_path / "b", child) / "options.json").read_text())["module"] == (
        "step.stablehlo.mlir"
    )


def test_a_death_before_there_is_a_program_says_so(tmp_path: Path) -> None:
    child = tmp_path / "child"
    child.mkdir()
    (child / "spec.json").write_text("{}")
    failure = Failure(FailureKind.CONFIG_ERROR, "TypeError", phase="configured")
    made = bundle(tmp_path / "b", child, failure=failure, exit=None)
    assert not (made / "repro.sh").exists()
    assert "before there was a program" in (made / "report.md").read_text()
    assert (made / "spec.json").exists()


def test_a_target_description_travels_with_it(tmp_path: Path) -> None:
    description = tmp_path / "h200.txtpb"
    description.write_text("text")
    child = child_directory(
        tmp_path / "child", "module {}", target_config_file=str(description), absent=True
    )
    made = bundle(tmp_path / "b", child, failure=Failure(CRASH.kind, "s", phase="compiled"))
    assert (made / "h200.txtpb").read_text() == "text"
    assert json.loads((made / "options.json").read_text())["target_config_file"] == "h200.txtpb"
    assert "--execute" not in (made / "repro.sh").read_text()


def test_a_long_log_keeps_both_ends(tmp_path: Path) -> None:
    child = child_directory(tmp_path / "child", "module {}")
    (child / "log.txt").write_bytes(b"head" + b"x" * (3 << 20) + b"tail")
    text = (bundle(tmp_path / "b", child) / "log.txt").read_bytes()
    assert text.startswith(b"head") and text.endswith(b"tail") and b"left out" in text
    assert len(text) < (1 << 20) + 100


def test_only_variables_of_the_compiler_are_told() -> None:
    environ = {
        "XLA_FLAGS": "a",
        "TPU_NAME": "n",
        "PATH": "p",
        "NCCL_DEBUG": "i",
        "JAX_API_KEY": "k",
    }
    assert safe_environment(environ) == {"NCCL_DEBUG": "i", "TPU_NAME": "n", "XLA_FLAGS": "a"}


def run_bundle(made: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: v for name, v in os.environ.items() if not name.startswith(("XLA", "JAX"))}
    environ |= {"PYTHON": sys.executable, "PYTHONPATH": ""}
    return subprocess.run(
        ["sh", str(made / "repro.sh")], capture_output=True, text=True, timeout=300, env=environ
    )


def lowered_text(sample: str) -> str:
    spec = importlib.util.spec_from_file_location(sample, CRASHES / f"{sample}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    step, args = module.build()
    return step.lower(*args).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "phase", "signal", "last_stage", "text"),
    [
        ("cpu_sort_comparator_abort", "compile_begin", 6, "read", "map_util.h"),
        ("cpu_reduce_window_crop_abort", "compile_begin", 6, "read", "algebraic_simplifier.cc"),
        ("cpu_conv_crop_segv", "compiled", 11, "compiled", "Segmentation fault"),
        ("cpu_outfeed_reducer_exec_abort", "compiled", 6, "compiled", "ynn_emitter.cc"),
    ],
)
def test_it_dies_outside_the_package_as_the_child_did(
    tmp_path: Path, sample: str, phase: str, signal: int, last_stage: str, text: str
) -> None:
    child = child_directory(tmp_path / "child", lowered_text(sample))
    failure = Failure(CRASH.kind, "s", phase=phase)
    done = run_bundle(bundle(tmp_path / "b", child, failure=failure))
    assert done.returncode == -signal, done.stderr[-2000:]
    stages = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("STAGE")]
    assert stages[-1] == last_stage
    assert text in done.stderr


@pytest.mark.slow
def test_the_cure_cures_the_bundle_too(tmp_path: Path) -> None:
    child = child_directory(tmp_path / "child", lowered_text("cpu_reduce_window_crop_abort"))
    environ = {"XLA_FLAGS": "--xla_disable_hlo_passes=algsimp"}
    failure = Failure(CRASH.kind, "s", phase="compiled")
    done = run_bundle(bundle(tmp_path / "b", child, failure=failure, environ=environ))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "STAGE executed" in done.stdout


@pytest.mark.slow
def test_a_program_over_several_devices_runs(tmp_path: Path) -> None:
    program = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("d",))
def spec(shape, dtype, *axes):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))
step = jax.jit(lambda w, x, i: ((x @ w).astype(jnp.bfloat16).sum() + i, w * 2))
args = spec((8, 4), jnp.bfloat16), spec((16, 8), jnp.bfloat16, "d"), spec((), jnp.int32)
print(step.lower(*args).as_text())
"""
    text = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ).stdout
    child = child_directory(tmp_path / "child", text, num_partitions=4, device_count=4)
    done = run_bundle(
        bundle(tmp_path / "b", child, failure=Failure(CRASH.kind, "s", phase="compiled"))
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "STAGE executed" in done.stdout
