"""Stands between the supervisor and its command, so that nothing of the command outlives either.

    python -I -S shim.py SUPERVISOR_PID COMMAND...

Sets the core limit to zero, runs the command, and ends as the command ended, signal for signal.
On Linux it also adopts the command's orphans and ends them with the command, and ends them all when
the supervisor dies, by SIGKILL too. It starts in a few hundredths of a second: no site, no package.
"""

import os
import resource
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SWEEP_SECONDS = 1.0


def main(argv: list[str]) -> None:
    """Never returns."""
    supervisor, command = int(argv[0]), argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    def on_signal(number: int, frame: object) -> None:
        # The supervisor signals the command itself; what concerns the shim is being an orphan.
        if os.getppid() != supervisor:
            _sweep(patience=0.0)
            os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:  # it went before the kernel knew
        os._exit(1)
    own = os.getpid()
    child = os.fork()  # single-threaded, and it execs: the kind of fork that is safe
    if child == 0:
        _become(command, own)
    status = _wait_for(child)
    _sweep(patience=_SWEEP_SECONDS)
    _end_like(os.waitstatus_to_exitcode(status))


def _become(command: list[str], shim: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != shim:
        os._exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, os.fsencode(f"{command[0]}: command cannot be run: {error.strerror}\n"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _wait_for(child: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)  # adopted orphans end here too
        if pid == child:
            return status


def _sweep(patience: float) -> None:
    """End what the command left behind: SIGTERM, ``patience`` seconds, SIGKILL."""
    deadline = time.monotonic() + patience
    number = signal.SIGTERM if patience else signal.SIGKILL
    while left := descendants(os.getpid()):
        if time.monotonic() >= deadline:
            number = signal.SIGKILL
        for pid in left:
            send(pid, number)
        if time.monotonic() > deadline + 5:  # in an uninterruptible sleep; it dies when it wakes
            return
        time.sleep(0.02)
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _end_like(code: int) -> None:
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1)
        code = 128 - code
    os._exit(code)


def send(pid: int, number: int) -> None:
    """Signal a process that may be gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def descendants(root: int) -> list[int]:
    """Living processes below ``root``, the nearest first; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            parent = _living_parent(name)
            if parent is not None:
                children.setdefault(parent, []).append(int(name))
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def _living_parent(name: str) -> int | None:
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return None if state in (b"Z", b"X") else int(parent)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
