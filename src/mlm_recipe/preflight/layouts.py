"""How a TPU holds parameters: tiles pad small and odd shapes, and axes may be permuted.

Information for the exporter: a leaf whose tiled size exceeds its logical size was once published
as zeros (tpu-sync#666).
"""

import math
from typing import Any

import numpy as np

from mlm_recipe.preflight.program import StepProgram


def parameter_layouts(program: StepProgram, compiled: Any) -> list[dict[str, Any]]:
    """One record per parameter leaf, from the layouts the compiler chose for the arguments.

    Returns:
        ``leaf, shape`` (of one shard) ``, dtype, tiling, major_to_minor, logical_bytes,
        device_bytes, padded, permuted``.
    """
    assert program.parameters is not None
    formats = getattr(compiled, "input_formats", None)
    if formats is None:
        return []
    leaves = program.parameters(program.dynamic_args)
    chosen = program.parameters(formats[0])
    return [
        _record(name, leaf, chosen[name])
        for name, leaf in leaves.items()
        if getattr(chosen[name], "layout", None) is not None  # jax drops unused arguments
    ]


def _record(name: str, leaf: Any, chosen: Any) -> dict[str, Any]:
    layout = chosen.layout
    shape = chosen.sharding.shard_shape(leaf.shape)
    order = tuple(layout.major_to_minor)
    tiling = tuple(tuple(tile) for tile in (layout.tiling or ()))
    # XLA packs int4 and the like, numpy does not.
    bits = layout.sub_byte_element_size_in_bits or 8 * np.dtype(leaf.dtype).itemsize
    logical = -(-math.prod(shape) * bits // 8)
    physical = [shape[axis] for axis in order]
    device = -(-tiled_elements(physical, tiling[0] if tiling else ()) * bits // 8)
    return {
        "leaf": name,
        "shape": list(shape),
        "dtype": str(np.dtype(leaf.dtype)),
        "tiling": [list(tile) for tile in tiling],
        "major_to_minor": list(order),
        "logical_bytes": logical,
        "device_bytes": device,
        "padded": device > logical,
        "permuted": order != tuple(range(len(order))),
    }


def tiled_elements(physical: list[int], tile: tuple[int, ...]) -> int:
    """Elements of a shape, major first, once its minor axes are rounded up to whole tiles.

    Further tilings subdivide the first and change no size. A tile with more axes than the shape
    takes leading ones.
    """
    if not tile:
        return math.prod(physical)
    sizes = [1] * max(len(tile) - len(physical), 0) + list(physical)
    kept = len(sizes) - len(tile)
    rounded = [-(-size // t) * t for size, t in zip(sizes[kept:], tile, strict=True)]
    return math.prod(sizes[:kept]) * math.prod(rounded)
