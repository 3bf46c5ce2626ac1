"""What /proc says about a tree of processes. Without /proc, as on macOS, it says nothing."""

import signal
from pathlib import Path

from mlm_recipe.guard.shim import descendants, send

__all__ = ["catches", "descendants", "memory", "send"]


def memory(pids: list[int]) -> tuple[int, int]:
    """Resident bytes of all processes together, now, and the highest of any one, ever.

    Pages that processes share are counted in each.
    """
    now, highest = 0, 0
    for pid in pids:
        status = _status(pid)
        now += _kibibytes(status, "VmRSS")
        highest = max(highest, _kibibytes(status, "VmHWM"))
    return now, max(now, highest)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own for the signal."""
    mask = int(_status(pid).get("SigCgt", "0"), 16)
    return bool(mask >> (number - 1) & 1)


def _kibibytes(status: dict[str, str], field: str) -> int:
    words = status.get(field, "0").split()
    return int(words[0]) * 1024 if words else 0


def _status(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in lines}
