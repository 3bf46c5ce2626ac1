"""Files a post-mortem needs, written before the compiler gets a chance to kill the process."""

import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "libtpu",
    "marin-levanter",
    "marin-haliax",
    "equinox",
    "numpy",
)
_VARIABLES = ("XLA_", "JAX_", "LIBTPU_", "TPU_", "CUDA_", "TF_CPP_", "NCCL_")


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what is compiled, where installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    """The variables that jax and XLA read; no others, for they may hold secrets."""
    return {key: value for key, value in os.environ.items() if key.startswith(_VARIABLES)}


def write_json(path: Path, content: Any) -> None:
    """Atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(partial, path)


def write_program(directory: Path, name: str, *, jaxpr: Any, stablehlo: str) -> str:
    """Write ``NAME.jaxpr.txt`` and ``NAME.stablehlo.mlir``.

    Returns:
        The sha256 of the StableHLO text.
    """
    (directory / f"{name}.jaxpr.txt").write_text(str(jaxpr), encoding="utf-8")
    (directory / f"{name}.stablehlo.mlir").write_text(stablehlo, encoding="utf-8")
    return hashlib.sha256(stablehlo.encode()).hexdigest()
