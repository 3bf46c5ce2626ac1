"""Counts what XLA compiled and what the persistent cache gave, by the name of the function.

From jax's own monitoring events; a cache hit is announced on the compiling thread just before the
compilation it spared ends.
"""

import threading
from collections import Counter

from jax import monitoring

_HIT = "/jax/compilation_cache/cache_hits"
_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompileCounts:
    """Counts from the moment it is made; there is no way to stop."""

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        """Compilations by XLA."""
        self.cached: Counter[str] = Counter()
        """Executables found in the persistent cache."""
        self.seconds: Counter[str] = Counter()
        """Wall time of both."""
        self._local = threading.local()
        monitoring.register_event_listener(self._on_event)
        monitoring.register_event_duration_secs_listener(self._on_duration)

    def _on_event(self, event: str, **kwargs: str | int) -> None:
        if event == _HIT:
            self._local.hit = True

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event != _COMPILE:
            return
        name = str(kwargs.get("fun_name", "?")).removeprefix("jit(").removesuffix(")")
        hit = getattr(self._local, "hit", False)
        self._local.hit = False
        (self.cached if hit else self.compiled)[name] += 1
        self.seconds[name] += duration_secs  # pyright: ignore[reportArgumentType]
