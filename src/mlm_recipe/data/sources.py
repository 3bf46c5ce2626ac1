"""DocumentFiles: the documents of many files, local or remote, named by paths, URLs and globs.

Has the shape of Levanter's ShardedDataSource (``shard_names``, ``open_shard_at_row``) with one
shard a file, but imports neither Levanter nor jax, so a launcher can check its files for free.
What it adds to Levanter's UrlDataSource: plain text, errors that name file and line, and the
refusal of a missing file before anything is built.
"""

import glob
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlm_recipe.data.readers import (
    COMPRESSIONS,
    READERS,
    DataError,
    TextUnit,
    file_format,
    is_remote,
    read_documents,
)
from mlm_recipe.errors import ConfigError

logger = logging.getLogger(__name__)


class DocumentSource(Protocol):
    """Documents in named shards, each ``{text_key: str}``."""

    @property
    def shard_names(self) -> Sequence[str]: ...

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[dict[str, str]]: ...

    def fingerprint(self) -> Any:
        """What identifies the content without reading it, as JSON."""
        ...


@dataclass(frozen=True)
class DocumentFiles:
    """The documents of ``urls``, one shard a file."""

    urls: Sequence[str]
    """Existing files without globs; ``resolve`` expands and checks patterns."""
    text_key: str = "text"
    """The field of a json object or parquet row that holds the text."""
    text_unit: TextUnit = "file"
    """What a document is in a .txt file."""
    skip_corrupt: bool = False
    """Leave out documents that cannot be read, with a warning that counts them."""

    @classmethod
    def resolve(cls, patterns: Sequence[str], *, field: str, **options: Any) -> "DocumentFiles":
        """The files that ``patterns`` name; see ``resolve_urls`` for the errors."""
        return cls(resolve_urls(patterns, field=field), **options)

    @property
    def shard_names(self) -> Sequence[str]:
        return self.urls

    def open_shard_at_row(self, shard_name: str, row: int) -> Iterator[dict[str, str]]:
        """Documents of the file ``shard_name`` from number ``row`` on.

        Raises:
            DataError: a document is corrupt and ``skip_corrupt`` is off, or the file is damaged.
        """
        documents = read_documents(shard_name, self.text_key, self.text_unit)
        for number, text in enumerate(readable(documents, shard_name, skip=self.skip_corrupt)):
            if number >= row:
                yield {self.text_key: text}

    def __iter__(self) -> Iterator[dict[str, str]]:
        for url in self.urls:
            yield from self.open_shard_at_row(url, 0)

    def fingerprint(self) -> list[dict[str, Any]]:
        """Per file its url, size, and modification time or etag."""
        return [_fingerprint(url) for url in self.urls]


def readable(documents: Iterator[str | DataError], name: str, *, skip: bool) -> Iterator[str]:
    """The texts among ``documents``; a DataError is raised, or with ``skip`` counted and logged."""
    skipped, first = 0, None
    for document in documents:
        if isinstance(document, str):
            yield document
        elif skip:
            skipped, first = skipped + 1, first or document
        else:
            raise document
    if skipped:
        logger.warning("%s: skipped %d corrupt documents, the first: %s", name, skipped, first)


def resolve_urls(patterns: Sequence[str], *, field: str) -> list[str]:
    """Files named by paths, URLs and globs (``*``, ``**``, ``?``, ``[ab]``, ``{a,b}``).

    Args:
        patterns: Local paths or fsspec URLs; http(s) URLs are taken literally.
        field: The config key that errors name.

    Returns:
        The files, in the order of the patterns; those of one glob sorted.

    Raises:
        ConfigError: a file is missing, a glob matches nothing, two patterns name one file, or a
            name's ending tells no format.
    """
    urls: list[str] = []
    for pattern in patterns:
        found = _expand(pattern, field)
        if not found:
            raise ConfigError(
                field, pattern, "there is no such file", "give an existing file, URL or glob"
            )
        urls.extend(found)
    for url, count in Counter(urls).items():
        if count > 1:
            raise ConfigError(field, url, "this file is named twice", "name each file once")
        if file_format(url) not in READERS:
            endings = f"{', '.join(READERS)} (compressed: {', '.join(COMPRESSIONS)})"
            raise ConfigError(field, url, "its ending tells no format", f"use {endings}")
    return urls


def _expand(pattern: str, field: str) -> list[str]:
    from braceexpand import braceexpand

    path = os.path.expanduser(pattern.removeprefix("file://"))
    if not is_remote(path):
        return [match for member in braceexpand(path) for match in _expand_local(member)]
    try:
        from rigging.filesystem.storage_path import StoragePath

        if pattern.startswith(("http://", "https://")):
            return [pattern] if StoragePath(pattern).exists() else []
        return sorted(str(match) for match in StoragePath(pattern).glob())
    except (ImportError, ValueError) as error:  # fsspec knows no such protocol, or lacks a package
        raise ConfigError(
            field, pattern, str(error), "install the package of that file system, or fix the URL"
        ) from error


def _expand_local(pattern: str) -> list[str]:
    if os.path.isfile(pattern):
        return [pattern]
    return sorted(filter(os.path.isfile, glob.glob(pattern, recursive=True)))


def _fingerprint(url: str) -> dict[str, Any]:
    if not is_remote(url):
        stat = os.stat(url)
        return {"url": url, "size": stat.st_size, "mtime": stat.st_mtime_ns}
    from rigging.filesystem.factory import url_to_fs

    fs, path = url_to_fs(url)
    info = {key.lower(): value for key, value in fs.info(path).items()}
    known = ("size", "etag", "mtime", "lastmodified", "last_modified", "created")
    return {"url": url} | {key: str(info[key]) for key in known if info.get(key) is not None}
