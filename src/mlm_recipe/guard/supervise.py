"""Runs a command under deadlines and a memory ceiling, and leaves nothing of it behind.

The command runs below ``shim.py``: killing the supervisor, by SIGKILL too, ends the whole tree.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mlm_recipe.guard.processes import catches, descendants, memory, send
from mlm_recipe.guard.status import read_phase
from mlm_recipe.guard.types import ChildExit

HEAD_BYTES = 32 * 1024
TAIL_BYTES = 64 * 1024
_SHIM = Path(__file__).with_name("shim.py")
_FRAMES_SECONDS = 3.0
# Without these a silent crash says nothing, and a traceback hides where in jax it happened.
_TALKATIVE = {"PYTHONFAULTHANDLER": "1", "JAX_TRACEBACK_FILTERING": "off"}


@dataclass(frozen=True)
class Limits:
    """When the supervisor ends its command."""

    seconds: float | None = None
    """For the whole command; None: no deadline."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase of the phase file -> seconds from the moment it was seen to be reached."""
    memory_bytes: int | None = None
    """Ceiling on the resident memory of all processes together; Linux only. None: no ceiling."""
    grace_seconds: float = 10.0
    """Between SIGTERM and SIGKILL."""


def supervise(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    log_path: Path,
    limits: Limits,
    phase_file: Path | None = None,
    stdin: int | IO[Any] = subprocess.DEVNULL,
) -> ChildExit:
    """Run a command to its end, or end it, with all its descendants.

    Blocks. A passed deadline ends it by SIGTERM and after ``grace_seconds`` by SIGKILL, a passed
    ceiling by SIGKILL at once. Before a deadline's SIGTERM, a command that can print its Python
    frames does: one whose phase file says ``"dumps_on_sigusr1": true`` gets SIGUSR1; any other that
    handles SIGABRT (faulthandler) but not SIGTERM gets SIGABRT, which costs it nothing.

    Args:
        command: looked up on the PATH of this process.
        env: the command's environment; faulthandler and whole jax tracebacks are switched on
            unless it says otherwise.
        cwd: its working directory.
        log_path: takes stdout and stderr; overwritten, its directory is made.
        limits: deadlines and ceiling.
        phase_file: written by the command (``guard.status``); an old one is removed.
        stdin: the command's; empty by default.

    Raises:
        KeyboardInterrupt: and anything else raised meanwhile, after the tree is ended.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    if phase_file is not None:
        phase_file.unlink(missing_ok=True)
    started = time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), *command],
            env=_TALKATIVE | dict(env),
            cwd=cwd,
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    watch = _Watch(process, limits, log_path, phase_file, started)
    try:
        watch.until_it_ends()
    except BaseException:
        watch.end()
        raise
    finally:
        watch.kill()
    return watch.exit(tuple(command))


@dataclass
class _Watch:
    """A running command."""

    process: subprocess.Popen[bytes]
    limits: Limits
    log_path: Path
    phase_file: Path | None
    started: float
    phase: str | None = None
    phase_since: float = 0.0
    peak: int = 0
    timed_out: bool = False
    over_memory: bool = False

    def until_it_ends(self) -> None:
        """Look at phase, clock and memory until it ends, or end it."""
        while not self._ended(within=0.05 if time.monotonic() - self.started < 2 else 0.2):
            self._read_phase()
            now, highest = memory(descendants(self.process.pid))
            self.peak = max(self.peak, highest)
            ceiling = self.limits.memory_bytes
            if ceiling is not None and now > ceiling:
                self.over_memory = True
                self.kill()
            elif self._is_late():
                self.timed_out = True
                self._print_frames()
                self.end()

    def _ended(self, within: float) -> bool:
        try:
            self.process.wait(timeout=max(within, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read_phase(self) -> None:
        phase = read_phase(self.phase_file)[0] if self.phase_file else None
        if phase != self.phase:
            self.phase, self.phase_since = phase, time.monotonic()

    def _is_late(self) -> bool:
        now = time.monotonic()
        whole = self.limits.seconds
        part = self.limits.phase_seconds.get(self.phase) if self.phase else None
        return (whole is not None and now - self.started > whole) or (
            part is not None and now - self.phase_since > part
        )

    def _print_frames(self) -> None:
        living = descendants(self.process.pid)
        asked = self._pid_that_dumps()
        if asked in living:
            size = self.log_path.stat().st_size
            send(asked, signal.SIGUSR1)
            deadline = time.monotonic() + _FRAMES_SECONDS
            while time.monotonic() < deadline and self.log_path.stat().st_size == size:
                if self._ended(within=0.05):
                    return
            self._ended(within=0.1)  # the rest of the dump
            return
        asked = [
            pid
            for pid in living
            if catches(pid, signal.SIGABRT) and not catches(pid, signal.SIGTERM)
        ]
        for pid in asked:  # one after another, lest their frames mix; in bounded time
            send(pid, signal.SIGABRT)
            self._ended(within=min(0.1, _FRAMES_SECONDS / len(asked)))
        if asked:
            self._ended(within=_FRAMES_SECONDS)

    def _pid_that_dumps(self) -> int:
        """From the phase file; 0 without the promise."""
        try:
            assert self.phase_file is not None
            content = json.loads(self.phase_file.read_text(encoding="utf-8"))
            return int(content["pid"]) if content["dumps_on_sigusr1"] is True else 0
        except (AssertionError, OSError, ValueError, KeyError, TypeError):
            return 0

    def end(self) -> None:
        """SIGTERM, grace, SIGKILL."""
        living = descendants(self.process.pid)
        for pid in living:
            send(pid, signal.SIGTERM)
        if not living and self.process.poll() is None:  # no /proc; the shim lets it pass
            self._signal_group(signal.SIGTERM)
        self._ended(within=self.limits.grace_seconds)
        self.kill()

    def kill(self) -> None:
        """SIGKILL for all; the shim last, so that orphans stay findable."""
        deadline = time.monotonic() + 5
        while self.process.poll() is None and time.monotonic() < deadline:
            living = descendants(self.process.pid)
            if not living:
                break
            for pid in living:
                send(pid, signal.SIGKILL)
            self._ended(within=0.1)
        if not self._ended(within=1.5):
            self._signal_group(signal.SIGKILL)
            self.process.wait()

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def exit(self, command: tuple[str, ...]) -> ChildExit:
        """What there is to say once it has ended."""
        seconds = time.monotonic() - self.started
        phase, reached = read_phase(self.phase_file) if self.phase_file else (None, {})
        head, tail = read_ends(self.log_path)
        return ChildExit(
            command=command,
            returncode=self.process.returncode,
            phase=phase,
            seconds=seconds,
            timed_out=self.timed_out,
            over_memory=self.over_memory,
            peak_rss=self.peak,
            log_path=str(self.log_path),
            log_head=head,
            log_tail=tail,
            phase_seconds=reached,
        )


def read_ends(path: Path) -> tuple[str, str]:
    """First 32 KiB and last 64 KiB of a log; of a short one both hold the same."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - TAIL_BYTES, 0))
            tail = file.read(TAIL_BYTES)
    except OSError:
        return "", ""
    return head.decode("utf-8", "replace"), tail.decode("utf-8", "replace")
