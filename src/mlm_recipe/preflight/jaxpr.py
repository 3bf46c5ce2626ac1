"""Walking a jaxpr: every equation at any depth, with the user's source line."""

from collections.abc import Iterator
from typing import Any

from jax._src import core, source_info_util  # private; the only ways to walk and to name a line


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a (closed) jaxpr, those of loops, branches and calls included."""
    for inner in jaxprs(jaxpr):
        yield from inner.eqns


def jaxprs(jaxpr: Any) -> Iterator[Any]:
    """The jaxpr and all jaxprs in the parameters of its equations, each once."""
    seen: set[int] = set()
    stack = [getattr(jaxpr, "jaxpr", jaxpr)]
    while stack:
        inner = stack.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        yield inner
        stack += [getattr(sub, "jaxpr", sub) for eqn in inner.eqns for sub in _inner(eqn.params)]


def _inner(params: Any) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.Jaxpr | core.ClosedJaxpr):
                yield item


def constants(jaxpr: Any) -> Iterator[Any]:
    """Arrays captured by the closed jaxpr and those within it, each once."""
    seen: set[int] = set()
    closed = [jaxpr, *(sub for eqn in equations(jaxpr) for sub in _inner(eqn.params))]
    for item in closed:
        for const in getattr(item, "consts", ()):
            if id(const) not in seen:
                seen.add(id(const))
                yield const


def source_line(eqn: Any) -> str:
    """``path/file.py:123 (function)`` of the user's code that made an equation."""
    return source_info_util.summarize(eqn.source_info)
