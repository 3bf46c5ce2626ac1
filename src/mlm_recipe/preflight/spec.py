"""The spec file: everything a child is told. JSON, so that it outlives code and can be read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_AUDITS: Mapping[str, str] = {
    "ordered_effects": "refuse",
    "host_callbacks": "refuse",
    "float64": "refuse",
    "captured_constants": "warn",
    "donation": "warn",
    "replicated_parameters": "warn",
    "resharding": "warn",
    "rematerialization": "warn",
}
"""Audit -> ``refuse``, ``warn`` or ``off``."""

DEFAULT_LIMITS: Mapping[str, float] = {
    "memory_warn": 0.85,
    "memory_refuse": 0.95,
    "gpu_memory_fraction": 0.75,
    "gpu_reserve_gib": 1.5,
    "captured_constants_mib": 1.0,
}


@dataclass(frozen=True)
class Spec:
    """One pass of the child."""

    entry: str
    """``pkg.mod:build`` or ``path/file.py:build``."""
    directory: Path
    """Everything it writes goes here."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """For the entry, untouched."""
    target: str = "auto"
    variant: str = "as_configured"
    audits: Mapping[str, str] = field(default_factory=dict)
    """Over ``DEFAULT_AUDITS``."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Over ``DEFAULT_LIMITS``."""
    execute_steps: int = 2
    """Real steps on attached devices; 0 compiles only."""
    numerics: str = "none"
    """``measure``: loss and gradient for the gate; ``reference``: the same, one operation at a
    time, and nothing else."""

    def audit(self, name: str) -> str:
        """``refuse``, ``warn`` or ``off``."""
        return self.audits.get(name, DEFAULT_AUDITS[name])

    def limit(self, name: str) -> float:
        """A limit, or its default."""
        return float(self.limits.get(name, DEFAULT_LIMITS[name]))

    @staticmethod
    def read(path: Path) -> "Spec":
        """Raises ValueError for unknown keys, KeyError without an entry."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        unknown = raw.keys() - Spec.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(f"{path}: unknown keys {sorted(unknown)}")
        return Spec(**{**raw, "directory": Path(raw.get("directory", path.parent))})
