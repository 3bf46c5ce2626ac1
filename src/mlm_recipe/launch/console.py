"""A child's console: passed through to ours byte by byte, kept in a log, and its end in memory.

Where ours is a terminal the child gets one too, so that progress bars stay what they are.
"""

import fcntl
import os
import sys
import termios
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO

_KEEP = 64 * 1024


class Console:
    """Give its two ends to a process, then `close_ends`, and `finish` when the process ended."""

    def __init__(self, log: Path):
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log.open("ab", buffering=0)
        self.log_path = log
        self._tail: deque[bytes] = deque()
        self._kept = 0
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ends: list[int] = []
        self.stdout = self._open(sys.stdout.buffer)
        self.stderr = self._open(sys.stderr.buffer)

    def _open(self, ours: BinaryIO) -> int:
        terminal = ours.isatty()
        reading, writing = os.openpty() if terminal else os.pipe()
        if terminal:
            size = fcntl.ioctl(ours.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(writing, termios.TIOCSWINSZ, size)
        thread = threading.Thread(target=self._copy, args=(reading, ours), daemon=True)
        thread.start()
        self._threads.append(thread)
        self._ends.append(writing)
        return writing

    def _copy(self, reading: int, ours: BinaryIO) -> None:
        with os.fdopen(reading, "rb", buffering=0) as source:
            while True:
                try:
                    part = source.read(65536)
                except OSError:  # EIO: how a terminal says that its other side is gone
                    return
                if not part:
                    return
                self._keep(part)
                try:
                    ours.write(part)
                    ours.flush()
                except (OSError, ValueError):
                    continue  # nobody listens to us; the log goes on

    def _keep(self, part: bytes) -> None:
        with self._lock:
            self._log.write(part)
            self._tail.append(part)
            self._kept += len(part)
            while self._kept - len(self._tail[0]) > _KEEP:
                self._kept -= len(self._tail.popleft())

    def close_ends(self) -> None:
        """Close our copies of what the child writes to, once it has them."""
        for end in self._ends:
            os.close(end)
        self._ends.clear()

    def finish(self, timeout: float = 5.0) -> str:
        """Wait for the last bytes; the end of both streams as text.

        Args:
            timeout: seconds to wait; a grandchild may hold the streams open.
        """
        for thread in self._threads:
            thread.join(timeout)
        with self._lock:
            return b"".join(self._tail).decode(errors="replace")
