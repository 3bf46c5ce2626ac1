"""Memory of the machine, and whether its kernel has been killing for want of it."""

import os
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostFacts:
    """Taken before a child starts, so that what happened meanwhile can be told."""

    memory_bytes: int | None
    """The smaller of RAM and the control group's limit; None where neither can be read."""
    oom_kills: int | None
    """Processes that the kernel has killed so far for want of memory, here."""

    @classmethod
    def now(cls) -> "HostFacts":
        """Linux; elsewhere only the RAM."""
        known = [value for value in (_ram(), _limit()) if value]
        return cls(min(known, default=None), _oom_kills())


def _ram() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _groups() -> list[Path]:
    """The control group of this process and those around it, version 2."""
    text = _read(Path("/proc/self/cgroup"))
    own = next((line[3:] for line in text.splitlines() if line.startswith("0::")), "/")
    path = _CGROUPS / own.strip().lstrip("/")
    return [path, *(p for p in path.parents if p == _CGROUPS or _CGROUPS in p.parents)]


def _limit() -> int | None:
    texts = [_read(group / "memory.max") for group in _groups()]
    texts.append(_read(_CGROUPS / "memory/memory.limit_in_bytes"))  # version 1
    limits = [int(text) for text in map(str.strip, texts) if text.isdigit()]
    return min(limits, default=None)


def _oom_kills() -> int | None:
    files = [group / "memory.events" for group in _groups()]
    for path in (*files, _CGROUPS / "memory/memory.oom_control", Path("/proc/vmstat")):
        for line in _read(path).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdigit():
                return int(value)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
