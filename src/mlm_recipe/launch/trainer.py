"""The training program as a child of the launcher.

It can be started early, to import while the preflight still works; it then waits, before it
touches any device, to be told its configuration or that it is not needed. It dies with the
launcher, and the launcher's signals are its own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mlm_recipe.guard.types import ChildExit
from mlm_recipe.launch.console import Console

# What jax and XLA read when a backend starts, not when jax is imported.
_READ_LATE = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_", "MLM_RECIPE_")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Trainer:
    """One training process.

    Args:
        environ: its environment.
        log: its console is appended to this file.
    """

    def __init__(self, environ: Mapping[str, str], log: Path):
        self._environ = dict(environ)
        self._console = Console(log)
        reading, self._control = os.pipe()
        self._command = (sys.executable, "-m", "mlm_recipe.run", "--control", str(reading))
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            env={**self._environ, "MLM_RECIPE_LAUNCHED_AT": repr(time.time())},
            stdin=subprocess.DEVNULL,
            stdout=self._console.stdout,
            stderr=self._console.stderr,
            pass_fds=(reading,),
            start_new_session=True,
        )
        os.close(reading)
        self._console.close_ends()

    def can_become(self, environ: Mapping[str, str]) -> bool:
        """Whether it can still train in this environment, though started in another."""
        names = self._environ.keys() | environ.keys()
        changed = {name for name in names if self._environ.get(name) != environ.get(name)}
        return all(name.startswith(_READ_LATE) for name in changed)

    def train(self, config_file: Path, environ: Mapping[str, str]) -> ChildExit:
        """Let it go, and wait for its end; signals that reach the launcher are passed on."""
        late = {name: value for name, value in environ.items() if name.startswith(_READ_LATE)}
        order = json.dumps({"config": str(config_file), "environ": late})
        try:
            os.write(self._control, order.encode() + b"\n")
        except BrokenPipeError:
            pass  # it died while it imported; its exit status says how
        os.close(self._control)
        with self._passing_signals_on():
            returncode = self._process.wait()
        tail = self._console.finish()
        return ChildExit(
            command=self._command,
            returncode=returncode,
            phase=None,
            seconds=time.monotonic() - self._started,
            log_path=str(self._console.log_path),
            log_tail=tail,
        )

    def dismiss(self) -> None:
        """It is not needed: end it."""
        os.close(self._control)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._console.finish()

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """The first asks it to end, which writes its summary; a second ends it."""
        asked = False

        def pass_on(number: int, frame: FrameType | None) -> None:
            nonlocal asked
            try:
                os.killpg(self._process.pid, signal.SIGKILL if asked else signal.SIGTERM)
            except ProcessLookupError:
                pass
            asked = True

        before = {number: signal.signal(number, pass_on) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
