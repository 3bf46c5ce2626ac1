"""A step for targets that are not there: four layers in a scan, weights and batch sharded.

``aot_entry.py:build`` fits any device; ``aot_entry.py:huge`` wants terabytes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mlm_recipe.preflight.program import BuildContext, StepProgram

LAYERS, WIDTH, ROWS = 4, 1024, 512
ODD = (7, 129)


def build(context: BuildContext) -> StepProgram:
    """Weights sharded over their columns, gathered layer by layer."""
    mesh = Mesh(np.array(context.devices), ("d",))

    def loss_of(w, x):
        def layer(h, matrix):
            return jnp.tanh(h @ matrix), None

        h, _ = lax.scan(layer, x, w["layers"])
        return (h**2).mean() + w["odd"].sum()

    def step(w, x):
        loss, grads = jax.value_and_grad(loss_of)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    def shape(*sizes, spec=()):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)

    weights = {"layers": shape(LAYERS, WIDTH, WIDTH, spec=(None, None, "d")), "odd": shape(*ODD)}
    placed = jax.tree.map(lambda leaf: leaf.sharding, weights)
    return StepProgram(
        name="layers",
        step=jax.jit(
            step, donate_argnums=0, out_shardings=(placed, NamedSharding(mesh, PartitionSpec()))
        ),
        abstract_args=(weights, shape(ROWS, WIDTH, spec=("d",))),
        mesh=mesh,
        parameters=lambda args: args[0],
        carry=lambda args, outputs: (outputs[0], args[1]),
        flops=6.0 * LAYERS * ROWS * WIDTH * WIDTH,
        facts={"precision": "float32"},
    )


def huge(context: BuildContext) -> StepProgram:
    """Two matrices of 2**19 by 2**19, whole on every device."""
    mesh = Mesh(np.array(context.devices), ("d",))
    whole = NamedSharding(mesh, PartitionSpec())
    matrix = jax.ShapeDtypeStruct((2**19, 2**19), jnp.bfloat16, sharding=whole)

    def step(w, x):
        def loss_of(w):
            return (jnp.tanh(x @ w) @ w.T).astype(jnp.float32).var()

        loss, grad = jax.value_and_grad(loss_of)(w)
        return w - grad, loss

    return StepProgram("huge", jax.jit(step), (matrix, matrix), mesh=mesh)
