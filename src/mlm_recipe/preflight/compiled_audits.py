"""Audits of a compiled program: donation, replicated parameters, resharding between steps."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlm_recipe.preflight.audits import AuditResult, finding
from mlm_recipe.preflight.program import StepProgram

_DONATED_SHARE = 0.95
_REPLICATED_SHARE = 0.02
_MOST_NAMED = 5


def audit_donation(
    lowered: Any, compiled: Any, alias_bytes: float | None, severity: str
) -> AuditResult:
    """Donated buffers are reused; where not, the state is held twice.

    Args:
        lowered: ``jax.stages.Lowered``; says which arguments are donated.
        compiled: ``jax.stages.Compiled``; says how they are sharded.
        alias_bytes: bytes per device that XLA aliased; None where it does not tell.
        severity: of a finding.
    """
    pairs = zip(_leaves(lowered.args_info), _leaves(compiled.input_shardings), strict=True)
    donated = sum(
        _bytes_per_device(info.shape, info.dtype, sharding)
        for info, sharding in pairs
        if info is not None and info.donated
    )
    if donated == 0 or alias_bytes is None:
        return AuditResult("donation", details={"donated_bytes": donated})
    details = {"donated_bytes": donated, "aliased_bytes": alias_bytes}
    if alias_bytes >= _DONATED_SHARE * donated:
        return AuditResult("donation", details=details)
    message = (
        f"{donated} bytes per device are donated and {alias_bytes:.0f} are reused; give outputs "
        "the shape, dtype and sharding of the arguments they replace"
    )
    return finding("donation", severity, message, **details)


def audit_replicated_parameters(
    program: StepProgram, shardings: tuple[Any, ...], severity: str
) -> AuditResult:
    """Where some parameters are sharded, nearly all of their bytes are.

    A mesh on which none is sharded is data parallel, on purpose; it passes, and says so.

    Args:
        program: names its parameters.
        shardings: of the dynamic arguments, shaped like them.
        severity: of a finding.
    """
    name = "replicated_parameters"
    if program.parameters is None or program.mesh is None or program.mesh.size == 1:
        return AuditResult(name)
    leaves = program.parameters(program.dynamic_args)
    placed = program.parameters(shardings)
    sizes = {key: _bytes(leaf.shape, leaf.dtype) for key, leaf in leaves.items()}
    whole = {key: size for key, size in sizes.items() if placed[key].is_fully_replicated}
    total, replicated = sum(sizes.values()), sum(whole.values())
    details: dict[str, Any] = {"parameter_bytes": total, "replicated_bytes": replicated}
    if replicated == total:
        message = f"all parameters are replicated on {program.mesh.size} devices (data parallel)"
        return AuditResult(name, "ok", message, details=details)
    if replicated <= _REPLICATED_SHARE * total:
        return AuditResult(name, details=details)
    largest = sorted(whole, key=lambda key: -whole[key])[:_MOST_NAMED]
    message = (
        f"{100 * replicated / total:.0f} % of the parameter bytes are replicated on "
        f"{program.mesh.size} devices, {largest[0]} first; map one of its axes to the mesh"
    )
    return finding(name, severity, message, leaves=largest, **details)


def audit_resharding(
    program: StepProgram, traced: Any, compiled: Any, severity: str
) -> AuditResult:
    """What a step returns can be fed to the next as it is; else step 2 compiles again."""
    if program.carry is None:
        return AuditResult("resharding")
    given_shapes = program.dynamic_args
    given = compiled.input_shardings[0]
    next_shapes = program.carry(given_shapes, _out_shapes(traced, compiled))
    returned = program.carry(given, compiled.output_shardings)
    moved = []
    paths, _ = jax.tree_util.tree_flatten_with_path(given_shapes, is_leaf=_is_none)
    columns = (_leaves(tree) for tree in (next_shapes, given, returned))
    for (path, before), after, sharding, new_sharding in zip(paths, *columns, strict=True):
        if sharding is None or new_sharding is None:
            continue  # no argument, or one the program does not use
        same = (before.shape, before.dtype) == (after.shape, after.dtype)
        if not same or not sharding.is_equivalent_to(new_sharding, len(before.shape)):
            moved.append(jax.tree_util.keystr(path))
    if not moved:
        return AuditResult("resharding")
    message = (
        f"{len(moved)} leaves leave the step in another shape, dtype or sharding than they enter "
        f"it, {moved[0]} first: step 2 would compile again"
    )
    return finding("resharding", severity, message, leaves=moved[:_MOST_NAMED])


def _is_none(x: Any) -> bool:
    return x is None


def _leaves(tree: Any) -> list[Any]:
    """Leaves, None among them: what jax drops as unused has no sharding, yet keeps its place."""
    return jax.tree_util.tree_leaves(tree, is_leaf=lambda x: x is None or hasattr(x, "donated"))


def _out_shapes(traced: Any, compiled: Any) -> Any:
    out_info = getattr(traced, "out_info", None)
    return compiled.out_info if out_info is None else out_info


def audit_rematerialization(warnings: Mapping[str, Any], severity: str) -> AuditResult:
    """The partitioner found a way from each sharding to the next without gathering all of it."""
    if not warnings.get("count"):
        return AuditResult("rematerialization")
    message = (
        f"the partitioner gathers {warnings['count']} tensor(s) whole (involuntary full "
        "rematerialization); constrain their sharding or shard another axis"
    )
    return finding("rematerialization", severity, message, **warnings)


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0  # typed keys: a few words
    return math.prod(shape) * np.dtype(dtype).itemsize


def _bytes_per_device(shape: tuple[int, ...], dtype: Any, sharding: Any) -> int:
    return _bytes(shape if sharding is None else sharding.shard_shape(shape), dtype)
