"""What the suites for absent GPUs and TPUs share: run a child, or a crash program, without them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlm_recipe.guard.catalogue import load_catalogue
from mlm_recipe.guard.classify import HostFacts, classify
from mlm_recipe.guard.supervise import Limits, supervise
from mlm_recipe.guard.types import ChildExit, Failure

TESTS = Path(__file__).parent
CRASHES = TESTS / "crashes"
GIB = 2**30


def environment(**extra: str) -> dict[str, str]:
    """Without the suite's own flags."""
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return {
        **inherited,
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        **extra,
    }


def run_child(directory: Path, **spec: Any) -> tuple[int, dict[str, Any], str]:
    """Exit code, result and log of one preflight child."""
    content = {"entry": f"{TESTS / 'aot_entry.py'}:build", "directory": str(directory), **spec}
    (directory / "spec.json").write_text(json.dumps(content))
    done = subprocess.run(
        [sys.executable, "-m", "mlm_recipe.preflight", "--spec", directory / "spec.json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (directory / "result.json").exists(), done.stdout
    return done.returncode, json.loads((directory / "result.json").read_text()), done.stdout


def run_crash(program: str, tmp_path: Path, **extra: str) -> tuple[ChildExit, Failure | None]:
    """A program of ``crashes`` under supervision, and what is made of its end."""
    host = HostFacts.now()
    ended = supervise(
        [sys.executable, str(CRASHES / f"{program}.py")],
        env=environment(**extra),
        log_path=tmp_path / "log.txt",
        limits=Limits(seconds=300),
    )
    failure = classify(ended, load_catalogue(), host=host) if ended.returncode else None
    return ended, failure
