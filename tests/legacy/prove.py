"""Proves ``entries.py:levanter_727`` for one H100: ``prove.py DIRECTORY``, in jax 0.4.34.

The audit that refuses callbacks before the compiler sees them is set to warn: the compiler's death
and its cure are what is wanted here.
"""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from mlm_recipe.guard.children import Job
from mlm_recipe.guard.config import GuardConfig
from mlm_recipe.guard.entry import flags_only
from mlm_recipe.guard.prove import prove
from mlm_recipe.guard.variants import Context, load_variants
from mlm_recipe.guard.verdicts import VerdictMemory


def main() -> None:
    """Prints what the guard found, as JSON."""
    directory = Path(sys.argv[1])
    config = GuardConfig()
    config = replace(config, audits=replace(config.audits, host_callbacks="warn"))
    environ = dict(os.environ)
    entry = f"{Path(__file__).with_name('entries.py')}:levanter_727"
    report = prove(
        Job(entry, lambda variant: {}, "h100", environ, directory),
        config=config,
        variants=flags_only(load_variants()),
        context=Context(platform="cuda", devices=1, environ=environ),
        memory=VerdictMemory(directory / "verdicts", force=True),
        key=lambda variant: variant.name,
    )
    print(json.dumps(asdict(report), default=str))


if __name__ == "__main__":
    main()
