"""The failure record: one JSON file that says how a command ended and what that means."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from mlm_recipe.guard.types import ChildExit, Failure

SCHEMA_VERSION = 1


def failure_record(exit: ChildExit, failure: Failure | None) -> dict[str, Any]:
    """JSON values. ``kind`` is null for a success, and then so is what only a failure has.

    ``signal`` is a name such as ``SIGABRT`` or null, ``exit_code`` null after a signal,
    ``seconds`` wall time, ``peak_rss`` bytes over all processes, ``log_head`` and ``log_tail`` the
    first 32 and last 64 KiB of output.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": failure.kind.value if failure else None,
        "signature": failure.signature if failure else None,
        "name": failure.name if failure else None,
        "phase": failure.phase if failure else exit.phase,
        "reason": failure.reason if failure else None,
        "message": failure.message if failure else None,
        "advice": failure.advice if failure else None,
        "remedies": list(failure.remedies) if failure else [],
        "refs": list(failure.refs) if failure else [],
        "flags": list(failure.flags) if failure else [],
        "last_pass": failure.last_pass if failure else None,
        "transient": failure.transient if failure else False,
        "ladder": failure.ladder if failure else False,
        "signal": signal_name(exit.signal),
        "exit_code": exit.returncode if exit.returncode >= 0 else None,
        "timed_out": exit.timed_out,
        "over_memory": exit.over_memory,
        "seconds": round(exit.seconds, 3),
        "peak_rss": exit.peak_rss,
        "phase_seconds": dict(exit.phase_seconds),
        "command": list(exit.command),
        "log_path": exit.log_path,
        "log_head": exit.log_head,
        "log_tail": exit.log_tail,
    }


def signal_name(number: int | None) -> str | None:
    """``SIGABRT`` for 6; None for None."""
    if number is None:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
