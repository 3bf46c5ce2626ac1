"""One program per shape and dtype, each with one parameter: ``tile_entry.py:build``."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mlm_recipe.preflight.program import BuildContext, StepProgram

DTYPES = ("float32", "bfloat16", "int8", "int4")
SHAPES = [(), (7,), (768,), (1025,), (3, 5), (8, 128), (259, 48), (768, 2), (4, 3, 3), (3, 1, 128),
          (2, 3, 5, 7)]  # fmt: skip


def build(context: BuildContext) -> list[StepProgram]:
    """Sums, so that nothing but the parameter and a number is in memory."""
    whole = NamedSharding(Mesh(np.array(context.devices), ("d",)), PartitionSpec())
    step = jax.jit(lambda x: x.astype(jnp.float32).sum())
    return [
        StepProgram(
            f"{dtype}_{'x'.join(map(str, shape))}",
            step,
            (jax.ShapeDtypeStruct(shape, dtype, sharding=whole),),
            parameters=lambda args: {"x": args[0]},
        )
        for dtype in DTYPES
        for shape in SHAPES
    ]
