"""Collectives are counted from HLO text, in loops as often as the loops run."""

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
