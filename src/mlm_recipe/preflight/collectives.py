"""What a compiled program says over the network, read from its HLO text; and XLA's warnings."""

import re
from collections import Counter
from typing import Any

_OPS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<shape>.*?) "
    r"(?P<op>all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*|token)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_WHILE = re.compile(r"\bwhile\(.*?\bbody=%?([\w.\-]+)")
_CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations)=\{?%?([\w.\-, %]+)\}?"
)
_TRIPS = re.compile(r'known_trip_count"?:?\s*\{"?n"?:\s*"?(\d+)')

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


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """Count and bytes per device and step, by operation.

    A collective in a loop counts as often as the loop is known to run; in a loop of unknown length
    once. Bytes are those of the result; of an asynchronous pair, the start counts, its result
    without the operands that it carries along.

    Args:
        hlo: ``compiled.as_text()``.
    """
    repeats = _repeats(hlo)
    found: dict[str, dict[str, int]] = {op: {"count": 0, "bytes": 0} for op in _OPS}
    for name, line in _lines(hlo):
        match = _LINE.match(line)
        if match is None:
            continue
        times = repeats.get(name, 1)
        entry = found.setdefault(match["op"], {"count": 0, "bytes": 0})
        entry["count"] += times
        entry["bytes"] += times * _result_bytes(match["shape"], match["op"], bool(match["start"]))
    return found


def _result_bytes(shape: str, op: str, start: bool) -> int:
    total = shape_bytes(shape)
    if not start or not shape.startswith("("):
        return total
    if op == "all-reduce":
        return total  # its start carries no operands
    parts = [shape_bytes(f"{dtype}[{dims}]") for dtype, dims in _ARRAY.findall(shape)]
    half = len(parts) // 2  # operands, results, and perhaps contexts of a word each
    return sum(parts[half : 2 * half]) if half else total


def _lines(hlo: str) -> list[tuple[str, str]]:
    """Each line with the name of the computation it stands in."""
    name, lines = "", []
    for line in hlo.splitlines():
        head = _COMPUTATION.match(line)
        if head is not None and " = " not in line.split("{")[0]:
            name = head.group(1)
        else:
            lines.append((name, line))
    return lines


def _repeats(hlo: str) -> dict[str, int]:
    """How often each computation runs in one step."""
    callers: dict[str, list[tuple[str, int]]] = {}
    for name, line in _lines(hlo):
        loop, trips = _WHILE.search(line), _TRIPS.search(line)
        body = loop.group(1) if loop else None
        for listed in _CALLS.findall(line):
            for callee in re.findall(r"[\w.\-]+", listed):
                times = int(trips.group(1)) if callee == body and trips else 1
                callers.setdefault(callee, []).append((name, times))
    known: dict[str, int] = {}

    def count(name: str, above: frozenset[str]) -> int:
        if name not in known:
            calls = [(c, t) for c, t in callers.get(name, []) if c not in above]
            times = [t * count(caller, above | {name}) for caller, t in calls]
            known[name] = max(sum(times), 1) if times else 1
        return known[name]

    return {name: count(name, frozenset()) for name in callers}


def rematerialization_warnings(log: str) -> dict[str, Any]:
    """``{"count", "operations"}`` of the partitioner's warnings in a log."""
    count = len(re.findall(r"[Ii]nvoluntary full rematerialization", log))
    named = Counter(re.findall(r"[Ii]nvoluntary full rematerialization[^\n]*?(%[\w.\-]+)", log))
    return {"count": count, "operations": [name for name, _ in named.most_common(5)]}
