"""Entries for the preflight child on jax 0.4.34: ``entries.py:levanter_727``."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge
from jax._src.interpreters import mlir
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mlm_recipe.preflight.program import BuildContext, StepProgram

_H100 = Path(__file__).parents[1] / "crashes" / "h100_old.txtpb"


def levanter_727(context: BuildContext) -> StepProgram:
    """A breakpoint with one result beside a contiguous slice: marin-community/levanter#727.

    XLA of 0.4.34 aborts in DynamicSliceFusion. Compiled for the context's devices where those are
    absent GPUs, else for one H100 of its own.
    """
    devices = context.devices if context.absent else _h100()
    _let_callbacks_lower_without_a_gpu()
    mesh = Mesh(np.array(devices[:1]), ("d",))
    whole = NamedSharding(mesh, PartitionSpec())

    def step(keys, y):
        key = keys[0]  # noqa: F841  a local of the frame, hence an operand of the callback
        y = jax.debug.breakpoint(token=y)
        return y * 2

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=whole)

    return StepProgram("levanter_727", jax.jit(step), (shape(2, 128), shape(64, 128)), mesh=mesh)


def _h100():
    topology = topologies.get_topology_desc(
        topology_name="", platform="cuda", topology="1x1x1", target_config=_H100.read_text()
    )
    return topology.devices


class _Backend:
    """A compile-only client cannot make callback descriptors; the CPU's can."""

    platform = "cuda"

    def __init__(self, backend):
        self._backend = backend

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def get_emit_python_callback_descriptor(self, *arguments):
        return jax.devices("cpu")[0].client.get_emit_python_callback_descriptor(*arguments)


def _let_callbacks_lower_without_a_gpu():
    canonical = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda p: "cuda" if p == "gpu" else canonical(p)
    backend = mlir.ModuleContext.__dict__["backend"]
    mlir.ModuleContext.backend = property(lambda self: _Backend(backend.fget(self)))
    mlir.ModuleContext.add_host_callback = lambda self, callback: None
