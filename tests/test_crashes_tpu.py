"""TPUs that are not there: every kind compiles, what does not fit is refused, layouts are read."""

import re

import pytest
from absent import GIB, TESTS, run_child, run_crash
from aot_entry import LAYERS, ODD, ROWS, WIDTH

from mlm_recipe.guard.targets import known_targets

pytestmark = pytest.mark.tpu_aot

DEVICES = {
    "v4:2x2x1": ("TPU v4", 4),  # as jax has it on the machine: a device per chip, not per core
    "v5e:2x4": ("TPU v5 lite", 8),
    "v5e-1": ("TPU v5 lite", 1),
    "v5p-8": ("TPU v5", 4),
    "v6e:2x4": ("TPU v6 lite", 8),
}
AVAILABLE_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24}
"""As libtpu says in its refusals."""


@pytest.mark.parametrize("name", DEVICES)
def test_a_sharded_step_compiles_for(name, tmp_path):
    code, result, log = run_child(tmp_path, target=name)
    assert code == 0, log
    device_kind, count = DEVICES[name]
    target, (program,) = result["target"], result["programs"]
    assert (target["device_kind"], target["count"], target["absent"]) == (device_kind, count, True)
    assert target["not_proved"]

    memory = program["memory"]
    # 7x129 lies in tiles of 8x128, in the arguments as on the device.
    weights = 4 * (LAYERS * WIDTH * WIDTH // count + 8 * 256)
    assert memory["alias"] == weights
    assert memory["arguments"] == weights + 4 * ROWS * WIDTH // count
    assert memory["budget"] == known_targets()[name[:3].rstrip(":-")]["available"]

    if count > 1:
        gathered = program["collectives"]["all-gather"]
        assert gathered["count"] == 2 * LAYERS
        assert gathered["bytes"] == 2 * LAYERS * 2 * WIDTH * WIDTH  # as bfloat16
    layouts = {entry["leaf"]: entry for entry in program["layouts"]}
    assert layouts["odd"] == {
        "leaf": "odd",
        "shape": list(ODD),
        "dtype": "float32",
        "tiling": [[8, 128]],
        "major_to_minor": [0, 1],
        "logical_bytes": 4 * 7 * 129,
        "device_bytes": 4 * 8 * 256,
        "padded": True,
        "permuted": False,
    }
    layers = layouts["layers"]
    assert layers["device_bytes"] == layers["logical_bytes"] and not layers["padded"]


@pytest.mark.parametrize("kind", AVAILABLE_GIB)
def test_available_memory_is_what_the_compiler_says(kind, tmp_path):
    """The child dies in the compiler, which names what there is."""
    default = known_targets()[kind]["default"]
    with pytest.raises(AssertionError, match="Ran out of memory") as died:
        run_child(tmp_path, target=f"{kind}:{default}", entry=f"{TESTS / 'aot_entry.py'}:huge")
    assert f"available HBM ({AVAILABLE_GIB[kind]:.2f}G)" in str(died.value)
    figures = known_targets()[kind]
    limit = min(figures["memory"], AVAILABLE_GIB[kind] * GIB)
    assert figures["available"] == pytest.approx(limit, rel=1e-6)


def test_out_of_memory_is_read_from_the_compilers_refusal(tmp_path):
    ended, failure = run_crash("tpu_hbm_oom", tmp_path)
    assert ended.returncode == 1, ended.log_tail
    assert failure is not None
    assert (failure.kind, failure.reason) == ("out_of_memory", "device")
    assert failure.phase == "compile_begin" and failure.ladder
    wanted, available = map(float, re.findall(r"\(([\d.]+)G\)", failure.message))
    assert wanted > 2 * 65536 * 131072 * 2 / GIB  # the gradient and the new weights, bfloat16
    assert available == 15.75


def test_sharding_the_weights_makes_it_fit(tmp_path):
    ended, _ = run_crash("tpu_hbm_oom", tmp_path, FIX="1")
    assert ended.returncode == 0, ended.log_tail
    assert "STAGE compiled" in ended.log_tail


def test_computed_sizes_are_the_devices_own(tmp_path):
    """Tiles of every rank and width of element, against the compiler's count of argument bytes."""
    code, result, log = run_child(
        tmp_path, target="v5e-4", entry=f"{TESTS / 'tile_entry.py'}:build", execute_steps=0
    )
    assert code == 0, log
    for program in result["programs"]:
        (layout,) = program["layouts"]
        assert layout["device_bytes"] == program["memory"]["arguments"], layout
    padded = sum(program["layouts"][0]["padded"] for program in result["programs"])
    permuted = sum(program["layouts"][0]["permuted"] for program in result["programs"])
    assert padded >= 30 and permuted >= 3, (padded, permuted)
