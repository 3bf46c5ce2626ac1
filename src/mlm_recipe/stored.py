"""Shapes and dtypes of a run's checkpoint, read from its metadata: no array is loaded."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import haliax.tree_util as htu
import jax
import tensorstore as ts
from haliax import NamedArray
from levanter.checkpoint import latest_checkpoint_path
from levanter.tensorstore_serialization import build_kvstore_spec
from levanter.trainer_state import saveable_training_mask
from levanter.utils.jax_utils import leaf_key_paths

from mlm_recipe.config import TrainMlmConfig
from mlm_recipe.errors import ConfigError


class Stored(NamedTuple):
    """One array of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str


def latest_checkpoint(config: TrainMlmConfig) -> str | None:
    """The checkpoint that this run would go on from; None for a fresh start."""
    trainer = config.trainer
    if trainer.load_checkpoint is False or trainer.id is None:
        return None
    paths = trainer.checkpoint_search_paths(trainer.id)
    try:
        return latest_checkpoint_path(paths[0], *paths[1:])
    except FileNotFoundError:
        return None


def stored_arrays(checkpoint: str) -> Mapping[str, Stored]:
    """Arrays by their path in a checkpoint, e.g. ``model/embeddings/layer_norm/bias``."""
    base = build_kvstore_spec(checkpoint.rstrip("/") + "/")
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    found = {}
    for key in (raw.decode() for raw in store.list().result()):
        if key.endswith("/zarr.json"):
            array = json.loads(store.read(key).result().value)
            found[key.removesuffix("/zarr.json")] = Stored(
                tuple(array["shape"]), array["data_type"]
            )
    return found


def as_stored(state: Any, arrays: Mapping[str, Stored], *, checkpoint: str, run_id: str) -> Any:
    """The shapes of a fresh state with the dtypes that its checkpoint brings.

    Raises:
        ConfigError: the checkpoint holds another shape, or lacks an array.
    """
    saved = eqx.filter(state, saveable_training_mask(state))
    names = leaf_key_paths(saved, is_leaf=lambda x: isinstance(x, NamedArray))

    def load(name: Any, leaf: Any) -> Any:
        shape = leaf.array if isinstance(leaf, NamedArray) else leaf
        if not isinstance(shape, jax.ShapeDtypeStruct):
            return leaf
        there = arrays.get("/".join(str(name).split(".")))
        if there is None or there.shape != shape.shape:
            held = "does not hold it" if there is None else f"holds it as {list(there.shape)}"
            raise ConfigError(
                "trainer.id",
                run_id,
                f"this configuration has {name} as {list(shape.shape)}, the run's checkpoint "
                f"{checkpoint} {held}",
                "go on with the run's own configuration, or give another trainer.id",
            )
        loaded: Any = jax.ShapeDtypeStruct(shape.shape, there.dtype, sharding=shape.sharding)
        return NamedArray(loaded, leaf.axes) if isinstance(leaf, NamedArray) else loaded

    merged = htu.tree_map(load, names, saved)
    return eqx.combine(merged, state, is_leaf=lambda x: isinstance(x, NamedArray))
