"""GPUs that are not there: every kind compiles, what does not fit is refused, deaths are read."""

import subprocess
import sys

import pytest
from absent import CRASHES, GIB, environment, run_child, run_crash
from aot_entry import LAYERS, ODD, ROWS, WIDTH

from mlm_recipe.guard.targets import known_targets

pytestmark = pytest.mark.gpu_aot

KINDS = [kind for kind, figures in known_targets().items() if figures["platform"] == "cuda"]


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_step_compiles_for(kind, count, tmp_path):
    code, result, log = run_child(tmp_path, target=f"{kind}:{count}")
    assert code == 0, log
    figures = known_targets()[kind]
    target, (program,) = result["target"], result["programs"]
    assert target["absent"] and target["count"] == count
    assert target["device_kind"] == figures["name"]
    for word in ("autotuned", "cuDNN", "NCCL", "CUDA graphs"):
        assert word in " ".join(target["not_proved"])
    assert result["execution"] is None

    memory = program["memory"]
    weights = 4 * (LAYERS * WIDTH * WIDTH // count + ODD[0] * ODD[1])
    assert memory["alias"] == weights  # donated, and given back
    assert memory["arguments"] == weights + 4 * ROWS * WIDTH // count
    assert memory["need"] >= memory["arguments"] + memory["temporary"]
    reserve = 1.5 * GIB if count > 1 else 0
    assert memory["budget"] == 0.75 * figures["memory"] - reserve

    gathered = program["collectives"]["all-gather"]
    scattered = program["collectives"]["reduce-scatter"]
    if count == 1:
        assert all(entry["count"] == 0 for entry in program["collectives"].values())
    else:  # each layer's weights in each direction; each layer's gradient
        matrix = 4 * WIDTH * WIDTH
        assert gathered == {"count": 2 * LAYERS, "bytes": 2 * LAYERS * matrix}
        assert scattered == {"count": LAYERS, "bytes": LAYERS * matrix // count}
    arithmetic = program["flops"] / count / figures["peak"]["float32"]
    assert program["roofline_seconds"] >= arithmetic


def test_two_hosts(tmp_path):
    code, result, log = run_child(tmp_path, target="h200:16")
    assert code == 0, log
    assert result["target"]["count"] == 16


@pytest.mark.parametrize("entry", ["aot_entry.py:huge", "crashes/gpu_silent_hbm_overflow.py:build"])
def test_a_step_of_terabytes_is_refused(entry, tmp_path):
    """XLA compiles it without a word."""
    code, result, log = run_child(
        tmp_path, entry=str(CRASHES.parent / entry), target="h200", execute_steps=0
    )
    assert code == 3, log
    failure = result["failure"]
    assert (failure["kind"], failure["reason"]) == ("out_of_memory", "device")
    memory = result["programs"][0]["memory"]
    assert memory["verdict"] == "refuse"
    assert memory["need"] > 2e12 and memory["fraction"] > 19


def test_the_program_itself_ends_well(tmp_path):
    """So that the refusal above is the guard's doing alone."""
    ended, _ = run_crash("gpu_silent_hbm_overflow", tmp_path)
    assert ended.returncode == 0


@pytest.mark.parametrize("program", ["gpu_reducer_scan_segv", "gpu_ffi_triton_target_segv"])
def test_a_silent_death_in_the_compiler(program, tmp_path):
    ended, failure = run_crash(program, tmp_path)
    assert ended.returncode == -11, ended.log_tail
    assert failure is not None
    assert (failure.kind, failure.phase) == ("compile_crash", "compile_begin")
    assert "SIGSEGV" in failure.signature
    assert "no flag is known to help" in failure.advice.lower()


def test_a_callback_cannot_be_lowered_without_its_device(tmp_path):
    ended, failure = run_crash("gpu_callback_needs_backend", tmp_path)
    assert ended.returncode == 1, ended.log_tail
    assert failure is not None
    assert failure.kind == "unsupported_here" and not failure.ladder
    assert failure.signature == "callback lowered without a device"


def test_that_callback_is_met_while_lowering(tmp_path):
    _, failure = run_crash("gpu_callback_needs_backend", tmp_path)
    assert failure is not None
    assert failure.phase == "audited"


def test_every_program_for_gpus_is_here():
    for_gpus = {path.stem for path in CRASHES.glob("gpu_*.py")}
    assert for_gpus == {
        "gpu_callback_needs_backend",
        "gpu_ffi_triton_target_segv",
        "gpu_reducer_scan_segv",
        "gpu_silent_hbm_overflow",
    }


def test_a_captured_description_gives_the_same_devices(tmp_path):
    """Captured here from compile-only devices; on a machine with GPUs it is theirs."""
    code = (
        "from pathlib import Path\n"
        "from mlm_recipe.preflight.capture import capture_target\n"
        "from mlm_recipe.preflight.targets import open_target\n"
        "limit = {'gpu_memory_fraction': 0.75, 'gpu_reserve_gib': 1.5}.__getitem__\n"
        "for name in ('h200:16', 'a100-80'):\n"
        "    asked = open_target(name, limit)\n"
        "    print(capture_target(Path('captured.json'), asked.devices))\n"
        "    given = open_target('captured.json', limit)\n"
        "    assert len(given.devices) == len(asked.devices)\n"
        "    assert given.spec.topology == asked.spec.topology\n"
        "    assert [d.process_index for d in given.devices] == "
        "[d.process_index for d in asked.devices]\n"
        "    assert given.devices[0].device_kind == asked.devices[0].device_kind\n"
        "    for what in ('budget_bytes', 'memory_bytes', 'bandwidth'):\n"
        "        assert getattr(given, what) == getattr(asked, what), what\n"
        "    assert given.peak('bfloat16') == asked.peak('bfloat16') > 1e14\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "16 x NVIDIA H200" in done.stdout
