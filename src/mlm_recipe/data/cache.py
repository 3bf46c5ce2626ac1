"""Token caches: built once per (text, tokenizer, format), never half-written, never mistaken.

A cache lies in a directory named by a digest of everything its tokens depend on, so a change of
tokenizer or text builds another cache. It is a Levanter TreeCache of the sharded layout, one shard
a file. It is not built through Levanter's ``build_cache``: that retries a corrupt line three times,
buries it in a worker's traceback, and marks the cache finished before its rows are in place.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import jax
from levanter.data.text.cache import CacheLedger, CacheMetadata
from levanter.store.cache import (
    CACHE_LAYOUT_SHARDED,
    LEDGER_FILE_NAME,
    SerialCacheWriter,
    TreeCache,
)
from levanter.utils.jax_utils import multihost_broadcast_sync
from rigging.filesystem.atomic import atomic_rename
from rigging.filesystem.storage_path import StoragePath

from mlm_recipe.data.documents import BATCH_CHARS, DocumentTokenizer, batched_by_size
from mlm_recipe.data.rows import TOKENS_FIELD
from mlm_recipe.data.sources import DocumentSource
from mlm_recipe.errors import ConfigError

logger = logging.getLogger(__name__)

FLUSH_TOKENS = 4_000_000
"""Tokens held before they are written. TensorStore rewrites a file's last block on each append, so
small flushes are slow; this one is 16 MB."""

LEFTOVER_AGE = 24 * 3600.0
"""Seconds after which an unfinished shard is taken for the leftover of a killed build."""

BUILD_TIMEOUT = 7 * 24 * 3600.0
"""Seconds that other processes wait for the first one to build."""


def cache_digest(processor: DocumentTokenizer, source: DocumentSource, **options: object) -> str:
    """16 hex digits over all that decides a cache's tokens; ``options`` are reading options."""
    identity = [processor.metadata, source.fingerprint(), options]
    content = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def build_or_load_cache(
    directory: str, source: DocumentSource, processor: DocumentTokenizer, *, field: str
) -> TreeCache[dict]:
    """The cache at ``directory``, built from ``source`` first if it is not there.

    With several processes the first one builds and the others wait; all must see ``directory``.

    Args:
        directory: Local path or fsspec URL of this cache alone.
        source: Documents; shards already built by an interrupted run are kept.
        processor: Turns documents into tokens.
        field: The config key of the directory that errors name.

    Raises:
        ConfigError: the directory cannot be written, or the cache there is not this one.
        DataError: a document or file cannot be read.
    """
    error: Exception | None = None
    if jax.process_index() == 0 and not is_complete(directory):
        try:
            _build(directory, source, processor, field)
        except (ValueError, OSError, RuntimeError) as e:  # the others must hear of it
            error = e
    problem = multihost_broadcast_sync(None if error is None else str(error), timeout=BUILD_TIMEOUT)
    if error is not None:
        raise error
    if problem is not None:
        raise RuntimeError(f"the first process could not build {directory}: {problem}")
    return load_cache(directory, processor, field=field)


def is_complete(directory: str) -> bool:
    """Whether a finished cache lies at ``directory``; its ledger is written last."""
    return (StoragePath(directory) / LEDGER_FILE_NAME).exists()


def load_cache(directory: str, processor: DocumentTokenizer, *, field: str) -> TreeCache[dict]:
    """The finished cache at ``directory``; ConfigError when its tokens are not ``processor``'s."""
    if not is_complete(directory):
        raise ConfigError(field, directory, "there is no finished token cache", "name its source")
    ledger = CacheLedger.load(directory)
    found = ledger.metadata.preprocessor_metadata or {}
    differing = sorted(
        key
        for key in processor.metadata.keys() | found.keys()
        if processor.metadata.get(key) != found.get(key)
    )
    if differing:
        raise ConfigError(
            field,
            directory,
            f"this cache was built with another {', '.join(differing)}",
            "delete it, or name another directory",
        )
    return TreeCache.load_from_ledger(directory, processor.output_exemplar, ledger)


def _build(
    directory: str, source: DocumentSource, processor: DocumentTokenizer, field: str
) -> None:
    _make_writable(directory, field)
    names = list(source.shard_names)
    paths = [f"{i:05d}" for i in range(len(names))]
    logger.info("Building the token cache %s from %d files", directory, len(names))
    build_one = partial(_build_shard, directory, source, processor)
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(build_one, n, p) for n, p in zip(names, paths, strict=True)]
        try:
            ledgers = [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)
    _write_ledger(directory, paths, ledgers, processor)


def _build_shard(
    directory: str, source: DocumentSource, processor: DocumentTokenizer, name: str, path: str
) -> CacheLedger:
    """Tokenize one shard into ``directory/path``, whole or not at all."""
    target = str(StoragePath(directory) / path)
    if is_complete(target):
        return CacheLedger.load(target)
    num_read = 0

    def documents() -> Iterator[dict]:
        nonlocal num_read
        for document in source.open_shard_at_row(name, 0):
            num_read += 1
            yield document

    with _new_directory(target) as temporary:
        metadata = CacheMetadata(processor.metadata)
        with SerialCacheWriter(temporary, processor.output_exemplar, metadata, name) as writer:
            for batch in _token_batches(documents(), processor):
                writer.write_batch(batch)
    ledger = CacheLedger.load(target)
    num_tokens = ledger.field_counts.get(TOKENS_FIELD, 0)
    logger.info("%s: %d documents, %d tokens", name, ledger.total_num_rows, num_tokens)
    if num_read > ledger.total_num_rows:
        logger.warning(
            "%s: left out %d documents without text", name, num_read - ledger.total_num_rows
        )
    return ledger


@contextmanager
def _new_directory(path: str) -> Iterator[str]:
    """A temporary directory that becomes ``path`` when the block succeeds, else is removed."""
    with atomic_rename(path) as temporary:
        try:
            yield temporary
        except BaseException:  # atomic_rename leaves a directory behind
            if StoragePath(temporary).exists():
                StoragePath(temporary).rmtree()
            raise


def _token_batches(documents: Iterator[dict], processor: DocumentTokenizer) -> Iterator[list[dict]]:
    """Tokenized documents in lists of about ``FLUSH_TOKENS`` tokens."""

    def tokenized() -> Iterator[dict]:
        for batch in batched_by_size(
            documents, BATCH_CHARS, size=lambda document: len(document[processor.text_key])
        ):
            yield from processor(batch)

    return batched_by_size(tokenized(), FLUSH_TOKENS, size=lambda row: len(row[TOKENS_FIELD]))


def _write_ledger(
    directory: str,
    paths: Sequence[str],
    ledgers: Sequence[CacheLedger],
    processor: DocumentTokenizer,
) -> None:
    """Publish the cache: until this one rename it is not complete."""
    counts = {p: ledger.field_counts for p, ledger in zip(paths, ledgers, strict=True)}
    ledger = CacheLedger(
        total_num_rows=sum(ledger.total_num_rows for ledger in ledgers),
        shard_rows={p: ledger.total_num_rows for p, ledger in zip(paths, ledgers, strict=True)},
        is_finished=True,
        finished_shards=list(paths),
        field_counts={TOKENS_FIELD: sum(c.get(TOKENS_FIELD, 0) for c in counts.values())},
        field_counts_by_shard=counts,
        layout=CACHE_LAYOUT_SHARDED,
        metadata=CacheMetadata(processor.metadata),
    )
    with atomic_rename(str(StoragePath(directory) / LEDGER_FILE_NAME)) as temporary:
        StoragePath(temporary).write_text(ledger.to_json())  # pyright: ignore[reportAttributeAccessIssue]  # added by dataclass_json


def _make_writable(directory: str, field: str) -> None:
    """Create ``directory``, prove that it takes files, and clear what killed builds left there.

    Raises ConfigError when it does not, before any text is read.
    """
    path = StoragePath(directory)
    probe = path / f".writable.{os.getpid()}"
    try:
        path.mkdirs()
        probe.write_bytes(b"")
        probe.rm()
    except OSError as error:
        raise ConfigError(
            field, directory, f"cannot be written: {error.strerror or error}", "name a writable one"
        ) from error
    if path.is_local:
        for entry in os.scandir(str(path)):
            # A younger one may belong to another run that builds the same cache right now.
            if ".tmp." in entry.name and time.time() - entry.stat().st_mtime > LEFTOVER_AGE:
                shutil.rmtree(entry.path)
