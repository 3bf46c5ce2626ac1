"""What a log says about a death: the fatal line, the exception, the frames. Knows no kinds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlm_recipe.guard.frames import Frame, read_dumps, read_frame
from mlm_recipe.guard.types import ChildExit

_LOG_LINE = re.compile(r"^(?:[IWEF]\d{4} [\d:.]+\s+\d+ |\d{4}-\d\d-\d\d [\d:.]+: [IWEF] )\S+:\d+\]")
_FATAL = re.compile(r"(?:^|\s)(?:F\d{4} [\d:.]+\s+\d+|[\d-]+ [\d:.]+: F) (\S+?):\d+\] ?(.*)$")
_LOOSE = (
    ("absl", re.compile(r"^(?:ERROR: )?(Unknown command.?line flag.*)")),
    ("LLVM", re.compile(r"^LLVM ERROR: (.*)")),
    ("C++", re.compile(r"^terminate called (?:after throwing an instance of )?(.*)")),
    ("C", re.compile(r"^\S+: (?:\S+/)?(\S+\.\w+:\d+: .*Assertion .* failed.*)")),
    ("C", re.compile(r"^(double free or corruption.*|free\(\): .*|malloc\w*\(\): .*)")),
    (
        "C",
        re.compile(r"^(corrupted size .*|munmap_chunk\(\): .*|realloc\(\): .*|.*stack smashing.*)"),
    ),
    ("Rust", re.compile(r"^thread '.*' (?:\(\d+\) )?panicked at (.*)")),
)
_FAULT = re.compile(r"^Fatal Python error: (.*)$")
TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_END_OF_MESSAGE = (
    "-----",
    "Exception ignored in",
    "=== Source",
    "Extension modules:",
    "Fatal Python error:",
)
_END_OF_MESSAGE += (
    "The above exception was",
    "During handling of the above",
    "The preceding stack",
)
_CHAINED = ("The above exception was", "During handling of the above")
_NATIVE = re.compile(r"^\s+@\s+0x[0-9a-f]+\s+(.*)$")
_PASS = re.compile(r"hlo_pass_pipeline\.cc:\d+\]\s+HLO pass ([\w.-]+)\s*$")
_PICK = re.compile(r"LLVM ERROR|\] (?:Check failed|HLO pass)|: F |^F\d{4} |^Fatal Python|what\(\):")
_MAX_LINES = 60


@dataclass(frozen=True)
class Fatal:
    """A line with which native code ended the process."""

    source: str
    """Base name of the file, or ``LLVM``, ``C++``, ``C``, ``Rust``."""
    message: str


@dataclass(frozen=True)
class Raised:
    """A Python exception."""

    type: str
    """With its module, as printed."""
    message: str
    frames: tuple[Frame, ...]
    """Innermost first."""

    @property
    def name(self) -> str:
        """Of the class alone."""
        return self.type.rpartition(".")[2]


@dataclass(frozen=True)
class Evidence:
    """A log, read."""

    text: str
    fatal: Fatal | None
    raised: tuple[Raised, ...]
    """The exception that ended it, then what caused it."""
    fault: str
    """What faulthandler says, e.g. ``Segmentation fault``."""
    threads: tuple[tuple[Frame, ...], ...]
    native: tuple[str, ...]
    """Native stack frames, innermost first."""
    last_pass: str | None

    @property
    def decisive(self) -> str:
        """What catalogue patterns are matched against: not the chatter before the death."""
        parts = [f"{self.fatal.source}: {self.fatal.message}"] if self.fatal else []
        for raised in self.raised:
            parts += [f"{raised.type}: {raised.message}"]
            parts += [f"  {frame.place}" for frame in raised.frames]
        if self.fault:
            parts += [f"Fatal Python error: {self.fault}"]
            parts += [f"  {frame.place}" for frame in (self.threads[0] if self.threads else ())]
        return "\n".join([*parts, *(f"@ {name}" for name in self.native)])


def read_evidence(exit: ChildExit) -> Evidence:
    """Read head, tail, and of a longer log the telling lines in between."""
    text = _joined(exit)
    lines = text.splitlines()
    fault = next((m[1] for line in lines if (m := _FAULT.match(line))), "")
    passes = [m[1] for line in lines if (m := _PASS.search(line))]
    return Evidence(
        text=text,
        fatal=_fatal(lines),
        raised=_raised(lines),
        fault=fault,
        threads=read_dumps(lines),
        native=tuple(m[1] for line in lines if (m := _NATIVE.match(line)))[:60],
        last_pass=passes[-1] if passes else None,
    )


def _joined(exit: ChildExit) -> str:
    """Head and tail without their overlap, and what lies between."""
    head, tail = exit.log_head.encode(), exit.log_tail.encode()
    try:
        size = Path(exit.log_path).stat().st_size if exit.log_path else 0
    except OSError:
        size = 0
    if tail.startswith(head):
        return exit.log_tail
    shared = len(head) + len(tail) - size
    if size and shared >= 0:
        return (head[: len(head) - shared] + tail).decode("utf-8", "replace")
    between = _between(Path(exit.log_path), len(head), size - len(tail)) if size else []
    return "\n".join([exit.log_head, *between, exit.log_tail])


def _between(path: Path, start: int, end: int) -> list[str]:
    """Lines that may decide, of the part of a long log that was not kept."""
    found: list[str] = []
    try:
        with path.open("rb") as file:
            file.seek(start)
            while file.tell() < end and (raw := file.readline(65536)):
                line = raw.decode("utf-8", "replace").rstrip("\n")
                if _PICK.search(line):
                    found.append(line)
    except OSError:
        return []
    return [*found[:50], *found[-50:]] if len(found) > 100 else found


def _fatal(lines: Sequence[str]) -> Fatal | None:
    """The first: what follows it comes from other threads, or from dying."""
    for index, line in enumerate(lines):
        match = _FATAL.search(line)
        if match is not None:
            more = _continued(lines[index + 1 : index + 8])
            return Fatal(match[1].rpartition("/")[2], "\n".join([match[2].strip(), *more]).strip())
        for source, pattern in _LOOSE:
            match = pattern.match(line)
            if match is not None:
                more = [n.strip() for n in lines[index + 1 : index + 3] if "what():" in n]
                return Fatal(source, "\n".join([match[1].strip(), *more]))
    return None


def _continued(lines: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for line in lines:
        stop = line.startswith(("***", "usage:", "Fatal Python", "Traceback", "Current thread"))
        if stop or _LOG_LINE.match(line) or _NATIVE.match(line):
            break
        kept.append(line)
    return kept


def _raised(lines: Sequence[str]) -> tuple[Raised, ...]:
    """The last exception that was not ignored, and the chain before it."""
    chains: list[list[Raised]] = []
    linked, ignored = False, False
    index = 0
    while index < len(lines):
        line = lines[index]
        if line.startswith(_CHAINED):
            linked = True
        elif line.startswith(("Exception ignored in", "Exception in thread")):
            ignored = True
        elif line.endswith(TRACEBACK) and not line[0].isspace():
            found, index = _one(lines, index + 1)
            if found is not None and not ignored:
                if linked and chains:
                    chains[-1].insert(0, found)
                else:
                    chains.append([found])
            linked = ignored = False
            continue
        index += 1
    return tuple(chains[-1]) if chains else ()


def _one(lines: Sequence[str], index: int) -> tuple[Raised | None, int]:
    """The exception whose traceback starts at ``index``, and where reading goes on."""
    frames: list[Frame] = []
    while index < len(lines) and (not lines[index] or lines[index][0] in " \t|"):
        frame = read_frame(lines[index])
        if frame is not None:
            frames.insert(0, frame)
        index += 1
    match = _RAISED.match(lines[index]) if index < len(lines) else None
    if match is None:
        return None, index
    message = [match[2] or ""]
    for line in lines[index + 1 : index + _MAX_LINES]:
        ended = line.startswith((*_END_OF_MESSAGE, TRACEBACK)) or _LOG_LINE.match(line)
        if ended:
            break
        message.append(line)
    return Raised(match[1], "\n".join(message).strip(), tuple(frames)), index + len(message)
