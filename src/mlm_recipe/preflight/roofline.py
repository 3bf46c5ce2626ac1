"""The time that a step cannot beat (Williams et al. 2009)."""

from typing import Any

from mlm_recipe.preflight.targets import Target


def roofline_seconds(
    flops: float | None, memory: dict[str, Any], precision: str | None, target: Target
) -> float | None:
    """Seconds per step: the longer of arithmetic at peak and of reading the state once.

    Args:
        flops: of the step over all devices.
        memory: from `memory_verdict`; arguments are read and outputs written at least once.
        precision: compute dtype.
        target: gives peak and bandwidth; None comes back where they are not known.
    """
    peak = target.peak(precision or "float32")
    if flops is None or peak is None or target.bandwidth is None:
        return None
    arithmetic = flops / len(target.devices) / peak
    traffic = ((memory["arguments"] or 0) + (memory["outputs"] or 0)) / target.bandwidth
    return max(arithmetic, traffic)
