"""Tells the trackers how the run was proved: ``guard/*``, a table of attempts, the report."""

import json
import os
from pathlib import Path
from typing import Any

import levanter.tracker
import wandb
from levanter.tracker.wandb import WandbTracker

from mlm_recipe.guard.report import attempts_rows, read_report, wandb_summary


def track_preflight() -> str:
    """Log the report that the launcher names in ``MLM_RECIPE_PREFLIGHT``, if it names one.

    Returns:
        The variant that trains; ``as_configured`` without a report.
    """
    path = os.environ.get("MLM_RECIPE_PREFLIGHT")
    if path is None:
        return "as_configured"
    report = read_report(Path(path))
    levanter.tracker.log_summary({**wandb_summary(report), **_deaths(Path(path).parent)})
    levanter.tracker.current_tracker().log_artifact(path, name="preflight", type="guard")
    columns, rows = attempts_rows(report)
    try:
        run = levanter.tracker.get_tracker("wandb")
    except KeyError:
        run = None  # tables are W&B's
    if isinstance(run, WandbTracker):
        run.run.log({"guard/attempts": wandb.Table(columns=columns, data=rows)}, commit=False)
    chosen = report.targets[0].variant if report.targets else None
    return str(chosen["name"]) if chosen else "as_configured"


def _deaths(run_dir: Path) -> dict[str, Any]:
    """How often this run has died, and of what last."""
    try:
        lines = (run_dir / "deaths.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    last = json.loads(lines[-1])
    return {
        "guard/deaths": len(lines),
        "guard/last_death": f"{last['kind']}: {last['signature']}",
    }
