"""Levanter's train step and its arguments as shapes: nothing is allocated, nothing is read.

``named_jit`` takes a ``ShapeDtypeStruct`` for a static argument (equinox ``is_array``), so the call
that it would make is put together here from the same parts; the program is the same.
"""

from typing import Any

import equinox as eqx
import haliax as hax
import haliax.jax_utils
import haliax.partitioning
import haliax.tree_util as htu
import jax
from haliax import Axis, NamedArray
from haliax.partitioning import (
    ResourceMapping,
    _named_pjit_cache,  # private: what it jits has no other name
    infer_resource_partitions,
    pspec_for,
)
from jax._src.core import trace_state_clean
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.trainer_state import TrainerState

from mlm_recipe.data.example import MlmExample


def let_haliax_run_nothing() -> None:
    """Let haliax ask jax whether it is being traced, instead of making an array to find out.

    ``is_in_jit`` runs ``jnp.zeros`` on the mesh's devices, which die of it where they are absent.
    For a process that compiles for such devices, and does nothing else.
    """
    for module in (haliax.jax_utils, haliax.partitioning):
        module.is_in_jit = lambda: not trace_state_clean()  # pyright: ignore[reportAttributeAccessIssue]


def is_abstract(x: Any) -> bool:
    """An array, or the shape of one."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def named_jit_call(step: Any, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    """The ``jax.jit`` function and the arguments that ``step(*args)`` comes down to.

    Args:
        step: what ``haliax.named_jit`` returned, with ``axis_resources`` and a tuple of booleans
            or nothing as ``donate_args``.
        args: pytrees with arrays or shapes as leaves.

    Returns:
        The function, and ``(donated, reserved, static)``; the last is static.
    """
    mapping = step._axis_resources
    dynamic, static = htu.hashable_partition((args, {}), is_abstract)
    donate = tuple(step._donate_args or ())
    donate += (False,) * (len(args) - len(donate))
    donated, reserved = eqx.partition((step._dynamic_fun, dynamic), (False, (donate, {})))
    out_mapping = step._out_axis_resources or mapping
    with hax.axis_mapping(mapping):
        output = eqx.filter_eval_shape(step._fn, *args)
        out_shardings = infer_resource_partitions(output, out_mapping)
    jitted = _named_pjit_cache(step._fn, **step._pjit_args, out_shardings=out_shardings)
    return jitted, (donated, reserved, (step._static_fun, static))


def abstract_state(trainer: Any, key: Any, init_model: Any, mesh: Mesh) -> Any:
    """Shapes of ``Trainer.initial_state``, each leaf with the sharding it will have."""

    def init(key: Any) -> Any:  # as Trainer.initial_state does it, from scratch
        return TrainerState.init(
            trainer.optimizer,
            init_model(),
            key=key,
            is_trainable=True,
            mp=trainer.mp,
            quantization=trainer.config.quantization,
            model_averaging=trainer.config.model_averaging,
        )

    shapes = eqx.filter_eval_shape(init, key)
    return with_shardings(shapes, trainer.parameter_axis_mapping, mesh)


def with_shardings(tree: Any, mapping: ResourceMapping, mesh: Mesh) -> Any:
    """The same shapes; named arrays sharded by their axes, all else replicated."""

    def place(leaf: Any, spec: Any) -> Any:
        if isinstance(leaf, NamedArray):
            placed: Any = _placed(leaf.array, NamedSharding(mesh, spec))
            return NamedArray(placed, leaf.axes)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return _placed(leaf, NamedSharding(mesh, PartitionSpec()))
        return leaf

    return htu.tree_map(place, tree, pspec_for(tree, mapping))


def _placed(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        shape.shape, shape.dtype, sharding=sharding, weak_type=shape.weak_type
    )


def abstract_batch(Batch: Axis, Pos: Axis, Masked: Axis) -> MlmExample:
    """Shapes of a global training batch."""

    def ids(*axes: Axis, dtype: str = "int32") -> NamedArray:
        shape = tuple(axis.size for axis in axes)
        return NamedArray(jax.ShapeDtypeStruct(shape, dtype), axes)  # pyright: ignore[reportArgumentType]

    return MlmExample(
        input_ids=ids(Batch, Pos),
        segment_ids=ids(Batch, Pos),
        position_ids=ids(Batch, Pos),
        masked_positions=ids(Batch, Masked),
        masked_labels=ids(Batch, Masked),
        masked_weights=ids(Batch, Masked, dtype="float32"),
        masked_kinds=ids(Batch, Masked),
        overflow=ids(Batch),
        masked_per_example=ids(dtype="float32"),
    )
