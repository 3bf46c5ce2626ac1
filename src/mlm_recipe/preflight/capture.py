"""Writes down the attached devices, so that another machine can compile for them by path."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src.lib import (
    xla_client,  # pyright: ignore[reportPrivateImportUsage]  the public alias lacks the function
)

from mlm_recipe.guard.targets import known_targets
from mlm_recipe.preflight.targets import TargetUnavailableError


def capture_target(path: Path, devices: Sequence[Any] | None = None) -> str:
    """Write a file that ``--target PATH`` takes.

    Args:
        path: overwritten.
        devices: of all processes, one kind; those of jax by default.

    Returns:
        One line that says what was captured.

    Raises:
        TargetUnavailableError: the devices are CPUs, or of a kind that cannot be described.
    """
    devices = jax.devices() if devices is None else devices
    first = devices[0]
    if first.platform == "cpu":
        raise TargetUnavailableError(
            "there is nothing to capture: jax sees no accelerator here, and CPUs are their own "
            "target (`auto`)"
        )
    found = _tpus(devices) if first.platform == "tpu" else _gpus(devices)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return f"{path}: {len(devices)} x {first.device_kind}, topology {found['topology']}"


def _gpus(devices: Sequence[Any]) -> dict[str, Any]:
    topology: Any = xla_client.get_topology_for_devices(list(devices))
    description = getattr(topology, "target_config", None)
    if not description:
        raise TargetUnavailableError("this jaxlib does not describe its GPUs; use a newer one")
    name = devices[0].device_kind
    figures: dict[str, Any] = {"name": name, "source": "captured from the device"}
    for key, entry in (("memory", "device_memory_size"), ("bandwidth", "memory_bandwidth")):
        number = re.search(rf"\b{entry}: (\d+)", description)
        if number is not None:
            figures[key] = float(number[1])
    for known in known_targets().values():
        if known["platform"] == "cuda" and known["name"].startswith(name):
            figures["peak"] = known["peak"]
            figures["source"] += f"; peak from {known['source']}"
    hosts = len({device.process_index for device in devices})
    return {
        "platform": "cuda",
        "count": len(devices),
        "topology": f"1x{hosts}x{len(devices) // hosts}",
        "figures": figures,
        "description": description,
    }


def _tpus(devices: Sequence[Any]) -> dict[str, Any]:
    name = devices[0].device_kind
    for kind, figures in known_targets().items():
        if figures.get("device_kind") != name:
            continue
        corners = zip(*(device.coords for device in devices), strict=True)
        sides = [max(axis) + 1 for axis in corners][: figures["dimensions"]]
        return {
            "platform": "tpu",
            "count": len(devices),
            "topology": f"{kind}:{'x'.join(map(str, sides))}",
            "figures": figures,
            "description": "",
        }
    raise TargetUnavailableError(f"{name} is not among the targets that can be compiled for")
