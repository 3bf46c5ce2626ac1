"""The report for people: one table of targets, one of attempts, and what was not proved."""

import sys
from collections.abc import Mapping
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table

from mlm_recipe.guard.report import GIB, Report, TargetReport, largest_memory

_STYLES = {"ok": "green", "warn": "yellow", "fallback": "yellow", "failed": "red"}
_PIPED_WIDTH = 100


def print_report(report: Report, file: IO[str] | None = None) -> None:
    """Print it; without colour where ``file`` (stderr by default) is no terminal."""
    stream: IO[str] = sys.stderr if file is None else file
    terminal = stream.isatty()
    console = Console(
        file=stream,
        width=None if terminal else _PIPED_WIDTH,
        force_terminal=terminal,
        no_color=not terminal,
        highlight=False,
    )
    console.print(_targets(report))
    if any(len(target.attempts) > 1 or target.failure for target in report.targets):
        console.print(_attempts(report))
    for target in report.targets:
        for line in _notes(target):
            console.print(line, markup=False, soft_wrap=True)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _targets(report: Report) -> Table:
    table = _table("preflight")
    for name in ("target", "verdict"):
        table.add_column(name, overflow="fold")
    for name in ("memory", "step", "collectives", "compile"):
        table.add_column(name, justify="right", overflow="fold")
    for target in report.targets:
        style = _STYLES.get(target.verdict, "")
        table.add_row(
            str(target.target.get("name", "auto")),
            f"[{style}]{target.verdict}[/]\n{_variant(target)}" if style else target.verdict,
            _memory(target),
            _roofline(target.programs),
            _collectives(target.programs),
            _compile(target.programs),
        )
    return table


def _variant(target: TargetReport) -> str:
    """One part of a combination a line."""
    return target.variant["name"].replace("+", " +\n") if target.variant else "no variant holds"


def _memory(target: TargetReport) -> str:
    memory = largest_memory(target)
    if not memory.get("need"):
        return "-"
    if not memory.get("budget"):
        return f"{memory['need'] / GIB:.2f} GiB"
    fraction = memory.get("fraction") or memory["need"] / memory["budget"]
    have = memory["budget"] / GIB
    return f"{memory['need'] / GIB:.2f} GiB\n{100 * fraction:.1f} % of {have:.1f}"


def _roofline(programs: tuple[Mapping[str, Any], ...]) -> str:
    flops = max((p.get("flops") or 0 for p in programs), default=0)
    seconds = max((p.get("roofline_seconds") or 0 for p in programs), default=0)
    lines = [f"{flops / 1e12:.3g} TFLOP"] if flops else []
    lines += [f"{1e3 * seconds:.3g} ms"] if seconds else []
    return "\n".join(lines) or "-"


def _collectives(programs: tuple[Mapping[str, Any], ...]) -> str:
    found = max(
        (p.get("collectives") or {} for p in programs),
        key=lambda each: sum(entry["bytes"] for entry in each.values()),
        default={},
    )
    lines = [f"{e['count']:g} {name} {size(e['bytes'])}" for name, e in found.items() if e["count"]]
    return "\n".join(lines) or ("none" if programs else "-")


def size(count: float) -> str:
    """Bytes for people: ``512 B``, ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def _compile(programs: tuple[Mapping[str, Any], ...]) -> str:
    seconds = [p["compile_seconds"] for p in programs if p.get("compile_seconds") is not None]
    if not seconds:
        return "-"
    cached = all(p.get("cache_hit") for p in programs)
    return f"{sum(seconds):.1f} s" + ("\ncached" if cached else "")


def _attempts(report: Report) -> Table:
    table = _table("attempts")
    several = len(report.targets) > 1
    for name in (["target"] if several else []) + ["variant", "why tried", "end"]:
        table.add_column(name, overflow="fold")
    table.add_column("s", justify="right")
    for target in report.targets:
        for attempt in target.attempts:
            failure = attempt.failure or {}
            end = attempt.verdict
            if failure:
                end = f"{failure['kind']}: {failure['signature'] or failure['message']}"
            row = [attempt.variant, attempt.role, end, f"{attempt.seconds:.1f}"]
            name = [str(target.target.get("name", "auto"))] if several else []
            table.add_row(*(_plain(cell) for cell in name + row))
    return table


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _notes(target: TargetReport) -> list[str]:
    """What stands under the tables, in plain words."""
    name = target.target.get("name", "auto")
    lines = []
    if target.failure:
        text = target.failure["message"] or target.failure["signature"]
        lines += [f"{name}: {target.failure['kind']}: {text}"]
        lines += [f"  fix: {target.failure['advice']}"] if target.failure["advice"] else []
    if target.dropped_flags:
        lines.append(f"{name}: left out of XLA_FLAGS: {', '.join(target.dropped_flags)}")
    if target.variant and target.variant["cost"] and target.verdict == "fallback":
        lines.append(f"{name}: price of {target.variant['name']}: {target.variant['cost']}")
    if target.stopped_by:
        lines.append(f"{name}: stopped by guard.max_{target.stopped_by}")
    for program in target.programs:
        for audit in program.get("audits", ()):
            if audit["verdict"] != "ok":
                where = f" ({audit['where']})" if audit.get("where") else ""
                lines.append(f"{name}: {program['name']}: {audit['message']}{where}")
    lines += _layouts(name, target)
    lines += [f"{name}: not proved: {text}" for text in target.target.get("not_proved") or ()]
    lines += [f"{name}: reproducer: {a.bundle}" for a in target.attempts if a.bundle]
    return list(dict.fromkeys(lines))


def _layouts(name: str, target: TargetReport) -> list[str]:
    """What an exporter should know of a TPU's parameters."""
    layouts = next((p["layouts"] for p in target.programs if p.get("layouts")), [])
    padded = sum(bool(leaf["padded"]) for leaf in layouts)
    permuted = sum(bool(leaf["permuted"]) for leaf in layouts)
    if not padded and not permuted:
        return []
    return [
        f"{name}: for the exporter: of {len(layouts)} leaves {padded} are padded to "
        f"tiles and {permuted} permuted on the device (programs[].layouts)"
    ]
