"""Tiles: bytes on a TPU against bytes of the tensor. Golden sizes are libtpu 0.0.48's own."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mlm_recipe.preflight.layouts import parameter_layouts, tiled_elements
from mlm_recipe.preflight.program import StepProgram


@pytest.mark.parametrize(
    ("shape", "dtype", "order", "tiling", "bits", "logical", "device"),
    [
        ((), "float32", (), ((128,),), 0, 4, 512),
        ((50265, 768), "float32", (0, 1), ((8, 128),), 0, 154414080, 154435584),
        ((50265, 768), "bfloat16", (0, 1), ((8, 128), (2, 1)), 0, 77207040, 77217792),
        ((50265, 768), "int4", (0, 1), ((8, 128), (8, 1)), 4, 19301760, 19304448),
        ((3, 1, 128), "float32", (0, 1, 2), ((1, 128),), 0, 1536, 1536),
        ((3, 1, 128), "bfloat16", (1, 0, 2), ((4, 128), (2, 1)), 0, 768, 1024),
        ((3, 1, 128), "int8", (1, 0, 2), ((4, 128), (4, 1)), 0, 384, 512),
    ],
)
def test_sizes_of_a_tpu(shape, dtype, order, tiling, bits, logical, device):
    leaf = jax.ShapeDtypeStruct(shape, dtype)
    layout = SimpleNamespace(
        major_to_minor=order, tiling=tiling, sub_byte_element_size_in_bits=bits
    )
    sharding = SimpleNamespace(shard_shape=lambda whole: whole)
    chosen = SimpleNamespace(layout=layout, sharding=sharding)
    program = StepProgram("p", None, (leaf,), parameters=lambda args: {"w": args[0]})
    compiled: Any = SimpleNamespace(input_formats=((chosen,), {}))
    (found,) = parameter_layouts(program, compiled)
    assert (found["logical_bytes"], found["device_bytes"]) == (logical, device)
    assert found["padded"] == (device > logical)
    assert found["permuted"] == (order != tuple(sorted(order)))
    assert found["shape"] == list(shape) and found["dtype"] == dtype


def test_a_shard_is_what_is_padded():
    layout = SimpleNamespace(
        major_to_minor=(0, 1), tiling=((8, 128),), sub_byte_element_size_in_bits=0
    )
    sharding = SimpleNamespace(shard_shape=lambda whole: (whole[0], whole[1] // 2))
    chosen = SimpleNamespace(layout=layout, sharding=sharding)
    leaf = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    program = StepProgram("p", None, (leaf,), parameters=lambda args: {"w": args[0]})
    compiled: Any = SimpleNamespace(input_formats=((chosen,), {}))
    (found,) = parameter_layouts(program, compiled)
    assert (found["shape"], found["padded"]) == ([8, 64], True)


@pytest.mark.parametrize(
    ("physical", "tile", "elements"),
    [
        ([8, 128], (8, 128), 1024), ([9, 129], (8, 128), 16 * 256), ([5], (8, 128), 1024),
        ([2, 3, 5], (8, 128), 2 * 1024), ([3, 5], (), 15), ([], (128,), 128),
    ],
)  # fmt: skip
def test_minor_axes_are_rounded_up_to_tiles(physical, tile, elements):
    assert tiled_elements(physical, tile) == elements


def test_a_cpu_neither_pads_nor_permutes_and_unused_leaves_have_no_layout():
    step = jax.jit(lambda used, unused: used.sum())
    leaf = jax.ShapeDtypeStruct((7, 129), jnp.float32)
    program = StepProgram(
        "p", step, (leaf, leaf), parameters=lambda args: dict(zip("ab", args, strict=True))
    )
    (found,) = parameter_layouts(program, step.lower(leaf, leaf).compile())
    assert (found["leaf"], found["padded"], found["permuted"]) == ("a", False, False)
    assert found["device_bytes"] == found["logical_bytes"] == 4 * 7 * 129


def test_older_jax_has_no_formats():
    program = StepProgram("p", None, (), parameters=lambda args: {})
    assert parameter_layouts(program, SimpleNamespace()) == []
