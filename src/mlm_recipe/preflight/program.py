"""StepProgram: what an entry hands to the preflight, and ``BuildContext``: what it is handed."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class BuildContext:
    """What an entry builds for."""

    arguments: Mapping[str, Any]
    """The spec's ``arguments``; the recipe reads ``config``, the effective configuration."""
    devices: Sequence[Any]
    """Attached devices, or the compile-only devices of a named target."""
    absent: bool = False
    """The devices are a named target's: nothing may run on them, eagerly or compiled."""


@dataclass(frozen=True)
class Gradient:
    """Loss and gradient for the numeric gate, without dropout and on fixed tokens."""

    function: Callable[..., tuple[Any, Any]]
    """``function(*arguments()) -> (loss, gradients)``: pure, not jitted."""
    arguments: Callable[[], tuple[Any, ...]]
    """Makes concrete arguments; equal on every mesh."""
    precision: str = "float32"
    """Compute dtype, which picks the limits."""
    rows: int = 0
    """Examples it is taken over; the reference takes as many."""


@dataclass(frozen=True)
class StepProgram:
    """One jitted step on abstract arguments."""

    name: str
    step: Any
    """A ``jax.jit`` function; traced, lowered and compiled with ``abstract_args``."""
    abstract_args: tuple[Any, ...]
    """``jax.ShapeDtypeStruct`` leaves with shardings; static arguments as they are."""
    static_argnums: tuple[int, ...] = ()
    """Which of ``abstract_args`` are static arguments of ``step``."""
    mesh: jax.sharding.Mesh | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered while it is traced, lowered, compiled and run: a mesh, an axis mapping."""
    parameters: Callable[[tuple[Any, ...]], Mapping[str, Any]] | None = None
    """Picks the named parameter leaves out of arguments (or of anything shaped like them)."""
    carry: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] | None = None
    """Arguments of the next step from the arguments and outputs of this one."""
    concrete_args: Callable[[], tuple[Any, ...]] | None = None
    """Makes real arguments on the attached devices; None fills in ones and zeros."""
    loss: Callable[[Any], Any] | None = None
    """Picks the loss out of the outputs."""
    gradient: Gradient | None = None
    """None: a fallback of this program cannot be vouched for."""
    flops: float | None = None
    """Useful FLOPs of one step over all devices, counted from the geometry."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """For the report: parameters, tokens per step, ..."""

    @property
    def dynamic_args(self) -> tuple[Any, ...]:
        """The arguments that a compiled step is called with."""
        pairs = enumerate(self.abstract_args)
        return tuple(arg for index, arg in pairs if index not in self.static_argnums)
