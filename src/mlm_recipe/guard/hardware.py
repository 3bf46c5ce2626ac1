"""What the machine is, read without starting any backend."""

import glob
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_TPU_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_TOPOLOGY", "TPU_WORKER_HOSTNAMES", "TPU_NAME")


def hardware_identity(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """CPU model, a digest of its features, cores, memory, GPUs with driver, TPU chips.

    ``nvidia-smi`` is given 2 seconds; where it fails, ``gpus`` says so and is no list.
    """
    environ = os.environ if environ is None else environ
    model, features = _cpu()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": model,
        "cpu_features": features,
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "gpus": _gpus(environ.get("PATH")),
        "visible_gpus": environ.get("CUDA_VISIBLE_DEVICES"),
        "tpu_chips": len(glob.glob("/dev/accel*")),
        "tpu": {name: environ[name] for name in _TPU_VARIABLES if name in environ},
    }


def attached_platform(environ: Mapping[str, str] | None = None) -> str:
    """``cuda``, ``tpu`` or ``cpu``: what jax will most likely start on.

    ``JAX_PLATFORMS`` decides where it is set; otherwise a device that is there and whose plugin
    is installed.
    """
    environ = os.environ if environ is None else environ
    asked = environ.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    if asked:
        return {"gpu": "cuda"}.get(asked, asked)
    if glob.glob("/dev/accel*") and _installed("libtpu"):
        return "tpu"
    plugins = ("jax-cuda13-plugin", "jax-cuda12-plugin")
    if isinstance(found := _gpus(environ.get("PATH")), list) and found:
        return "cuda" if any(_installed(name) for name in plugins) else "cpu"
    return "cpu"


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cpu() -> tuple[str, str]:
    """Model name, and 16 hex digits of its sorted feature flags: XLA compiles for them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine(), ""
    found = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip().lower(), value.strip())
    features = " ".join(sorted(found.get("flags", found.get("features", "")).split()))
    model = found.get("model name") or platform.machine()
    return model, hashlib.sha256(features.encode()).hexdigest()[:16]


@cache
def _gpus(path: str | None) -> list[str] | str:
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return []
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi: {type(error).__name__}"
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
