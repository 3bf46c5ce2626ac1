"""Entries: ``pkg.mod:build`` or ``path/file.py:build``, called to get programs."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlm_recipe.preflight.program import BuildContext, StepProgram


def load_entry(entry: str) -> Callable[..., Any]:
    """The function that an entry names.

    Raises:
        ValueError: it is not spelt ``module:function``.
        ImportError, AttributeError: there is no such module or function.
    """
    module_name, colon, function = entry.rpartition(":")
    if not colon or not function:
        raise ValueError(f"entry `{entry}`: write it as pkg.mod:build or path/file.py:build")
    if not module_name.endswith(".py"):
        return getattr(importlib.import_module(module_name), function)
    path = Path(module_name).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"entry `{entry}`: there is no file {path}")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, function)


def build_programs(build: Callable[..., Any], context: BuildContext) -> list[StepProgram]:
    """Call an entry, which may take the context or nothing.

    It returns a StepProgram, a list of them, or ``(jitted function, abstract arguments)``.

    Raises:
        TypeError: it returned something else.
    """
    takes_context = bool(inspect.signature(build).parameters)
    built = build(context) if takes_context else build()
    if isinstance(built, StepProgram):
        return [built]
    if _is_pair(built):
        step, arguments = built
        return [StepProgram(getattr(step, "__name__", "step"), step, tuple(arguments))]
    if isinstance(built, Sequence) and built and all(isinstance(p, StepProgram) for p in built):
        return list(built)
    raise TypeError(
        f"an entry returns a StepProgram, a list of them or (jitted, arguments), not {built!r}"
    )


def _is_pair(built: Any) -> bool:
    return (
        isinstance(built, tuple)
        and len(built) == 2
        and hasattr(built[0], "lower")
        and isinstance(built[1], tuple | list)
    )
