"""Run the launcher with a fault planted in its preflight child.

    uv run python scripts/inject_fault.py abort@compile_begin -- --config config/roberta_tiny.yaml

FAULT is abort, segv, hang, memory or exception; the phase one of guard/status.py. Only the child of
the variant as configured meets it (or of --into NAME), so the run must end trained by another one.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

FAULTS = ("abort", "segv", "hang", "memory", "exception")


def fault_environment(fault: str, into: str = "as_configured") -> dict[str, str]:
    """The environment in which ``mlm_recipe.train`` meets ``fault`` (``abort@compile_begin``)."""
    site = Path(__file__).parent / "fault_site"
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "INJECT_FAULT": fault,
        "INJECT_INTO": into,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", help="e.g. segv@budgeted")
    parser.add_argument("--into", default="as_configured", help="the variant that meets it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="-- of mlm_recipe.train")
    options = parser.parse_args()
    fault, _, phase = options.fault.partition("@")
    if fault not in FAULTS or not phase:
        parser.error(f"write FAULT@PHASE with FAULT one of {', '.join(FAULTS)}")
    words = [word for word in options.arguments if word != "--"]
    command = [sys.executable, "-m", "mlm_recipe.train", *words]
    return subprocess.run(
        command, env=fault_environment(options.fault, options.into), check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
