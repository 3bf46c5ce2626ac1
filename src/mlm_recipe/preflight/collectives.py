"""What a compiled program says over the network, read from its HLO text; and XLA's warnings."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_OPS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<shape>.*?) "
    r"(?P<op>all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(?P<half>-start|-done)?\("
)
_ROOT = re.compile(r"^\s*ROOT %?[\w.\-]+ = (?P<shape>.*?) [a-z][\w\-]*\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*|token)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_WHILE = re.compile(r"\bwhile\(.*?\bcondition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations)=(?:\{([^}]*)\}|%?([\w.\-]+))"
)
_SECOND_HALF = re.compile(r" [\w\-]+-(?:done|update)\(")
_TRIPS = re.compile(r'known_trip_count"?:?\s*\{"?n"?:\s*"?(\d+)')
_BOUND = re.compile(r" = [su]\d+\[\]\S* constant\((\d+)\)")
_BELOW = re.compile(r"^\s*ROOT .* compare\(.*direction=LT")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")

_BITS = {"pred": 8, "token": 0}


def shape_bytes(shape: str) -> int:
    """Bytes of an HLO shape, the parts of a tuple together: ``(f32[8,4]{1,0}, bf16[2])`` is 132."""
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        count = 1
        for size in filter(None, dims.split(",")):
            count *= int(size)
        total += -(-count * _bits(dtype) // 8)
    return total


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+?(\d+)", dtype)
    return int(found.group(1)) if found else 0


@dataclass
class _Computation:
    """One of the module's functions."""

    lines: list[str] = field(default_factory=list)
    callers: list[tuple[str, int | None, str]] = field(default_factory=list)
    """Name of a caller, how often it calls, None for a loop that does not say, its condition."""

    def bound(self) -> int | None:
        """N, where this is the condition ``i < N`` of a loop."""
        numbers = [int(found[1]) for line in self.lines if (found := _BOUND.search(line))]
        below = any(_BELOW.match(line) for line in self.lines)
        return numbers[0] if below and len(numbers) == 1 else None


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """Count and bytes per device and step, by operation.

    Bytes are those of the result. A collective in a loop counts as often as the loop is known to
    run. Where the text does not tell (libtpu's never does), a loop ``while i < N`` is taken to run
    N times, as ``lax.scan`` does, any other once, and ``in_unknown_loops`` says how many
    collectives that concerns. Both branches of a conditional count. An asynchronous pair counts
    once, at its end, whose shape is the result alone; so does a TPU's, spread over fusions.

    Args:
        hlo: ``compiled.as_text()``.
    """
    module = _parse(hlo)
    spread = {
        channel.group(1)
        for computation in module.values()
        if _starts_async(computation)
        for line in computation.lines
        if _LINE.match(line) and (channel := _CHANNEL.search(line))
    }
    repeats: dict[str, tuple[int, bool]] = {}
    found: dict[str, dict[str, int]] = {op: {"count": 0, "bytes": 0} for op in _OPS}
    for name, computation in module.items():
        for line in computation.lines:
            match = _LINE.match(line)
            if match is None or match["half"] == "-start":
                continue
            channel = _CHANNEL.search(line)
            if channel and channel.group(1) in spread and not _starts_async(computation):
                continue
            op, shape = _meaning(name, computation, match)
            times, known = _repeats(module, name, repeats)
            entry = found.setdefault(op, {"count": 0, "bytes": 0})
            entry["count"] += times
            entry["bytes"] += times * shape_bytes(shape)
            if not known:
                entry["in_unknown_loops"] = entry.get("in_unknown_loops", 0) + 1
    return found


def _starts_async(computation: _Computation) -> bool:
    return any('custom_call_target="AsyncCollectiveStart"' in line for line in computation.lines)


def _meaning(name: str, computation: _Computation, match: re.Match[str]) -> tuple[str, str]:
    """Operation and result: a TPU writes a reduce-scatter as a fusion of all-reduce and slice."""
    if match["op"] == "all-reduce" and name.startswith("all-reduce-scatter"):
        for line in computation.lines:
            if root := _ROOT.match(line):
                return "reduce-scatter", root["shape"]
    return match["op"], match["shape"]


def _parse(hlo: str) -> dict[str, _Computation]:
    module: dict[str, _Computation] = {}
    name = ""
    for line in hlo.splitlines():
        head = _COMPUTATION.match(line)
        if head is not None and " = " not in line.split("{")[0]:
            name = head.group(1)
            module.setdefault(name, _Computation())
            continue
        module.setdefault(name, _Computation()).lines.append(line)
        if _SECOND_HALF.search(line):
            continue  # its first half made the call
        loop, trips = _WHILE.search(line), _TRIPS.search(line)
        condition, body = loop.groups() if loop else ("", None)
        for several, one in _CALLS.findall(line):
            for callee in re.findall(r"[\w.\-]+", several or one):
                times = (int(trips.group(1)) if trips else None) if callee == body else 1
                module.setdefault(callee, _Computation()).callers.append((name, times, condition))
    return module


def _repeats(
    module: dict[str, _Computation], name: str, known: dict[str, tuple[int, bool]]
) -> tuple[int, bool]:
    """How often a computation runs in one step, at least once, and whether that is certain."""
    if name not in known:
        known[name] = (1, True)  # HLO has no recursion; a malformed text ends here
        total, certain = 0, True
        for caller, times, condition in module[name].callers:
            above, sure = _repeats(module, caller, known)
            total += above * (times or module[condition].bound() or 1)
            certain = certain and sure and times is not None
        known[name] = (max(total, 1), certain)
    return known[name]


def rematerialization_warnings(log: str) -> dict[str, Any]:
    """``{"count", "operations"}`` of the partitioner's warnings in a log."""
    count = len(re.findall(r"[Ii]nvoluntary full rematerialization", log))
    named = Counter(re.findall(r"[Ii]nvoluntary full rematerialization[^\n]*?(%[\w.\-]+)", log))
    return {"count": count, "operations": [name for name, _ in named.most_common(5)]}
