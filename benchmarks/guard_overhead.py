"""Time to the first train step, with the guard and without, side by side.

    uv run python benchmarks/guard_overhead.py [--rounds 3] [--config config/roberta_tiny.yaml]

Each round launches four times, in this order: without a preflight and with one, both with an empty
compilation cache; then without one and with a remembered one, both with a full cache. Prints and
writes (benchmarks/guard_overhead.json) the ratios per round, their median and spread.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# Everything between the launcher's start and the end of the first step.
PARTS = ("imports", "preflight", "initialize", "data", "audit", "state", "first_step")


def time_to_first_step(config: Path, scratch: Path, name: str, cache: Path, *options: str) -> dict:
    """Launch a run of one step; its seconds by part, and their sum as ``total``."""
    words = [
        *("--config", config, *options),
        *("--trainer.id", name, "--output_dir", scratch, "--data.cache_dir", scratch / "tokens"),
        *("--guard.cache_dir", cache, "--trainer.num_train_steps", "1"),
        *("--trainer.tracker", "{type: noop}", "--trainer.max_eval_batches", "1"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mlm_recipe.train", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    summary = json.loads((scratch / name / "summary.json").read_text())
    seconds = {part: summary["seconds"].get(part, 0.0) for part in PARTS}
    return {**seconds, "total": sum(seconds.values()), "compiles": summary["train_step_compiles"]}


def measure_round(config: Path, scratch: Path, number: int) -> dict[str, dict]:
    """Four launches; see the head of this file."""
    cold, full = scratch / f"cold-{number}", scratch / f"full-{number}"
    launches = {
        "cold_without": (cold, ("--no-preflight",)),
        "cold_with": (full, ()),
        "full_without": (full, ("--no-preflight",)),
        "full_remembered": (full, ()),
    }
    return {
        name: time_to_first_step(config, scratch, f"{name}-{number}", cache, *options)
        for name, (cache, options) in launches.items()
    }


def summarise(ratios: list[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--config", type=Path, default=Path("config/roberta_tiny.yaml"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        time_to_first_step(options.config, scratch, "tokens-0", scratch / "x", "--no-preflight")
        rounds = [measure_round(options.config, scratch, n) for n in range(options.rounds)]
    totals = [{key: part["total"] for key, part in each.items()} for each in rounds]
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "cold": summarise([t["cold_with"] / t["cold_without"] for t in totals]),
        "remembered": summarise([t["full_remembered"] / t["full_without"] for t in totals]),
        "rounds": rounds,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    for name, goal in (("cold", 1.3), ("remembered", 1.05)):
        found = result[name]
        sys.stdout.write(
            f"{name}: {found['median']:.2f}x ({found['min']:.2f} to {found['max']:.2f}), "
            f"goal {goal}x\n"
        )


if __name__ == "__main__":
    main()
