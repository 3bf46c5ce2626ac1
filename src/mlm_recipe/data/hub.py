"""HubDocuments: the documents of a Hugging Face dataset, streamed or downloaded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from levanter.data.sharded_datasource import ShardedDataSource, datasource_from_hf_or_none
from levanter.data.text.datasets import HfDatasetSourceConfig

from mlm_recipe.data.readers import DataError, text_of
from mlm_recipe.data.sources import readable
from mlm_recipe.errors import ConfigError


@dataclass(frozen=True)
class HubDocuments:
    """One split of a Hugging Face dataset, in the shards that ``datasets`` makes of it."""

    config: HfDatasetSourceConfig
    split: str
    field: str
    """The config key of the source that errors name."""
    text_key: str = "text"
    """The column that holds the text."""
    skip_corrupt: bool = False
    """Leave out rows without a text, with a warning that counts them."""

    @cached_property
    def _source(self) -> ShardedDataSource[dict] | None:
        config = self.config
        if config.splits is not None and self.split not in config.splits:
            return None
        try:
            return datasource_from_hf_or_none(
                config.id,
                split=self.split,
                name=config.name,
                revision=config.revision,
                streaming=config.stream,
            )
        except (OSError, ValueError) as error:  # not found, gated, no network, unknown name
            raise ConfigError(
                f"{self.field}.id",
                config.id,
                f"cannot be loaded: {error}",
                "check id, name, revision, the network and HF_TOKEN",
            ) from error

    def exists(self) -> bool:
        """Whether the dataset has this split."""
        return self._source is not None

    @property
    def shard_names(self) -> Sequence[str]:
        return [] if self._source is None else self._source.shard_names

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[dict[str, str]]:
        """Documents of shard ``shard_name`` from number ``row`` on; DataError for a bad one."""
        place = f"{self.config.id}/{self.split}[{shard_name}]"
        texts = readable(self._texts(shard_name, place), place, skip=self.skip_corrupt)
        for number, text in enumerate(texts):
            if number >= row:
                yield {self.text_key: text}

    def _texts(self, shard_name: str, place: str) -> Iterator[str | DataError]:
        assert self._source is not None
        for number, document in enumerate(self._source.open_shard_at_row(shard_name, 0)):
            yield text_of(document, f"{place}[{number}]", self.text_key)

    def fingerprint(self) -> dict[str, Any]:
        """The dataset as configured; a floating ``revision`` is trusted not to change."""
        config = self.config
        return {
            "id": config.id,
            "name": config.name,
            "revision": config.revision,
            "split": self.split,
        }
