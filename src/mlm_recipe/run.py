"""The training program: ``python -m mlm_recipe.run --config RUN_DIR/config.yaml``.

Reads the effective configuration that the launcher wrote and nothing else, trains, and writes
``summary.json`` however it ends.
"""

import argparse
import atexit
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import levanter.tracker
import levanter.tracker.wandb

from mlm_recipe.config import decode_config
from mlm_recipe.data.audit import MaskingAuditError
from mlm_recipe.errors import ConfigError
from mlm_recipe.guard.prologue import prepare_to_die
from mlm_recipe.launch.overlay import load_yaml
from mlm_recipe.provenance import git_commit, versions
from mlm_recipe.summary import RunSummary
from mlm_recipe.training import DataExhaustedError, train

logger = logging.getLogger(__name__)

_IMPORTED_AT = time.time()

EXIT_TRAINING_FAILED = 1
EXIT_CONFIG_ERROR = 2
EXIT_INTERRUPTED = 130

_WANDB_TEARDOWN_SECONDS = 60.0

_RESULTS = (
    "exit_reason",
    "final_step",
    "train_loss",
    "eval_loss",
    "eval_perplexity",
    "eval_masked_accuracy",
    "tokens_seen",
    "useful_tokens_per_second",
    "train_step_compiles",
    "train_step_cache_hits",
)


def run(config_file: Path) -> int:
    """Train as the file says.

    Returns:
        0 after the last step; 1 training failed; 2 the input must be corrected; 130 interrupted.
    """
    summary = RunSummary(versions=versions(), git_commit=git_commit())
    launched = os.environ.get("MLM_RECIPE_LAUNCHED_AT")
    if launched is not None:
        summary.seconds["imports"] = round(_IMPORTED_AT - float(launched), 3)
        summary.seconds["preflight"] = round(time.time() - _IMPORTED_AT, 3)
    try:
        config = decode_config(load_yaml(config_file))
        summary.run_id = config.trainer.id
        summary.num_train_steps = config.trainer.num_train_steps
        train(config, summary)
        summary.exit_reason = "finished"
        return 0
    except (ConfigError, MaskingAuditError, DataExhaustedError) as error:
        summary.exit_reason, code = _foreseen(error)
        summary.error = str(error)
        return code
    except KeyboardInterrupt:
        summary.exit_reason = "interrupted"
        return EXIT_INTERRUPTED
    except Exception as error:  # the process edge: everything else is a failed training
        summary.exit_reason = "error"
        summary.error = f"{type(error).__name__}: {error}"
        logger.exception("training failed")
        return EXIT_TRAINING_FAILED
    finally:
        _finish_trackers(summary)
        summary.write(config_file.parent / "summary.json")
        if summary.error is not None:
            sys.stderr.write(f"error: {summary.error}\n")  # last, below what trackers say


def _foreseen(error: Exception) -> tuple[str, int]:
    if isinstance(error, ConfigError):
        return "config_error", EXIT_CONFIG_ERROR
    if isinstance(error, DataExhaustedError):
        return "data_exhausted", EXIT_TRAINING_FAILED
    return "audit_failed", EXIT_TRAINING_FAILED


def _finish_trackers(summary: RunSummary) -> None:
    """Log the results and flush, before interpreter exit forbids new threads."""
    try:
        tracker = levanter.tracker.current_tracker()
    except RuntimeError:
        return  # never initialised
    results = {key: value for key, value in vars(summary).items() if key in _RESULTS}
    tracker.log_summary({f"summary/{key}": value for key, value in results.items()})
    tracker.finish()
    # Levanter's exit hook for W&B starts a thread, which Python 3.12 refuses at exit, loudly.
    teardown = levanter.tracker.wandb._teardown_wandb_service_bounded
    atexit.unregister(teardown)
    teardown(_WANDB_TEARDOWN_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(prog="python -m mlm_recipe.run", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, help="the effective configuration")
    source.add_argument("--control", type=int, help="the launcher's: where it will be named")
    options = parser.parse_args(arguments)
    # SIGTERM is how schedulers end a job: unwind, so that the summary is written.
    signal.signal(signal.SIGTERM, _interrupt)
    if options.control is None:
        return run(options.config)
    prepare_to_die()
    order = _await_order(options.control)
    return 0 if order is None else run(order)


def _await_order(control: int) -> Path | None:
    """The configuration to train, once the launcher has decided; None when it has no need of us.

    All imports are done by now, no device is touched yet: that is why it waits here.
    """
    with os.fdopen(control) as orders:
        line = orders.readline()
    if not line:
        return None
    order = json.loads(line)
    for name in [*os.environ]:
        if name.startswith("XLA_") or name == "LIBTPU_INIT_ARGS":
            del os.environ[name]
    os.environ.update(order["environ"])
    return Path(order["config"])


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
