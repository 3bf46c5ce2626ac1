"""Real steps on the attached devices, with the allocator that training will have."""

import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mlm_recipe.preflight.program import StepProgram


class NonFiniteError(ArithmeticError):
    """A step returned NaN or an infinity."""


def execute(program: StepProgram, compiled: Any, steps: int) -> dict[str, Any]:
    """Run the compiled step, feeding each the outcome of the last.

    Returns:
        ``{"steps", "losses", "seconds"}``; losses are empty where the program names none.

    Raises:
        NonFiniteError: the loss (or, without one, any output) is not finite.
    """
    make = program.concrete_args or (lambda: _plain(program.dynamic_args))
    args = make()
    losses, seconds = [], []
    for step in range(steps):
        started = time.perf_counter()
        outputs = jax.block_until_ready(compiled(*args))
        seconds.append(round(time.perf_counter() - started, 4))
        if program.loss is not None:
            losses.append(float(program.loss(outputs)))
            _check_finite(losses[-1], f"the loss of step {step}")
        else:
            for leaf in jax.tree_util.tree_leaves(outputs):
                _check_finite(leaf, f"an output of step {step}")
        if program.carry is None:
            args = args if step + 1 == steps or not _donates(args) else make()
        else:
            args = program.carry(args, outputs)
    jax.effects_barrier()
    return {"steps": steps, "losses": losses, "seconds": seconds}


def _check_finite(value: Any, what: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NonFiniteError(f"{what} is {value}")
        return
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return
    host = np.asarray(jax.device_get(value)).astype(np.float32)
    if not np.isfinite(host).all():
        raise NonFiniteError(f"{what} holds NaN or infinite values")


def _donates(args: tuple[Any, ...]) -> bool:
    return any(
        leaf.is_deleted() for leaf in jax.tree_util.tree_leaves(args) if isinstance(leaf, jax.Array)
    )


def _plain(shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Ones for numbers with a fraction, zeros else: indices stay in range, divisions finite."""

    def fill(shape: Any) -> Any:
        if isinstance(shape, jax.Array):
            return shape
        make = np.ones if jnp.issubdtype(shape.dtype, jnp.inexact) else np.zeros
        return jax.device_put(make(shape.shape, shape.dtype), shape.sharding)

    return jax.tree_util.tree_map(fill, shapes)
