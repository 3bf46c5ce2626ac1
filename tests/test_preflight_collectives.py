"""Collectives are counted from HLO text, in loops as often as the loops run."""

import json
import os
import subprocess
import sys

import pytest

from mlm_recipe.preflight.collectives import collectives, rematerialization_warnings, shape_bytes

# Cut from what XLA:CPU 0.11.2 and XLA:GPU print.
LOOP = """\
HloModule jit_f, is_scheduled=true

%body.1 (arg: (s32[], f32[2,64])) -> (s32[], f32[2,64]) {
  %arg = (s32[], f32[2,64]{1,0}) parameter(0)
  %all-gather = f32[1,64,64]{2,0,1} all-gather(%x), channel_id=1, dimensions={1}
  %call = f32[2,64]{1,0} call(%y), to_apply=%inner.2
}

%inner.2 (p: f32[2,64]) -> f32[2,64] {
  ROOT %rs = bf16[8,8]{1,0} reduce-scatter(%p), channel_id=3, to_apply=%add
}

%cond.1 (arg: (s32[], f32[2,64])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main.9 (p0: f32[2,64]) -> f32[] {
  %while.8 = (s32[], f32[2,64]{1,0}) while(%t), condition=%cond.1, body=%body.1, \
backend_config={"known_trip_count":{"n":"12"}}
  %all-reduce-start.1 = (f32[512]{0}, f32[4]{0}) all-reduce-start(%a, %b), to_apply=%add
  %all-reduce-done.1 = (f32[512]{0}, f32[4]{0}) all-reduce-done(%all-reduce-start.1)
  %ag-start = (bf16[8]{0}, bf16[64]{0}) all-gather-start(%c), dimensions={0}
  ROOT %ag-done = bf16[64]{0} all-gather-done(%ag-start)
}
"""


def test_a_loop_multiplies_and_a_pair_counts_once():
    found = collectives(LOOP)
    assert found["all-gather"] == {"count": 12 + 1, "bytes": 12 * 64 * 64 * 4 + 64 * 2}
    assert found["reduce-scatter"] == {"count": 12, "bytes": 12 * 64 * 2}
    assert found["all-reduce"] == {"count": 1, "bytes": (512 + 4) * 4}
    assert found["all-to-all"]["count"] == 0


def test_a_loop_of_unknown_length_counts_once():
    found = collectives(LOOP.replace("known_trip_count", "something_else"))
    assert found["reduce-scatter"]["count"] == 1


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("f32[8,4]{1,0}", 128),
        ("(f32[8,4]{1,0}, bf16[2])", 132),
        ("pred[3]", 3),
        ("s4[3]", 2),
        ("f8e4m3fn[5]", 5),
        ("f32[]", 4),
        ("(token[], u8[7])", 7),
    ],
)
def test_bytes_of_a_shape(shape, expected):
    assert shape_bytes(shape) == expected


def test_warnings_of_the_partitioner_are_counted():
    log = (
        "E0101 00:00 spmd_partitioner.cc:652] [SPMD] Involuntary full rematerialization. The "
        "compiler cannot go from sharding {a} to {b} for HLO operation %dot.7 = f32[8]\n"
    )
    assert rematerialization_warnings(log * 2) == {"count": 2, "operations": ["%dot.7"]}
    assert rematerialization_warnings("nothing")["count"] == 0


# Cut from XLA:GPU 0.11.2: a start's tuple holds its operands, in a tuple of their own.
GPU = """\
ENTRY %main (p: f32[1024,128]) -> f32[] {
  %ar-start = ((f32[]), f32[]) all-reduce-start(%x), channel_id=4, to_apply=%add
  %ar-done = f32[] all-reduce-done(%ar-start)
  %ag-start = ((f32[1024,128]{0,1}), f32[1024,1024]{0,1}) all-gather-start(%y), channel_id=2
  %ag-done = f32[1024,1024]{0,1} all-gather-done(%ag-start)
  %rs-start = ((f32[1024,1024]{0,1}), f32[1024,128]{0,1}) reduce-scatter-start(%z), channel_id=5
  %rs-done = f32[1024,128]{0,1} reduce-scatter-done(%rs-start)
  %a2a-start = ((f32[8,4]), f32[8,4], u32[]) async-start(%w), calls=%wrapped
  %a2a-update = ((f32[8,4]), f32[8,4], u32[]) async-update(%a2a-start), calls=%wrapped
  ROOT %a2a-done = f32[8,4] async-done(%a2a-update), calls=%wrapped
}

%wrapped (q: f32[8,4]) -> f32[8,4] {
  ROOT %a2a = f32[8,4]{1,0} all-to-all(%q), dimensions={0}
}
"""

# Cut from libtpu 0.0.48: no trip count, one gather spread over three fusions, and a fusion that is
# a reduce-scatter.
TPU = """\
%start (a: bf16[1,1024,128]) -> bf16[1,1024,1024] {
  %ag.1 = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)} all-gather(%a), channel_id=9, dimensions={2}
  ROOT %c.1 = (bf16[1,1024,128], u32[]{:S(2)}) custom-call(%ag.1), \
custom_call_target="AsyncCollectiveStart"
}

%middle (a: bf16[1,1024,128]) -> bf16[1,1024,1024] {
  %ag.2 = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)} all-gather(%a), channel_id=9, dimensions={2}
  ROOT %t = (f32[8], bf16[1,1024,1024]) tuple(%d, %ag.2)
}

%done (a: bf16[1,1024,128]) -> bf16[1,1024,1024] {
  %ag.3 = bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)} all-gather(%a), channel_id=9, dimensions={2}
  ROOT %c.3 = bf16[1,1024,1024] custom-call(%ag.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.clone.1 (input.2: f32[1024,1024]) -> f32[1024,128] {
  %ar.5 = f32[1024,1024]{1,0:T(8,128)} all-reduce(%input.2), channel_id=6, to_apply=%add
  ROOT %ds = f32[1024,128]{1,0:T(8,128)S(1)} dynamic-slice(%ar.5, %zero, %at)
}

%body (p: (s32[])) -> (s32[]) {
  %f.1 = bf16[1,1024,1024] fusion(%x), kind=kCustom, calls=%start
  %f.2 = bf16[1,1024,1024] fusion(%f.1), kind=kOutput, calls=%middle
  %f.3 = bf16[1,1024,1024] fusion(%f.2), kind=kCustom, calls=%done
  %f.4 = f32[1024,128]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.clone.1
}

%cond (p: (s32[])) -> pred[] {
  %n = s32[]{:T(128)} constant(4)
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[1024,128]) -> f32[] {
  %while = (s32[]{:T(128)}) while(%t), condition=%cond, body=%body, backend_config={}
}
"""


def test_asynchronous_pairs_of_a_gpu_count_their_results():
    found = collectives(GPU)
    assert found["all-reduce"] == {"count": 1, "bytes": 4}
    assert found["all-gather"] == {"count": 1, "bytes": 4 * 1024 * 1024}
    assert found["reduce-scatter"] == {"count": 1, "bytes": 4 * 1024 * 128}
    assert found["all-to-all"] == {"count": 1, "bytes": 4 * 8 * 4}


def test_what_a_tpu_spreads_over_fusions_counts_once_and_loops_are_marked():
    found = collectives(TPU)
    assert found["all-gather"] == {"count": 4, "bytes": 4 * 2 * 1024 * 1024, "in_unknown_loops": 1}
    assert found["reduce-scatter"]["count"] == 4
    assert found["reduce-scatter"]["bytes"] == 4 * 4 * 1024 * 128
    assert found["all-reduce"]["count"] == 0


def test_a_loop_that_says_nothing_at_all_counts_once_and_is_marked():
    found = collectives(TPU.replace("direction=LT", "direction=NE"))
    assert found["reduce-scatter"]["count"] == found["reduce-scatter"]["in_unknown_loops"] == 1


REAL = """
import json, jax, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from aot_entry import build
from mlm_recipe.preflight.collectives import collectives
from mlm_recipe.preflight.program import BuildContext
program = build(BuildContext({}, jax.devices()))
print(json.dumps(collectives(program.step.lower(*program.abstract_args).compile().as_text())))
"""


@pytest.mark.parametrize("devices", [1, 8])
def test_a_real_sharded_step_on_virtual_devices(devices):
    """Four layers in a scan: each gathered twice, each gradient reduced, and the loss."""
    done = subprocess.run(
        [sys.executable, "-c", REAL, os.path.dirname(__file__)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    if devices == 1:
        assert {entry["count"] for entry in found.values()} == {0}
        return
    matrix = 4 * 1024 * 1024
    assert found["all-gather"] == {"count": 8, "bytes": 8 * matrix}
    assert found["all-reduce"] == {"count": 4 + 1, "bytes": 4 * matrix + 4}
