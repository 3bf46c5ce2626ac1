"""Which code, versions and devices a run used."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

_PACKAGES = (
    "mlm-recipe",
    "jax",
    "jaxlib",
    "marin-levanter",
    "marin-haliax",
    "equinox",
    "optax",
    "transformers",
    "tokenizers",
    "wandb",
)


def versions() -> dict[str, str]:
    """Python's and the packages' versions."""
    return {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}


def git_commit() -> str | None:
    """Commit this package runs from, ``+dirty`` with local changes; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+dirty"]
    try:
        done = subprocess.run(
            [*command, "--abbrev=40", "--exclude=*"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def devices() -> dict[str, Any]:
    """What jax runs on."""
    return {
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "backend": jax.default_backend(),
    }
