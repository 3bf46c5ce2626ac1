"""MlmDataConfig: Levanter's data config, where every component yields packed rows of documents.

Weights, mixture, shuffling, the split off training data and the stop strategy are Levanter's own
code. What differs is the format (``documents``), how caches are found (by what they were built
from) and what a dataset yields (``Row`` instead of causal examples).
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from haliax import Axis
from jaxtyping import PRNGKeyArray
from levanter.data.dataset import AsyncDataset
from levanter.data.mixture import MixtureDataset
from levanter.data.text.datasets import (
    DatasetComponent,
    DatasetComponentBase,
    HfDatasetSourceConfig,
    LmDataConfig,
    LmDatasetSourceConfigBase,
    UrlDatasetSourceConfig,
)
from levanter.schedule import BatchSchedule
from levanter.store.cache import TreeCache
from levanter.tokenizers import MarinTokenizer, load_tokenizer
from levanter.utils.jax_utils import multihost_broadcast_sync
from rigging.filesystem.storage_path import prefix_join

from mlm_recipe.data.cache import build_or_load_cache, cache_digest, is_complete, load_cache
from mlm_recipe.data.checks import check_stop_strategy
from mlm_recipe.data.documents import DocumentsFormat, DocumentTokenizer
from mlm_recipe.data.hub import HubDocuments
from mlm_recipe.data.packing import PackingConfig
from mlm_recipe.data.rows import PackedRows, Row
from mlm_recipe.data.sources import DocumentFiles, DocumentSource
from mlm_recipe.data.tokenizer import TokenizerInfo
from mlm_recipe.errors import ConfigError

# Levanter fields that would be ignored here; silence would hide a mistake.
WITHOUT_MEANING = (
    "vocab_size",
    "cache_catalog",
    "cache_options",
    "enforce_eos",
    "chat_template",
    "block_cross_document_attention",
    "prior_context_phases",
)


@dataclass(frozen=True)
class DocumentsComponent(DatasetComponent):
    """One named set of documents: a source, or the directory of a finished cache."""

    format: DocumentsFormat = field(default_factory=DocumentsFormat)  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen, so narrowing is sound
    """How documents are read. No ``type`` is needed: nothing else can be packed and masked."""


@dataclass(frozen=True)
class MlmDataConfig(LmDataConfig):
    """Documents, tokenizer, cache, packing and mixture."""

    tokenizer: str = ""
    """A directory with ``tokenizer.json``, or a Hugging Face id (``id@revision`` to pin it)."""
    components: dict[str, DocumentsComponent] = field(default_factory=dict)  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen, so narrowing is sound
    """The sets of documents by name; ``train_weights`` mixes them."""
    packing: PackingConfig = field(default_factory=PackingConfig)
    """How documents share rows."""

    def __post_init__(self):
        super().__post_init__()
        check_stop_strategy(self.stop_strategy)
        defaults = {f.name: f for f in dataclasses.fields(LmDataConfig)}
        for name in WITHOUT_MEANING:
            if getattr(self, name) != _default(defaults[name]):
                raise ConfigError(
                    f"data.{name}",
                    getattr(self, name),
                    "it has no meaning for masked-LM data",
                    "remove it",
                )
        for name, component in self.components.items():
            _check_component(f"data.components.{name}", component)
        self._check_validation_split()

    @cached_property
    def tokenizer_info(self) -> TokenizerInfo:
        """Ids and identity of the tokenizer; ConfigError when it is missing or unfit."""
        return TokenizerInfo.load(self.tokenizer)

    @cached_property
    def the_tokenizer(self) -> MarinTokenizer:
        """The tokenizer in Levanter's form, from the same files as ``tokenizer_info``."""
        return load_tokenizer(str(self.tokenizer_info.directory))

    def build_caches(self, split: str) -> dict[str, TreeCache[dict]]:
        """The token cache of every component that has this split, built where it is missing."""
        caches = {}
        for name, component in self.components.items():
            if split == "train" and not self._has_nonzero_weight(name):
                continue
            cache = self._build_cache(name, component, split)
            if cache is not None:
                if cache.ledger.total_num_rows == 0:
                    field = f"data.components.{name}"
                    raise ConfigError(
                        field, split, "its documents hold no text", "give documents with text"
                    )
                caches[name] = cache
        return caches

    def build_token_datasets(  # pyright: ignore[reportIncompatibleMethodOverride]  # rows, not causal examples
        self, caches: Mapping[str, TreeCache[dict]], Pos: Axis, *, split: str
    ) -> dict[str, AsyncDataset[Row]]:
        """Rows of ``Pos.size`` tokens for every cache."""
        rows: dict[str, AsyncDataset[Row]] = {}
        for name, cache in caches.items():
            packed = PackedRows(cache, Pos.size, self.tokenizer_info, self.packing)
            held_out = (self.num_validation_sequences or {}).get(name, 0)
            if split == "train" and held_out >= packed.plan.num_rows:
                raise ConfigError(
                    f"data.num_validation_sequences.{name}",
                    held_out,
                    f"this component has only {packed.plan.num_rows} rows, so none would be left",
                    "hold out fewer",
                )
            rows[name] = packed
        return rows

    def train_set(  # pyright: ignore[reportIncompatibleMethodOverride]  # rows, not causal examples
        self, Pos: Axis, batch_schedule: BatchSchedule, *, key: PRNGKeyArray
    ) -> MixtureDataset[Row]:
        """The training mixture; the same as ``train_mixture``."""
        return self.train_mixture(Pos, batch_schedule, key=key)  # pyright: ignore[reportReturnType]  # as above

    def validation_sets(self, Pos: Axis) -> Mapping[str, AsyncDataset[Row]]:  # pyright: ignore[reportIncompatibleMethodOverride]  # rows, not causal examples
        """Validation rows by component: its validation documents, or rows held out of training."""
        return self._validation_datasets_unwrapped(Pos)  # pyright: ignore[reportReturnType]  # as above

    def _build_cache(
        self, name: str, component: DocumentsComponent, split: str
    ) -> TreeCache[dict] | None:
        documents = component.format
        field = f"data.components.{name}"
        root = component.cache_dir or (self.cache_dir and prefix_join(self.cache_dir, name))
        if not root:
            raise ConfigError("data.cache_dir", self.cache_dir, "no directory", "name one")
        processor = DocumentTokenizer(self.tokenizer_info, documents.text_key)
        root_field = f"{field}.cache_dir" if component.cache_dir else "data.cache_dir"
        if component.source is None:
            directory = root if component.flat_cache else prefix_join(root, split)
            if split != "train" and (component.flat_cache or not is_complete(directory)):
                return None
            return load_cache(directory, processor, field=root_field)
        source = _open_source(component.source, documents, split, f"{field}.source")
        if source is None:
            if split == "train":
                raise ConfigError(
                    f"{field}.source", "", "it has no training documents", "set train_urls"
                )
            return None
        options = {"text_unit": documents.text_unit, "skip_corrupt": documents.skip_corrupt}
        # The first process decides: modification times may differ between machines.
        digest = multihost_broadcast_sync(cache_digest(processor, source, **options))
        directory = prefix_join(prefix_join(root, digest), split)
        if not self.auto_build_caches:
            return load_cache(directory, processor, field=root_field)
        return build_or_load_cache(directory, source, processor, field=root_field)

    def _check_validation_split(self) -> None:
        for name, held_out in (self.num_validation_sequences or {}).items():
            field = f"data.num_validation_sequences.{name}"
            if name not in self.components or not self._has_nonzero_weight(name):
                known = ", ".join(n for n in self.components if self._has_nonzero_weight(n))
                raise ConfigError(
                    field, held_out, "there is no such training component", f"use one of: {known}"
                )
            if held_out < 1:
                raise ConfigError(field, held_out, "it must be at least 1", "raise or remove it")
            source = self.components[name].source
            if isinstance(source, UrlDatasetSourceConfig) and source.validation_urls:
                raise ConfigError(
                    field,
                    held_out,
                    "the component has validation_urls, which this would replace",
                    "keep one of the two",
                )


def _open_source(
    source: LmDatasetSourceConfigBase, documents: DocumentsFormat, split: str, field: str
) -> DocumentSource | None:
    """The documents of ``split``, or None where the source has no such split."""
    key, skip = documents.text_key, documents.skip_corrupt
    if isinstance(source, HfDatasetSourceConfig):
        hub = HubDocuments(source, split, field, text_key=key, skip_corrupt=skip)
        return hub if hub.exists() else None
    assert isinstance(source, UrlDatasetSourceConfig)
    urls = source.urls_for_split(split)
    if not urls:
        return None
    return DocumentFiles.resolve(
        urls,
        field=f"{field}.{split}_urls",
        text_key=key,
        text_unit=documents.text_unit,
        skip_corrupt=skip,
    )


def _check_component(field: str, component: DatasetComponentBase) -> None:
    """Refuse what Levanter's config can say but packed rows cannot do."""
    if not isinstance(component, DocumentsComponent):
        kind = type(component).__name__
        raise ConfigError(field, kind, "only documents can be packed", "use DocumentsComponent")
    if not isinstance(component.format, DocumentsFormat):
        kind = type(component.format).__name__
        raise ConfigError(
            f"{field}.format", kind, "only documents can be packed", "use DocumentsFormat"
        )
    source = component.source
    if component.pack is not None:
        raise ConfigError(
            f"{field}.pack", component.pack, "documents are always packed", "use data.packing"
        )
    if source is None:
        if component.cache_dir is None:
            raise ConfigError(f"{field}.source", None, "there is no text", "set source.train_urls")
        return
    if not isinstance(source, UrlDatasetSourceConfig | HfDatasetSourceConfig):
        kind = LmDatasetSourceConfigBase.get_choice_name(type(source))
        raise ConfigError(f"{field}.source.type", kind, "cannot be read", "use url or hf")
    if component.flat_cache:
        raise ConfigError(
            f"{field}.flat_cache", True, "it is for a finished cache without a source", "remove it"
        )
    # Levanter's source has these too, but only the component's are read.
    for spec in dataclasses.fields(LmDatasetSourceConfigBase):
        value = getattr(source, spec.name)
        if value != _default(spec):
            raise ConfigError(
                f"{field}.source.{spec.name}",
                value,
                "it is ignored there",
                f"set {field}.{spec.name} instead",
            )


def _default(spec: dataclasses.Field[Any]) -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return spec.default
