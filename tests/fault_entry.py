"""A small step with a gradient, for tests of the child and of the guard: ``fault_entry.py:build``.

``arguments`` may hold ``wrong`` (another loss), ``callback`` (a kind), ``nan``, ``devices``.
"""

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mlm_recipe.preflight.program import BuildContext, Gradient, StepProgram


def build(context: BuildContext) -> StepProgram:
    """One SGD step of a two-layer regression, data parallel over the context's devices."""
    given = context.arguments
    mesh = Mesh(np.array(context.devices), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())

    def loss_of(w, x):
        y = jnp.tanh(x @ w["a"]) @ w["b"]
        loss = jnp.mean((y - 1.0) ** 2) * (1.5 if given.get("wrong") else 1.0)
        return loss / (0.0 if given.get("nan") else 1.0)

    def step(w, x):
        loss, grads = jax.value_and_grad(loss_of)(w, x)
        if given.get("callback") == "ordered":
            jax.experimental.io_callback(lambda v: None, None, loss, ordered=True)
        if given.get("callback") == "breakpoint":
            jax.debug.breakpoint()
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    def shape(*sizes, sharding=whole):
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=sharding)

    weights = {"a": shape(16, 32), "b": shape(32, 4)}
    batch = shape(8 * mesh.size, 16, sharding=rows)

    def arguments():
        draw = np.random.default_rng(0)
        host = {key: draw.normal(size=s.shape).astype(np.float32) for key, s in weights.items()}
        placed = {key: jax.device_put(value, whole) for key, value in host.items()}
        size = int(given.get("gradient_rows") or batch.shape[0])
        x = draw.normal(size=(size, 16)).astype(np.float32)
        return placed, jax.device_put(x, rows if size % mesh.size == 0 else whole)

    return StepProgram(
        name="sgd",
        step=jax.jit(step, donate_argnums=0),
        abstract_args=(weights, batch),
        mesh=mesh,
        parameters=lambda args: args[0],
        carry=lambda args, outputs: (outputs[0], args[1]),
        concrete_args=arguments,
        loss=lambda outputs: outputs[1],
        gradient=Gradient(jax.value_and_grad(loss_of), arguments, rows=batch.shape[0]),
        flops=6.0 * batch.shape[0] * (16 * 32 + 32 * 4),
        facts={"precision": "float32"},
    )
