"""Reading documents: every format gives the same text, every fault names its place."""

import bz2
import gzip
import json
import logging
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from mlm_recipe.data.readers import DataError
from mlm_recipe.data.sources import DocumentFiles, resolve_urls
from mlm_recipe.errors import ConfigError

TEXTS = ["The sea.\nThe shore.", "Caf\u00e9 \u2014 \U0001f600", "", " a  b "]
LINES = b"".join(json.dumps({"id": i, "text": t}).encode() + b"\n" for i, t in enumerate(TEXTS))
ARRAY = json.dumps([{"text": t} for t in TEXTS], indent=1).encode()

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def read(*paths: Path | str, **options) -> list[str]:
    files = DocumentFiles.resolve([str(p) for p in paths], field="train_urls", **options)
    return [document[files.text_key] for document in files]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize(
    "name, content",
    [("a.jsonl", LINES), ("a.json", LINES), ("a.json", ARRAY), ("a.json", b"\n " + ARRAY)],
)
def test_json_formats_and_compressions_agree(tmp_path, name, content, ending):
    assert read(write(tmp_path / (name + ending), COMPRESS[ending](content))) == TEXTS


@pytest.mark.parametrize("ending", [".gz", ".zst", ".bz2", ".xz"])
def test_archives_of_several_members_are_read_to_the_end(tmp_path, ending):
    members = [COMPRESS[ending](line) for line in LINES.splitlines(keepends=True)]
    assert read(write(tmp_path / f"a.jsonl{ending}", b"".join(members))) == TEXTS


def test_parquet(tmp_path):
    table = pa.table({"id": range(4), "body": TEXTS})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert read(tmp_path / "a.parquet", text_key="body") == TEXTS


@pytest.mark.parametrize(
    "unit, documents",
    [
        ("file", ["one\ntwo\n\n \nthree  \n"]),
        ("paragraph", ["one\ntwo", "three  "]),
        ("line", ["one", "two", "three  "]),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_txt_documents_are_files_paragraphs_or_lines(tmp_path, unit, documents, ending, mark):
    content = mark + b"one\ntwo\n\n \nthree  \n"
    path = write(tmp_path / f"a.txt{ending}", COMPRESS[ending](content))
    assert read(path, text_unit=unit) == documents


def test_globs_are_sorted_and_patterns_keep_their_order(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "x1.txt", "x2.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    names = read(tmp_path / "x{2,1}.txt", tmp_path / "[ab].txt", tmp_path / "*" / "c.txt")
    assert names == ["x2.txt", "x1.txt", "a.txt", "b.txt", "deep/c.txt"]
    assert len(read(tmp_path / "**" / "*.txt")) == 5


def test_remote_files_and_file_urls(tmp_path):
    for name in ("two", "one"):
        content = gzip.compress(json.dumps({"text": name}).encode())
        fsspec.filesystem("memory").pipe(f"/corpus/{name}.jsonl.gz", content)
    assert read("memory://corpus/*.jsonl.gz") == ["one", "two"]
    assert read("memory://corpus/two.jsonl.gz") == ["two"]
    assert read(f"file://{write(tmp_path / 'a.txt', b'local')}") == ["local"]
    with pytest.raises(ConfigError, match="no such file"):
        read("memory://corpus/three.jsonl")
    (identity,) = DocumentFiles(["memory://corpus/one.jsonl.gz"]).fingerprint()
    assert identity["size"] == str(len(gzip.compress(json.dumps({"text": "one"}).encode())))


def test_reading_can_start_at_any_document(tmp_path):
    files = DocumentFiles.resolve([str(write(tmp_path / "a.jsonl", LINES))], field="train_urls")
    (name,) = files.shard_names
    for row in range(6):
        assert [d["text"] for d in files.open_shard_at_row(name, row)] == TEXTS[row:]


@pytest.mark.parametrize(
    "pattern, problem",
    [
        ("absent.jsonl", "no such file"),
        ("*.parquet", "no such file"),
        ("", "no such file"),
        ("a.csv", "its ending tells no format"),
        ("plain", "its ending tells no format"),
        ("nosuchprotocol://bucket/a.jsonl", "nosuchprotocol"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, pattern, problem, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "plain"):
        Path(name).write_text("x")
    with pytest.raises(ConfigError, match=problem) as error:
        resolve_urls([pattern], field="data.components.a.source.train_urls")
    assert error.value.field == "data.components.a.source.train_urls"
    assert error.value.value == pattern


def test_a_file_named_twice_is_refused(tmp_path):
    path = write(tmp_path / "a.txt", b"x")
    with pytest.raises(ConfigError, match="named twice"):
        resolve_urls([str(path), str(tmp_path / "*.txt")], field="train_urls")


FAULTS = {
    "not JSON": (b'{"text": "a"}\n\n{"text": "b\n{"text": "c"}\n', 3, "at column 10"),
    "not UTF-8": (b'{"text": "a"}\n{"text": "\xff"}\n{"text": "c"}\n', 2, "not UTF-8"),
    "not an object": (b'["text"]\n{"text": "a"}\n{"text": "c"}\n', 1, "not a JSON object"),
    "no text": (b'{"text": "a"}\n{"body": "b"}\n{"text": "c"}\n', 2, "'body'.*no 'text'"),
    "no string": (b'{"text": "a"}\n{"text": 7}\n{"text": "c"}\n', 2, "a string, not int"),
    "null": (b'{"text": "a"}\n{"text": "c"}\n{"text": null}\n', 3, "a string, not NoneType"),
}


@pytest.mark.parametrize("content, line, problem", FAULTS.values(), ids=FAULTS)
def test_a_corrupt_line_is_named_or_skipped_and_counted(tmp_path, caplog, content, line, problem):
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(content))
    with pytest.raises(DataError, match=problem) as error:
        read(path)
    assert error.value.field == f"{path}:{line}"
    assert "skip_corrupt" in error.value.fix
    with caplog.at_level(logging.WARNING):
        assert read(path, skip_corrupt=True) == ["a", "c"]
    assert f"{path}: skipped 1 corrupt documents, the first: {path}:{line}" in caplog.text


def test_a_corrupt_line_is_quoted_briefly(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "' + b"x" * 10_000 + b"\n")
    with pytest.raises(DataError) as error:
        read(path)
    assert len(str(error.value)) < 400 + len(str(path))


@pytest.mark.parametrize("unit, place", [("file", 1), ("paragraph", 4), ("line", 5)])
def test_txt_that_is_not_utf8_is_named_by_line(tmp_path, unit, place):
    path = write(tmp_path / "a.txt", b"one\ntwo\n\nthree\nbad \xff\n")
    with pytest.raises(DataError, match="not UTF-8") as error:
        read(path, text_unit=unit)
    assert error.value.field == f"{path}:{place}"


def test_a_parquet_without_the_column_or_with_nulls(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a", None]}), path)
    with pytest.raises(DataError, match="no column 'text'"):
        read(path, skip_corrupt=True)
    with pytest.raises(DataError, match="not NoneType") as error:
        read(path, text_key="body")
    assert error.value.field == f"{path}[1]"


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl.gz", gzip.compress(LINES * 50)[:-30]),
        ("a.jsonl.gz", b"not an archive"),
        ("a.jsonl.zst", b"not an archive"),
        ("a.txt.zst", zstandard.compress(LINES * 50)[:-30]),
        ("a.jsonl.bz2", b"not an archive"),
        ("a.jsonl.bz2", bz2.compress(LINES * 50)[:-30]),
        ("a.jsonl.xz", lzma.compress(LINES * 50)[:-30]),
        ("a.parquet", b"not a parquet file"),
        ("a.json", b'[{"text": "a"}'),
    ],
)
def test_a_damaged_file_is_an_error_even_where_corrupt_lines_are_skipped(tmp_path, name, content):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as error:
        read(path, skip_corrupt=True)
    assert error.value.field == str(path)


def test_a_failing_disk_is_not_called_corrupt_data(tmp_path):
    files = DocumentFiles.resolve([str(write(tmp_path / "a.jsonl", LINES))], field="train_urls")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(FileNotFoundError):
        list(files)


def test_fingerprint_changes_with_the_file(tmp_path):
    path = write(tmp_path / "a.jsonl", LINES)
    files = DocumentFiles.resolve([str(path)], field="train_urls")
    before = files.fingerprint()
    assert before == files.fingerprint()
    path.write_bytes(LINES + b'{"text": "more"}\n')
    assert files.fingerprint() != before


def test_data_errors_cross_process_boundaries():
    error = DataError("a.jsonl:7", "{", "not valid JSON")
    revived = pickle.loads(pickle.dumps(error))
    assert type(revived) is DataError and str(revived) == str(error)
