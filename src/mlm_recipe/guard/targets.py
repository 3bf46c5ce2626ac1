"""Names of targets: ``auto``, ``h200:8``, ``v5e:2x4``, ``v5e-16``, or a captured description."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from mlm_recipe.errors import ConfigError

GPUS_PER_HOST = 8
CHIPS_PER_HOST = 4
EXTRAS = {"cuda": "gpu", "tpu": "tpu"}
"""Platform -> the extra of this package that brings its compiler."""


@dataclass(frozen=True)
class TargetSpec:
    """Devices to compile for."""

    name: str
    """As it was asked for."""
    kind: str
    """A key of ``targets.yaml``, ``auto`` or ``captured``."""
    platform: str
    """``cuda``, ``tpu`` or, for ``auto``, ``attached``."""
    count: int | None = None
    """Devices; None where only the backend knows."""
    topology: str = ""
    """As the compiler takes it: ``1xHOSTSxGPUS``, ``v5e:2x4``."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Of one device, from ``targets.yaml``."""
    description: str = ""
    """A captured ``target_config`` of a GPU."""


@cache
def known_targets() -> Mapping[str, Any]:
    """``targets.yaml``."""
    text = resources.files("mlm_recipe.guard").joinpath("targets.yaml").read_text("utf-8")
    return yaml.safe_load(text)


def parse_target(text: str) -> TargetSpec:
    """Read a target's name.

    Raises:
        ConfigError: there is no such kind, or it has no such topology.
    """
    if text == "auto":
        return TargetSpec(text, "auto", "attached")
    if Path(text).is_file():
        return _captured(text)
    kinds = known_targets()
    kind = next((k for k in sorted(kinds, key=len, reverse=True) if _is_kind(k, text)), None)
    if kind is None:
        raise ConfigError(
            "--target",
            text,
            "there is no such target, and no file of that name",
            f"use one of: auto, {', '.join(kinds)}, with :N or :topology, e.g. h200:8 or v5e:2x4",
        )
    figures, size = kinds[kind], text[len(kind) :]
    if figures["platform"] == "cuda":
        return _gpus(text, kind, size, figures)
    return _tpus(text, kind, size, figures)


def _is_kind(kind: str, text: str) -> bool:
    return text == kind or text.startswith((f"{kind}:", f"{kind}-"))


def _gpus(text: str, kind: str, size: str, figures: Mapping[str, Any]) -> TargetSpec:
    count = int(size[1:]) if re.fullmatch(r":\d+", size) else 1 if not size else 0
    hosts, rest = divmod(count, GPUS_PER_HOST)
    if count < 1 or (hosts and rest):
        raise ConfigError(
            "--target",
            text,
            f"it is no number of GPUs in hosts of {GPUS_PER_HOST}",
            f"give 1 to {GPUS_PER_HOST}, or a multiple of it, e.g. {kind}:8",
        )
    topology = f"1x{hosts or 1}x{GPUS_PER_HOST if hosts else rest}"
    return TargetSpec(text, kind, "cuda", count, topology, figures)


def _tpus(text: str, kind: str, size: str, figures: Mapping[str, Any]) -> TargetSpec:
    dimensions = figures["dimensions"]
    if not size:
        shape = _shape(figures["default"])
    elif re.fullmatch(r":\d+(x\d+)+", size):
        shape = _shape(size[1:])
    elif found := re.fullmatch(r"([:-])(\d+)", size):
        cores = figures["cores_per_chip"] if found.group(1) == "-" else 1
        chips, rest = divmod(int(found.group(2)), cores)
        shape = () if rest else near_cube(chips, dimensions)
    else:
        shape = ()
    if len(shape) != dimensions or not _made_of_hosts(shape):
        raise ConfigError(
            "--target",
            text,
            f"it is no topology of {kind}, which has {dimensions} dimensions, the first two even "
            "in all slices of four chips and more",
            f"give e.g. {kind}:{figures['default']}",
        )
    topology = f"{kind}:{'x'.join(map(str, shape))}"
    return TargetSpec(text, kind, "tpu", math.prod(shape), topology, figures)


def _made_of_hosts(shape: tuple[int, ...]) -> bool:
    """A host has 2x2 chips; smaller slices are a part of one, in a plane."""
    first, second = shape[:2]
    if 1 <= math.prod(shape) < CHIPS_PER_HOST:
        return max(first, second) == math.prod(shape) != 3
    return min(shape) >= 1 and first % 2 == 0 == second % 2


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def near_cube(chips: int, dimensions: int) -> tuple[int, ...]:
    """Powers of two whose product is ``chips``, as equal as they can be; () where there are none.

    Three dimensions have the larger sides first (4x4x2 is no TPU topology, 2x2x4 is): ascending,
    but for four chips, which are 2x2x1.
    """
    if chips < 1 or chips & (chips - 1):
        return ()
    power = chips.bit_length() - 1
    sides = sorted(2 ** ((power + index) // dimensions) for index in range(dimensions))
    return (2, 2, 1) if sides == [1, 2, 2] else tuple(sides)


def _captured(text: str) -> TargetSpec:
    try:
        raw = json.loads(Path(text).read_text(encoding="utf-8"))
        return TargetSpec(
            text,
            "captured",
            raw["platform"],
            raw["count"],
            raw["topology"],
            raw["figures"],
            raw["description"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "--target",
            text,
            f"the file is no captured target: {error}",
            "make one on the machine: python -m mlm_recipe.preflight --capture-target FILE",
        ) from error


def install_command(platform: str) -> str:
    """What brings the compiler for a platform."""
    return f"uv sync --extra {EXTRAS[platform]}"


def list_targets() -> list[dict[str, Any]]:
    """One row per kind: ``target`` (an example), ``kind, platform, source``, the ``extra`` that it
    needs, and of one device ``memory`` in bytes, ``bandwidth`` in bytes/s, ``peak_bf16`` in FLOP/s.
    """
    return [
        {
            "target": f"{kind}:{8 if figures['platform'] == 'cuda' else figures['default']}",
            "kind": kind,
            "platform": figures["platform"],
            "memory": figures["memory"],
            "bandwidth": figures["bandwidth"],
            "peak_bf16": figures["peak"]["bfloat16"],
            "extra": EXTRAS[figures["platform"]],
            "source": figures["source"],
        }
        for kind, figures in known_targets().items()
    ]


def targets_text() -> str:
    """The answer to ``--list-targets``."""
    lines = ["auto: the attached devices", ""]
    head = ("target", "memory", "bandwidth", "bf16 peak", "needs", "figures from")
    rows: list[tuple[str, ...]] = [head]
    for row in list_targets():
        rows.append(
            (
                row["target"],
                f"{row['memory'] / 1e9:.0f} GB",
                f"{row['bandwidth'] / 1e12:.2f} TB/s",
                f"{row['peak_bf16'] / 1e12:.0f} TFLOP/s",
                install_command(row["platform"]),
                row["source"],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    for row in rows:
        lines.append("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    return "\n".join(lines) + "\n"
