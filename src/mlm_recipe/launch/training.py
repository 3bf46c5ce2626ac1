"""Trains under the launcher's eyes: what died is classified, and goes on from its checkpoint.

The order of data and the masks are functions of the step, so a run that was restarted sees what it
would have seen (``data.masked_rows``).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlm_recipe.guard.catalogue import Catalogue
from mlm_recipe.guard.classify import HostFacts, classify
from mlm_recipe.guard.restart import Action, RestartPolicy
from mlm_recipe.guard.types import ChildExit, Failure
from mlm_recipe.launch.trainer import Trainer

# What the training program itself decides: the end, bad input, an interruption.
_ITS_OWN = frozenset({0, 2, 130})
_FORESEEN = frozenset({"data_exhausted", "audit_failed", "config_error", "interrupted"})


@dataclass(frozen=True)
class Plan:
    """How a run starts: the variant, its configuration file and its environment."""

    variant: str
    config_file: Path
    environ: Mapping[str, str]


NextPlan = Callable[[Failure, frozenset[str]], Plan | None]
"""Another plan, proved, given what failed and the variants that did; None where there is none."""


def train_to_the_end(
    plan: Plan,
    trainer: Trainer | None,
    *,
    restarts: int,
    catalogue: Catalogue,
    next_plan: NextPlan,
    say: Callable[[str], None],
) -> int:
    """Train, again after each death that is worth it.

    Args:
        plan: how to start.
        trainer: a process already started, if any.
        restarts: the budget.
        catalogue: of deaths.
        next_plan: asked after a death that would come again.
        say: one line for people.

    Returns:
        The training program's exit code; of a death by signal N, 128 + N, as shells have it.
    """
    policy = RestartPolicy(restarts)
    run_dir = plan.config_file.parent
    failed: set[str] = set()
    while True:
        host = HostFacts.now()
        ended = _train_once(plan, trainer)
        trainer = None
        if ended.returncode in _ITS_OWN or _foreseen(run_dir, ended):
            return _shell_code(ended.returncode)
        failure = classify(ended, catalogue, host=host)
        action = policy.decide(failure)
        record_death(run_dir, failure, ended, action, plan.variant)
        say(f"training died: {failure.kind}: {failure.message or failure.signature}")
        if action is Action.NEXT_VARIANT:
            failed.add(plan.variant)
            following = next_plan(failure, frozenset(failed))
            if following is None:
                say("no other variant holds")
                return _shell_code(ended.returncode)
            plan = following
        elif action is Action.STOP:
            if failure.advice:
                say(f"fix: {failure.advice}")
            return _shell_code(ended.returncode)
        say(f"going on from the last checkpoint as {plan.variant}")


def _train_once(plan: Plan, trainer: Trainer | None) -> ChildExit:
    if trainer is not None and not trainer.can_become(plan.environ):
        trainer.dismiss()
        trainer = None
    if trainer is None:
        trainer = Trainer(plan.environ, plan.config_file.parent / "logs" / "console.log")
    (plan.config_file.parent / "summary.json").unlink(missing_ok=True)
    return trainer.train(plan.config_file, plan.environ)


def _foreseen(run_dir: Path, ended: ChildExit) -> bool:
    """It said itself why it ended, and that was no backend."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return ended.returncode == 1 and summary.get("exit_reason") in _FORESEEN


def _shell_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def record_death(
    run_dir: Path, failure: Failure, ended: ChildExit, action: Action, variant: str
) -> None:
    """Append one line to ``deaths.jsonl`` in the run directory."""
    line: dict[str, Any] = {
        "variant": variant,
        "kind": failure.kind,
        "signature": failure.signature,
        "message": failure.message,
        "returncode": ended.returncode,
        "signal": ended.signal,
        "seconds": round(ended.seconds, 1),
        "action": action,
        "refs": list(failure.refs),
    }
    with (run_dir / "deaths.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
