"""Found by Python at start-up when this folder is on ``PYTHONPATH``; see ``inject_fault.py``.

Wraps the phase file, so that a preflight child meets its fault right after it reached a phase.
"""

import json
import os
import sys
from pathlib import Path


def _spec():
    """The spec of this process, if it is a preflight child."""
    words = sys.orig_argv
    if "mlm_recipe.preflight" not in words or "--spec" not in words:
        return None
    return json.loads(Path(words[words.index("--spec") + 1]).read_text())


def _meet(fault):
    if fault == "abort":
        os.abort()
    if fault == "segv":
        os.kill(os.getpid(), 11)
    if fault == "hang":
        import time

        time.sleep(3600)
    if fault == "memory":
        held = []
        while True:
            held.append(b"x" * (64 << 20))
    if fault == "exception":
        raise RuntimeError("INTERNAL: injected")
    raise SystemExit(f"there is no fault {fault!r}")


def _install():
    fault, _, phase = os.environ.get("INJECT_FAULT", "").partition("@")
    spec = _spec() if fault else None
    if spec is None or spec["variant"] != os.environ.get("INJECT_INTO", "as_configured"):
        return
    from mlm_recipe.guard import status

    reach = status.PhaseFile.reach

    def reach_and_fail(self, reached, **details):
        reach(self, reached, **details)
        if str(reached) == phase:
            _meet(fault)

    setattr(status.PhaseFile, "reach", reach_and_fail)  # noqa: B010


_install()


def _die_while_training():
    """``INJECT_TRAINING=DEATH@DIR``: once, as soon as a checkpoint is committed below DIR."""
    import threading
    import time

    death, _, directory = os.environ.get("INJECT_TRAINING", "").partition("@")
    if not death or "mlm_recipe.run" not in sys.orig_argv:
        return
    done = Path(directory) / f"died-of-{death}"

    def watch():
        while not list(Path(directory).glob("**/checkpoints/step-*/metadata.json")):
            time.sleep(0.02)
        done.touch()
        if death.isdigit():
            os._exit(int(death))
        if death == "oom":
            sys.stderr.write(
                "F1201 10:00:00.000000 1 planted.cc:1] Check failed: status is OK "
                "(RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes)\n"
            )
            sys.stderr.flush()
        _meet("segv" if death == "segv" else "abort")

    if not done.exists():
        threading.Thread(target=watch, daemon=True).start()


_die_while_training()
