"""Readers: the documents of one file, by format. jsonl, json, parquet and txt.

A reader yields each document's text, and a DataError in place of a document that is corrupt, so
that the caller decides what to do; damage to the file as a whole is raised.
"""

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any, Literal, cast

from mlm_recipe.errors import ConfigError

COMPRESSIONS: Mapping[str, str] = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
    ".xz": "xz",
}
"""File name endings and what fsspec calls them."""

Documents = Iterator["str | DataError"]


TextUnit = Literal["file", "paragraph", "line"]
"""What one document is in a .txt file: all of it, the lines between blank lines, or each line that
is not blank."""


class DataError(ConfigError):
    """A document or file that cannot be read: names the file and line (or row) and quotes it.

    A ConfigError whose field is the place, because the fix is in the file or in the config.
    """

    def __init__(self, place: str, value: object, problem: str, fix: str | None = None):
        fix = fix or "repair or remove it, or skip such documents with format.skip_corrupt: true"
        super().__init__(place, value, problem, fix)

    def __reduce__(self):
        return type(self), (self.field, self.value, self.problem, self.fix)


def read_documents(url: str, text_key: str, text_unit: TextUnit) -> Documents:
    """Documents of the file ``url`` in order.

    Args:
        url: Local path or fsspec URL; its ending tells format and compression.
        text_key: The field of a json object or parquet row that holds the text.
        text_unit: What a document is in a .txt file.

    Raises:
        DataError: the file is damaged as a whole, a truncated archive for instance.
    """
    return READERS[file_format(url)](url, text_key, text_unit)


def file_format(url: str) -> str:
    """``.jsonl``, ``.json``, ``.parquet``, ``.txt``: what the name ends in before compression."""
    suffixes = PurePosixPath(url.split("?")[0]).suffixes
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_remote(url: str) -> bool:
    """Whether ``url`` needs fsspec to be opened."""
    return "://" in url


def text_of(value: Any, place: str, key: str) -> "str | DataError":
    """``value[key]``, or the DataError that says why there is no text at ``place``."""
    if not isinstance(value, Mapping):
        return DataError(place, _quote(repr(value)), "not a JSON object")
    if key not in value:
        keys = ", ".join(map(repr, list(value)[:10])) or "none"
        return DataError(
            place, f"keys: {keys}", f"there is no {key!r}, which format.text_key names"
        )
    if not isinstance(value[key], str):
        found = type(value[key]).__name__
        return DataError(place, value[key], f"{key!r} must be a string, not {found}")
    return value[key]


@contextmanager
def _opened(url: str) -> Iterator[IO[bytes]]:
    """The decompressed bytes of ``url``; damage to the archive becomes a DataError."""
    compression = COMPRESSIONS.get(PurePosixPath(url.split("?")[0]).suffix)
    try:
        with _open(url, compression) as file:
            yield file
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        # A failing disk or network carries an errno and is no property of the data.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            url, compression, f"the file is damaged: {error}", "restore the file, or remove it"
        ) from error


@contextmanager
def _open(url: str, compression: str | None) -> Iterator[IO[bytes]]:
    if compression == "zstd":
        import pyarrow as pa

        # fsspec's zstandard reader ends silently at a truncation and after the first frame.
        with _open(url, None) as raw, pa.CompressedInputStream(raw, "zstd") as stream:
            yield cast(IO[bytes], io.BufferedReader(stream))
    elif is_remote(url):
        from rigging.filesystem.factory import open_url

        with open_url(url, "rb", compression=compression) as file:
            yield cast(IO[bytes], file)
    else:
        opener = {None: open, "gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}[compression]
        with opener(url, "rb") as file:
            yield cast(IO[bytes], file)


def _read_jsonl(url: str, key: str, unit: TextUnit) -> Documents:
    with _opened(url) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse_line(line, f"{url}:{number}", key)


def _read_json(url: str, key: str, unit: TextUnit) -> Documents:
    """An array of objects; or one object a line, for which this ending is common too."""
    with _opened(url) as file:
        first = file.read(1)
        while first.isspace():
            first = file.read(1)
        content = first + file.read() if first == b"[" else b""
    if first != b"[":
        yield from _read_jsonl(url, key, unit)
        return
    try:
        objects = json.loads(content)
    except ValueError as error:
        raise DataError(
            url, _quote(content), f"not valid JSON: {error}", "repair the file"
        ) from error
    for index, value in enumerate(objects):
        yield text_of(value, f"{url}[{index}]", key)


def _read_parquet(url: str, key: str, unit: TextUnit) -> Documents:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _opened(url) as file:
        try:
            parquet = pq.ParquetFile(file)
        except pa.ArrowException as error:
            raise DataError(
                url, ".parquet", f"not a parquet file: {error}", "restore the file, or remove it"
            ) from error
        columns = parquet.schema_arrow.names
        if key not in columns:
            problem = f"there is no column {key!r}, which format.text_key names"
            raise DataError(url, columns, problem, "set format.text_key to one of the columns")
        row = 0
        for batch in parquet.iter_batches(batch_size=1024, columns=[key]):
            for value in batch.column(0).to_pylist():
                yield text_of({key: value}, f"{url}[{row}]", key)
                row += 1


def _read_txt(url: str, key: str, unit: TextUnit) -> Documents:
    with _opened(url) as file:
        for number, raw in _TEXT_UNITS[unit](file):
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield DataError(f"{url}:{number}", _quote(raw), f"not UTF-8: {error}")


def _whole_file(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    yield 1, file.read()


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, line.rstrip(b"\r\n")


def _paragraphs(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    paragraph, start = io.BytesIO(), 0
    for number, line in enumerate(file, start=1):
        if line.strip():
            start = start or number
            paragraph.write(line)
        elif start:
            yield start, paragraph.getvalue().rstrip(b"\r\n")
            paragraph, start = io.BytesIO(), 0
    if start:
        yield start, paragraph.getvalue().rstrip(b"\r\n")


def _parse_line(line: bytes, place: str, key: str) -> str | DataError:
    try:
        value = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg} at column {error.colno}"
        return DataError(place, _quote(line), problem)
    except UnicodeDecodeError as error:
        return DataError(place, _quote(line), f"not UTF-8: {error}")
    return text_of(value, place, key)


def _quote(raw: bytes | str, limit: int = 60) -> str:
    text = raw[: 4 * limit].decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    text = text.strip()
    return text if len(text) <= limit else text[:limit] + "..."


_TEXT_UNITS: Mapping[TextUnit, Callable[[IO[bytes]], Iterator[tuple[int, bytes]]]] = {
    "file": _whole_file,
    "paragraph": _paragraphs,
    "line": _lines,
}

READERS: Mapping[str, Callable[[str, str, TextUnit], Documents]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".txt": _read_txt,
}
"""The formats that are understood, by file name ending."""
