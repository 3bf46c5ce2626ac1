"""Run by test_recipe.py in its own process with 8 virtual devices; prints one JSON object.

Digests of the first batches on 1, 2, 4 and 8 devices and in other batch sizes, and evaluation of
one model under other batch sizes and training seeds.
"""

import dataclasses
import hashlib
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import haliax as hax
import jax
import levanter.trainer
import numpy as np
from levanter.data.loader import DataLoader
from levanter.utils.mesh import create_mesh_from_axis_specs
from levanter.utils.tree_utils import inference_mode

from mlm_recipe.config import TrainMlmConfig, decode_config
from mlm_recipe.evaluate import Evaluator
from mlm_recipe.launch.overlay import load_yaml, set_path
from mlm_recipe.recipe import Recipe, Streams, build

ROWS = 48


def read_config(path: Path, **changes) -> TrainMlmConfig:
    raw = load_yaml(path)
    for key, value in changes.items():
        set_path(raw, key.replace("__", "."), value)
    return decode_config(raw)


def digest_of_rows(recipe: Recipe, *, devices: int, batch: int) -> str:
    """sha256 over the first rows as the loader delivers them, masks included."""
    mesh = create_mesh_from_axis_specs(
        ici_axes={"replica": 1, "data": devices, "model": 1},
        dcn_axes={},
        devices=jax.devices()[:devices],
    )
    loader = DataLoader(
        recipe.train_set,
        batch,
        mesh=mesh,
        axis_resources={"batch": "data"},
        max_buffered_batches=2,
        fetch_batch_size=2,
    )
    rows = []
    with closing(iter(loader)) as batches:
        for _ in range(ROWS // batch):
            leaves = jax.tree.leaves(jax.device_get(next(batches)))
            rows.append([np.asarray(leaf) for leaf in leaves])
    columns = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


def evaluate(recipe: Recipe, model) -> dict[str, float]:
    with recipe.trainer:
        result = Evaluator(recipe, unigram_nats=0.0).evaluate(model)[""]
    return result.metrics()


def main(path: Path) -> None:
    config = read_config(path)
    levanter.trainer.initialize(cast(Any, config))
    recipe = build(config)
    with recipe.trainer:
        model = inference_mode(hax.named_jit(recipe.init_model)(), True)
    found = {
        "devices": {d: digest_of_rows(recipe, devices=d, batch=8) for d in (1, 2, 4, 8)},
        "batches": {b: digest_of_rows(recipe, devices=1, batch=b) for b in (4, 16, 48)},
        "evals": {},
    }
    for name, changes in {
        "first": {},
        "second": {},
        "batch 32": {"trainer__train_batch_size": 32, "trainer__per_device_parallelism": 4},
        "seed 1": {"trainer__seed": 1},
        "train rate 0.4": {"masking__rate": 0.4},
    }.items():
        other = read_config(path, **changes)
        other.trainer._validate_and_set_defaults()
        found["evals"][name] = evaluate(build(other), model)
    found["seed 1"] = digest_of_rows(
        dataclasses.replace(recipe, streams=Streams.from_seed(1)), devices=1, batch=8
    )
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
