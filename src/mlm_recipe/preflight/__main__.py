"""The child program.

    python -m mlm_recipe.preflight --spec DIR/spec.json
    python -m mlm_recipe.preflight --entry pkg.mod:build [--target KIND] --directory DIR

Builds the entry's programs, audits, compiles, budgets and runs them, and leaves ``phase.json`` and
``result.json`` in the directory. It may die at any moment; whoever started it reads what it left.
``python -m mlm_recipe.guard`` is that someone.
"""

import argparse
import sys
from pathlib import Path

from mlm_recipe.guard.prologue import prepare_to_die
from mlm_recipe.guard.status import Phase, PhaseFile
from mlm_recipe.preflight.spec import Spec


def main() -> int:
    """Returns 0 for a pass, 3 for a refusal written to ``result.json``."""
    parser = argparse.ArgumentParser(prog="python -m mlm_recipe.preflight", description=__doc__)
    parser.add_argument("--spec", type=Path, help="everything, as JSON")
    parser.add_argument("--entry", help="pkg.mod:build or path/file.py:build")
    parser.add_argument("--target", default="auto", help="attached devices, or e.g. h200:8")
    parser.add_argument("--directory", type=Path, help="where to write")
    parser.add_argument("--capture-target", type=Path, help="write the attached devices to a file")
    options = parser.parse_args()
    if options.capture_target is not None:
        return _capture(options.capture_target)
    if options.spec is not None:
        spec = Spec.read(options.spec)
    elif options.entry and options.directory:
        options.directory.mkdir(parents=True, exist_ok=True)
        spec = Spec(options.entry, options.directory, target=options.target)
    else:
        parser.error("give --spec, or --entry with --directory")
    phases = PhaseFile(spec.directory / "phase.json", dumps_on_sigusr1=True)
    prepare_to_die()
    phases.reach(Phase.START)
    import jax  # noqa: F401  after the first phase: a broken installation dies here

    phases.reach(Phase.JAX_IMPORTED)
    from mlm_recipe.preflight.child import run

    return run(spec, phases)


def _capture(path: Path) -> int:
    """0, or 31 (environment) where there is nothing to capture."""
    from mlm_recipe.preflight.capture import capture_target
    from mlm_recipe.preflight.targets import TargetUnavailableError

    try:
        sys.stdout.write(f"{capture_target(path)}\n")
    except TargetUnavailableError as error:
        sys.stderr.write(f"{error}\n")
        return 31
    return 0


if __name__ == "__main__":
    sys.exit(main())
