"""What the launcher can refuse: everything that needs no device, no network and no jax.

The rules live with what they protect (``model.checks``, ``data``); here they are only called, on
the raw mapping, in the order in which a user would want to hear of them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draccus
from draccus.utils import DraccusException

from mlm_recipe.data.checks import check_stop_strategy
from mlm_recipe.data.masking_config import MaskingConfig
from mlm_recipe.data.sources import resolve_urls
from mlm_recipe.data.tokenizer import TokenizerInfo
from mlm_recipe.data.word_starts import word_start_table
from mlm_recipe.errors import ConfigError
from mlm_recipe.fit import check_fit
from mlm_recipe.guard.catalogue import load_catalogue
from mlm_recipe.guard.config import check_guard
from mlm_recipe.launch.overlay import Config, get_path
from mlm_recipe.launch.schema import Schema
from mlm_recipe.model.checks import check_roberta

_AT_LEAST_ONE = ("trainer.num_train_steps", "trainer.steps_per_eval")


def check_config(config: Config, schema: Schema) -> None:
    """Raises ConfigError for the first thing wrong in a mapping that fits the schema."""
    _check_trainer(config, schema)
    masking = _decode_masking(config.get("masking") or {})
    model = {**schema.defaults("RobertaConfig"), **(config.get("model") or {})}
    model.pop("type", None)
    check_roberta(model)
    masking.num_masked_slots(model["max_seq_len"])
    check_guard(config.get("guard") or {})
    if catalogue := get_path(config, "guard.catalogue"):
        load_catalogue(Path(catalogue))
    check_stop_strategy(get_path(config, "data.stop_strategy", "restart"))
    _check_components(config)
    _check_tokenizer(config, model, masking)


def _check_trainer(config: Config, schema: Schema) -> None:
    for path in _AT_LEAST_ONE:
        value = get_path(config, path, schema.default(path))
        if value < 1:
            raise ConfigError(path, value, "it must be at least 1", "raise it")
    batch = get_path(config, "trainer.train_batch_size", 1)
    if isinstance(batch, int) and batch < 1 and batch != -1:
        raise ConfigError(
            "trainer.train_batch_size", batch, "it must be at least 1", "give examples per step"
        )
    audit = config.get("audit_batches") or 0
    if audit < 0:
        raise ConfigError("audit_batches", audit, "it must not be negative", "0 turns it off")
    per_device = get_path(config, "trainer.per_device_parallelism", -1)
    if isinstance(batch, int) and per_device > 0 and batch % per_device:
        raise ConfigError(
            "trainer.train_batch_size",
            batch,
            f"it is not divisible by trainer.per_device_parallelism = {per_device}",
            f"use a multiple of {per_device}",
        )


def _decode_masking(block: Mapping[str, Any]) -> MaskingConfig:
    try:
        return draccus.decode(MaskingConfig, dict(block))
    except DraccusException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        raise cause or error from error


def _check_components(config: Config) -> None:
    """Components are there, their weights name them, and their local files exist."""
    components = get_path(config, "data.components", {})
    if not components:
        raise ConfigError(
            "data.components",
            components,
            "there is no training data",
            "add a component: `name: {source: {type: url, train_urls: [...]}}`",
        )
    _check_weights(config, components)
    for name, component in components.items():
        source = get_path(component, "source", {})
        for key in ("train_urls", "validation_urls"):
            field = f"data.components.{name}.source.{key}"
            urls = source.get(key) or []
            resolve_urls([url for url in urls if "://" not in url], field=field)


def _check_weights(config: Config, components: Mapping[str, Any]) -> None:
    weights = get_path(config, "data.train_weights", {})
    stages = weights if isinstance(weights, list) else [[0, weights]]
    for name in {name for _, stage in stages for name in stage}:
        if name not in components:
            raise ConfigError(
                f"data.train_weights.{name}",
                name,
                "there is no such component",
                f"use one of: {', '.join(components)}",
            )


def _check_tokenizer(config: Config, model: Mapping[str, Any], masking: MaskingConfig) -> None:
    """A local tokenizer has what masking needs and fits the model; a hub id is left for later."""
    name = get_path(config, "data.tokenizer", "")
    if not Path(name).expanduser().is_dir() and not _looks_local(name):
        return
    tokenizer = TokenizerInfo.load(name)
    check_fit(tokenizer, vocab_size=model["vocab_size"], pad_token_id=model["pad_token_id"])
    if masking.unit == "whole_word":
        content = (tokenizer.directory / "tokenizer.json").read_text(encoding="utf-8")
        word_start_table(json.loads(content))


def _looks_local(name: str) -> bool:
    return not name or name.startswith((".", "/", "~")) or name.count("/") > 1
