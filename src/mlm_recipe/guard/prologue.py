"""What a process that expects to die does first."""

import ctypes
import faulthandler
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def prepare_to_die() -> None:
    """No core dump; Python frames on a fatal signal and on SIGUSR1; die with the parent."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with_parent()


def die_with_parent() -> None:
    """Linux: SIGKILL this process when its parent is gone. Elsewhere nothing."""
    parent = os.getppid()
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before the kernel knew
        os._exit(1)
