"""Runs the real launcher in a child process, on a model small enough for a test."""

import gzip
import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
TINY_CONFIG = ROOT / "config/roberta_tiny.yaml"

# roberta_tiny, smaller: what takes time in a test is imports and compilation.
SMALL = {
    "model.max_seq_len": 64,
    "model.hidden_dim": 32,
    "model.intermediate_dim": 64,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "trainer.train_batch_size": 8,
    "trainer.num_train_steps": 6,
    "trainer.steps_per_eval": 3,
    "trainer.max_eval_batches": 4,
    "trainer.id": "small",
}


@dataclass(frozen=True)
class Finished:
    """A launcher that ended."""

    code: int
    output: str
    run_dir: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of the JSON logger, where it was configured."""
        marker = '{"tracker'
        lines = (line[line.index(marker) :] for line in self.output.splitlines() if marker in line)
        return [json.loads(line) for line in lines]


def small_corpus(output_dir: Path) -> dict[str, Any]:
    """The first documents of the shipped corpus as a component: 25,174 and 10,358 tokens."""
    for split, documents in (("train", 12), ("validation", 3)):
        path = output_dir / f"{split}.jsonl"
        if not path.exists():
            with gzip.open(ROOT / f"corpus/austen/{split}.jsonl.gz", "rt") as file:
                path.write_text("".join(itertools.islice(file, documents)))
    urls = {f"{s}_urls": [str(output_dir / f"{s}.jsonl")] for s in ("train", "validation")}
    return {"austen": {"source": {"type": "url", **urls}}}


def command(output_dir: Path, *options: str, **overrides: Any) -> list[str]:
    """The launcher's command line; ``trainer__id="x"`` stands for ``--trainer.id x``.

    Without a preflight, which takes as long as the run, unless ``guard__preflight=True``.
    """
    values = {**SMALL, "output_dir": str(output_dir), "data.cache_dir": str(output_dir / "cache")}
    values["data.components"] = small_corpus(output_dir)
    values |= {"guard.preflight": False, "guard.cache_dir": str(output_dir / "cache/guard")}
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    words = [sys.executable, "-m", "mlm_recipe.train", "--config", str(TINY_CONFIG), *options]
    for key, value in values.items():
        text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)
        words += [f"--{key}", text.removesuffix("...\n").strip()]
    return words


def launch(
    output_dir: Path,
    *options: str,
    env: dict[str, str] | None = None,
    timeout: float = 300,
    **overrides: Any,
) -> Finished:
    """Run the launcher in the repository, to its end."""
    done = subprocess.run(
        command(output_dir, *options, **overrides),
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    run_id = overrides.get("trainer__id", SMALL["trainer.id"])
    return Finished(done.returncode, done.stdout, output_dir / run_id)
