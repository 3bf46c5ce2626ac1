"""Exit 0 if a run's summary.json shows a finished run that learned more than token frequencies.

uv run python scripts/check_summary.py runs/ID/summary.json [--margin NATS]
"""

import argparse
import json
import sys
from pathlib import Path


def problems(summary: dict, margin: float) -> list[str]:
    """What is wrong with the run, in words; empty if nothing is."""
    found = []
    if summary["exit_reason"] != "finished":
        found.append(f"exit_reason is {summary['exit_reason']}: {summary['error']}")
    if summary["final_step"] != summary["num_train_steps"]:
        found.append(f"ended at step {summary['final_step']} of {summary['num_train_steps']}")
    loss, unigram = summary["eval_loss"], summary["unigram_nats"]
    if loss is None or loss > unigram - margin:
        found.append(f"eval_loss is {loss}, not {margin} nats below the unigram entropy {unigram}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("summary", type=Path)
    parser.add_argument("--margin", type=float, default=0.5, help="nats below unigram entropy")
    options = parser.parse_args()
    found = problems(json.loads(options.summary.read_text()), options.margin)
    for problem in found:
        sys.stderr.write(f"{options.summary}: {problem}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
