"""Environment variables the training program starts with, where the user has set none.

Each is here because a library reads it at import or start and fails, phones out or writes outside
the run directory without it.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlm_recipe.launch.overlay import get_path


def training_environment(
    config: Mapping[str, Any], run_dir: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """The user's environment, completed."""
    defaults = {
        # levanter.trainer imports GitPython, which raises without git on PATH.
        "GIT_PYTHON_REFRESH": "quiet",
        # Zephyr's scratch; unset, it asks a cloud metadata server first (2 s offline).
        "MARIN_PREFIX": str(run_dir / "scratch"),
        # transformers logs advice about absent frameworks otherwise.
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        # Unset, tokenizers warns and turns its threads off after a fork (git, W&B).
        "TOKENIZERS_PARALLELISM": "true",
        "WANDB_DIR": str(run_dir),
        "WANDB_CONSOLE": "off",
    }
    if "offline" in _wandb_modes(config):
        # The YAML mode alone still lets wandb resolve a telemetry host.
        defaults["WANDB_MODE"] = "offline"
    defaults |= _home_defaults(environ)
    return {**defaults, **environ}


def _wandb_modes(config: Mapping[str, Any]) -> set[str]:
    trackers = get_path(config, "trainer.tracker", [])
    trackers = trackers if isinstance(trackers, list) else [trackers]
    return {str(t.get("mode")) for t in trackers if t.get("type", "wandb") == "wandb"}


def _home_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Cache directories away from a home that cannot be written."""
    home = environ.get("HOME", "")
    if home and os.access(home, os.W_OK):
        return {}
    scratch = Path(tempfile.gettempdir()) / f"mlm_recipe-{os.getuid()}"
    return {
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "HF_HOME": str(scratch / "huggingface"),
        "WANDB_CONFIG_DIR": str(scratch / "wandb-config"),
        "WANDB_CACHE_DIR": str(scratch / "wandb-cache"),
        "WANDB_DATA_DIR": str(scratch / "wandb-data"),
        "MPLCONFIGDIR": str(scratch / "matplotlib"),
    }
