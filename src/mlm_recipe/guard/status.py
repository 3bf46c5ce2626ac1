"""The phase file: how a child says where it is, so that its death says where it was. No jax."""

import json
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Any


class Phase(StrEnum):
    """Milestones of a preflight child, each written before what follows it begins."""

    START = "start"
    """Then: importing jax."""
    JAX_IMPORTED = "jax_imported"
    """Then: starting the backend, which parses flags."""
    BACKEND_READY = "backend_ready"
    """Then: importing and building the program."""
    CONFIGURED = "configured"
    """Then: tracing."""
    TRACED = "traced"
    """Then: auditing the jaxpr."""
    AUDITED = "audited"
    """Then: lowering to StableHLO, and writing what a post-mortem needs."""
    LOWERED = "lowered"
    COMPILE_BEGIN = "compile_begin"
    """Then: XLA."""
    COMPILED = "compiled"
    """Then: reading memory, collectives, shardings."""
    BUDGETED = "budgeted"
    """Then: real steps on the attached devices, or nothing."""
    EXECUTED = "executed"
    DONE = "done"


class PhaseFile:
    """Writes phases, atomically: a reader sees the old file or the whole new one."""

    def __init__(self, path: Path, **constant: Any):
        self.path = path
        self._constant = constant
        self._started = time.time()
        self._at: dict[str, float] = {}

    def reach(self, phase: str, **details: Any) -> None:
        """Say that ``phase`` is reached; ``details`` are JSON values."""
        self._at[phase] = round(time.time() - self._started, 3)
        content = {"phase": str(phase), "pid": os.getpid(), "at": self._at}
        content |= {**self._constant, **details}
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        partial.write_text(json.dumps(content), encoding="utf-8")
        os.replace(partial, self.path)


def read_phase(path: Path) -> tuple[str | None, dict[str, float]]:
    """The last phase and the seconds at which each was reached; (None, {}) where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return content["phase"], content["at"]
    except (OSError, ValueError, KeyError):
        return None, {}
