"""MlmDataConfig: from YAML to rows, through Levanter's own mixture, and what it refuses."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import draccus
import jax
import pytest
import yaml
from draccus.utils import DraccusException
from haliax import Axis
from levanter.data.dataset import AsyncDataset
from levanter.data.mixture import MixtureDataset
from levanter.data.text.datasets import DatasetComponent, UrlDatasetSourceConfig
from levanter.data.text.formats import TextLmDatasetFormat
from levanter.schedule import BatchSchedule
from levanter.utils.thread_utils import blocking_wait
from tokenizers import Tokenizer

from mlm_recipe.data.config import DocumentsComponent, MlmDataConfig
from mlm_recipe.data.documents import DocumentsFormat
from mlm_recipe.data.packing import PackingConfig
from mlm_recipe.data.readers import DataError
from mlm_recipe.data.rows import PackedRows, Row
from mlm_recipe.errors import ConfigError

AUSTEN = Path(__file__).parents[1] / "corpus" / "austen"
DECODE = Tokenizer.from_file(str(AUSTEN / "tokenizer" / "tokenizer.json")).decode
Pos = Axis("position", 64)
KEY = jax.random.PRNGKey(0)


def decode(text: str) -> MlmDataConfig:
    return draccus.decode(MlmDataConfig, yaml.safe_load(text))


def write(path: Path, texts: Sequence[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def config(directory: Path, components: dict[str, Any], **options: Any) -> MlmDataConfig:
    raw = {
        "tokenizer": str(AUSTEN / "tokenizer"),
        "cache_dir": str(directory / "cache"),
        "components": components,
        **options,
    }
    return draccus.decode(MlmDataConfig, raw)


def urls(*train: str, validation: Sequence[str] = ()) -> dict[str, Any]:
    return {"source": {"type": "url", "train_urls": [*train], "validation_urls": [*validation]}}


def mixture(data: MlmDataConfig) -> MixtureDataset[Row]:
    return data.train_set(Pos, BatchSchedule(8), key=KEY)


def read(rows: AsyncDataset[Any], indices: Sequence[int] | None = None) -> list[Row]:
    indices = range(blocking_wait(rows.async_len())) if indices is None else indices
    return list(blocking_wait(rows.get_batch(indices)))


def texts_of(rows: Sequence[Row]) -> list[str]:
    used = (row.input_ids[row.segment_ids >= 0].tolist() for row in rows)
    return [DECODE(ids, skip_special_tokens=False) for ids in used]


def caches(directory: Path) -> set[Path]:
    """Directories of finished caches."""
    return {p.parent for p in directory.glob("cache/*/*/*/shard_ledger.json")}


@pytest.fixture(scope="module")
def chapters() -> list[str]:
    with gzip.open(AUSTEN / "validation.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file][:6]


# Decoding


def test_yaml_needs_no_types_but_the_source():
    data = decode(
        """
        tokenizer: corpus/austen/tokenizer
        components:
          novels: {source: {type: url, train_urls: [a.jsonl]}}
          notes:
            source: {train_urls: [b.txt]}
            format: {text_unit: line, skip_corrupt: true}
          web:
            source: {type: hf, id: some/dataset}
            format: {text_key: body}
        packing: {max_segments_per_row: 8, positions: continuous}
        train_weights: {novels: 3, web: 1}
        """
    )
    assert data.components["novels"].format == DocumentsFormat()
    assert data.components["notes"].format == DocumentsFormat(text_unit="line", skip_corrupt=True)
    assert data.components["web"].format == DocumentsFormat(text_key="body")
    assert data.packing == PackingConfig(max_segments_per_row=8, positions="continuous")
    assert data.train_weights == {"novels": 3, "web": 1}
    assert draccus.decode(MlmDataConfig, draccus.encode(data)) == data


@pytest.mark.parametrize(
    "text, message",
    [
        ("packing: {positions: reset}", "positions"),
        ("packing: {max_segments: 3}", "max_segments"),
        ("components: {a: {source: {train_urls: [b]}, format: {text_unit: page}}}", "text_unit"),
        ("components: {a: {source: {urls: [b]}}}", "urls"),
        ("components: {a: {sources: {}}}", "sources"),
        ("components: {a: {type: concat, children: {}}}", "type"),
        ("components: {a: {source: {train_urls: [b]}, format: {type: text}}}", "type"),
    ],
)
def test_misspelt_yaml_is_refused(text, message):
    with pytest.raises(DraccusException, match=message):
        decode(text)


@pytest.mark.parametrize(
    "text, field",
    [
        ("components: {a: {source: {train_urls: [b]}, pack: true}}", "a.pack"),
        ("components: {a: {source: {train_urls: [b]}, flat_cache: true}}", "a.flat_cache"),
        ("components: {a: {source: {train_urls: [b], cache_dir: c}}}", "a.source.cache_dir"),
        ("components: {a: {}}", "a.source"),
        ("enforce_eos: false", "data.enforce_eos"),
        ("block_cross_document_attention: false", "data.block_cross_document_attention"),
        ("cache_options: {batch_size: 7}", "data.cache_options"),
        ("num_validation_sequences: {a: 3}", "data.num_validation_sequences.a"),
        (
            "components: {a: {source: {train_urls: [b], validation_urls: [c]}}}\n"
            "num_validation_sequences: {a: 3}",
            "data.num_validation_sequences.a",
        ),
    ],
)
def test_what_packed_rows_cannot_do_is_refused(text, field):
    with pytest.raises((ConfigError, DraccusException)) as raised:
        decode(text)
    error: BaseException | None = raised.value
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__
    assert error is not None and error.field.endswith(field)


@pytest.mark.parametrize(
    "component, field",
    [
        (DatasetComponent(UrlDatasetSourceConfig(train_urls=["b"])), "data.components.a"),
        (DocumentsComponent(format=TextLmDatasetFormat()), "data.components.a.format"),  # pyright: ignore[reportArgumentType]  # on purpose
    ],
)
def test_other_formats_are_refused(component, field):
    with pytest.raises(ConfigError, match="only documents") as error:
        MlmDataConfig(components={"a": component})
    assert error.value.field == field


def test_a_tokenizer_is_required():
    with pytest.raises(ConfigError, match="no tokenizer"):
        _ = MlmDataConfig().tokenizer_info


# Rows


def test_rows_come_from_train_and_validation_documents(tmp_path, chapters):
    train = write(tmp_path / "train.jsonl", chapters[:4])
    held_out = write(tmp_path / "validation.jsonl", chapters[4:])
    data = config(tmp_path, {"novels": urls(train, validation=[held_out])}, shuffle=False)
    (first,) = read(data.train_sets(Pos, key=KEY)["novels"], [0])
    assert texts_of([first])[0][:80] == "<s>" + chapters[0][:77]
    validation = data.validation_sets(Pos)
    assert list(validation) == ["novels"]
    length = sum(int((r.segment_ids >= 0).sum()) for r in read(validation["novels"]))
    segments = sum(int(r.segment_ids.max()) + 1 for r in read(validation["novels"]))
    encode = data.tokenizer_info.document_tokenizer().encode
    own = sum(len(encode(text, add_special_tokens=False).ids) for text in chapters[4:])
    assert length == own + 2 * segments


def test_components_are_mixed_by_weight(tmp_path):
    first, second = (
        write(tmp_path / f"{name}.jsonl", [f"{name} {i} " * 40 for i in range(60)])
        for name in ("sea", "land")
    )
    data = config(
        tmp_path,
        {"sea": urls(first), "land": urls(second)},
        train_weights={"sea": 3.0, "land": 1.0},
        mixture_block_size=64,
    )
    drawn = texts_of(read(mixture(data), range(256)))
    assert sum("sea" in text for text in drawn) == 192
    assert sum("land" in text for text in drawn) == 64


def test_a_component_without_weight_is_for_validation_only(tmp_path, chapters):
    novels = urls(write(tmp_path / "a.jsonl", chapters[:1]))
    other = urls(validation=[write(tmp_path / "b.jsonl", chapters[1:2])])
    data = config(
        tmp_path, {"novels": novels, "other": other}, train_weights={"novels": 1, "other": 0}
    )
    assert list(data.validation_sets(Pos)) == ["other"]
    assert len(read(mixture(data), range(8))) == 8


def test_held_out_rows_are_disjoint_from_training(tmp_path, chapters):
    novels = urls(write(tmp_path / "a.jsonl", chapters[:3]))
    data = config(tmp_path, {"novels": novels}, num_validation_sequences={"novels": 20})
    held_out = read(data.validation_sets(Pos)["novels"])
    train = read(data.train_sets(Pos, key=KEY)["novels"])
    everything = PackedRows(data.build_caches("train")["novels"], Pos.size, data.tokenizer_info)
    rows = [{row.input_ids.tobytes() for row in part} for part in (held_out, train)]
    assert len(held_out) == len(rows[0]) == 20
    assert not rows[0] & rows[1]
    assert rows[0] | rows[1] == {row.input_ids.tobytes() for row in read(everything)}


def test_holding_out_every_row_is_refused(tmp_path, chapters):
    novels = urls(write(tmp_path / "a.jsonl", chapters[:1]))
    data = config(tmp_path, {"novels": novels}, num_validation_sequences={"novels": 10_000})
    with pytest.raises(ConfigError, match="has only") as error:
        mixture(data)
    assert error.value.field == "data.num_validation_sequences.novels"


def test_a_hugging_face_dataset_by_id(tmp_path, monkeypatch):
    """A local dataset directory goes the same way through ``datasets`` as a hub id."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "set").mkdir()
    for split in ("train", "validation"):
        lines = "".join(json.dumps({"body": f"{split} {i}"}) + "\n" for i in range(9))
        (tmp_path / "set" / f"{split}.jsonl").write_text(lines)
    component = {
        "source": {"type": "hf", "id": str(tmp_path / "set")},
        "format": {"text_key": "body"},
    }
    data = config(tmp_path, {"hub": component}, shuffle=False)
    (row,) = read(data.validation_sets(Pos)["hub"])
    assert texts_of([row]) == ["".join(f"<s>validation {i}</s>" for i in range(9))]
    assert texts_of(read(mixture(data), [0])) == ["".join(f"<s>train {i}</s>" for i in range(9))]
    component["format"] = {"text_key": "text"}
    with pytest.raises(DataError, match="no 'text'") as error:
        mixture(config(tmp_path, {"hub": component}))
    assert error.value.field.endswith("set/train[0][0]")
    component["source"]["id"] = str(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot be loaded") as error:
        mixture(config(tmp_path, {"hub": component}))
    assert error.value.field == "data.components.hub.source.id"


# Caches


def test_a_cache_is_reused_until_text_or_tokenizer_changes(tmp_path):
    path = Path(write(tmp_path / "a.jsonl", ["the sea " * 9]))
    shutil.copytree(AUSTEN / "tokenizer", tmp_path / "tokenizer")
    components = {"novels": urls(str(path))}
    options = {"tokenizer": str(tmp_path / "tokenizer"), "shuffle": False}

    def first_text() -> str:
        return texts_of(read(mixture(config(tmp_path, components, **options)), [0]))[0]

    assert first_text() == "<s>" + "the sea " * 9 + "</s>"
    built = {p: p.stat().st_mtime_ns for p in caches(tmp_path)}
    assert len(built) == 1
    first_text()
    assert {p: p.stat().st_mtime_ns for p in caches(tmp_path)} == built

    write(path, ["the shore"])
    assert first_text() == "<s>the shore</s>"
    assert len(caches(tmp_path)) == 2

    # The same path, other content: byte pairs merged in another order give other tokens.
    file = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = content["model"]["merges"][:1]
    file.write_text(json.dumps(content))
    assert first_text() == "<s>the shore</s>"
    assert len(caches(tmp_path)) == 3
    row = read(mixture(config(tmp_path, components, **options)), [0])[0]
    assert (row.segment_ids >= 0).sum() > 8


def test_reading_options_are_part_of_a_cache(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    for unit in ("file", "line"):
        component = {**urls(str(tmp_path / "a.txt")), "format": {"text_unit": unit}}
        mixture(config(tmp_path, {"novels": component}))
    assert len(caches(tmp_path)) == 2


def test_a_finished_cache_needs_no_source_but_its_tokenizer(tmp_path):
    data = config(tmp_path, {"novels": urls(write(tmp_path / "a.jsonl", ["the sea"]))})
    mixture(data)
    (built,) = caches(tmp_path)
    component = {"cache_dir": str(built.parent)}
    assert texts_of(read(mixture(config(tmp_path, {"c": component})), [0])) == ["<s>the sea</s>"]
    flat = {"cache_dir": str(built), "flat_cache": True}
    assert texts_of(read(mixture(config(tmp_path, {"c": flat})), [0])) == ["<s>the sea</s>"]

    shutil.copytree(AUSTEN / "tokenizer", tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    other = config(tmp_path, {"c": component}, tokenizer=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="another tokenizer") as error:
        mixture(other)
    assert error.value.field == "data.components.c.cache_dir"
    component["cache_dir"] = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no finished token cache"):
        mixture(config(tmp_path, {"c": component}))


def test_building_can_be_forbidden(tmp_path):
    components = {"novels": urls(write(tmp_path / "a.jsonl", ["the sea"]))}
    with pytest.raises(ConfigError, match="no finished token cache"):
        mixture(config(tmp_path, components, auto_build_caches=False))
    mixture(config(tmp_path, components))
    mixture(config(tmp_path, components, auto_build_caches=False))


def test_a_corrupt_line_stops_the_build_at_once_and_leaves_no_cache(tmp_path):
    good = write(tmp_path / "a.jsonl", ["the sea"])
    bad = tmp_path / "b.jsonl"
    bad.write_text('{"text": "the shore"}\n{"text": \n')
    components = {"novels": urls(good, str(bad))}
    with pytest.raises(DataError) as error:
        mixture(config(tmp_path, components))
    assert error.value.field == f"{bad}:2" and error.value.__cause__ is None
    assert not caches(tmp_path)
    assert not list(tmp_path.rglob("*.tmp.*"))
    skipping = {**components["novels"], "format": {"skip_corrupt": True}}
    (row,) = read(mixture(config(tmp_path, {"novels": skipping})), [0])
    assert texts_of([row]) == ["<s>the sea</s><s>the shore</s>"]


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_a_corpus_without_text_is_refused(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    for _ in range(2):
        with pytest.raises(ConfigError, match="hold no text"):
            mixture(config(tmp_path, {"novels": urls(str(tmp_path / "a.jsonl"))}))


def test_a_missing_file_is_refused_before_anything_is_built(tmp_path):
    good = write(tmp_path / "a.jsonl", ["the sea"])
    with pytest.raises(ConfigError, match="no such file") as error:
        mixture(config(tmp_path, {"novels": urls(good, str(tmp_path / "b.jsonl"))}))
    assert error.value.field == "data.components.novels.source.train_urls"
    assert not (tmp_path / "cache").exists()


def test_a_component_without_training_documents_is_refused(tmp_path):
    held_out = write(tmp_path / "a.jsonl", ["the sea"])
    with pytest.raises(ConfigError, match="no training documents"):
        mixture(config(tmp_path, {"novels": urls(validation=[held_out])}))


def test_an_unwritable_cache_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    path = write(tmp_path / "a.jsonl", ["the sea"])
    data = config(tmp_path, {"novels": urls(path)}, cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="cannot be written") as error:
        mixture(data)
    assert error.value.field == "data.cache_dir"


BUILD = """
import sys, yaml, draccus
from mlm_recipe.data.config import MlmDataConfig
data = draccus.decode(MlmDataConfig, yaml.safe_load(sys.argv[1]))
data.build_caches("train")
"""


@pytest.mark.slow
def test_a_killed_build_is_taken_up_again(tmp_path, chapters):
    for i in range(8):
        write(tmp_path / f"{i}.jsonl", chapters * 6)
    raw = {
        "tokenizer": str(AUSTEN / "tokenizer"),
        "cache_dir": str(tmp_path / "cache"),
        "components": {"novels": urls(str(tmp_path / "*.jsonl"))},
        "shuffle": False,
    }
    command = [sys.executable, "-c", BUILD, json.dumps(raw)]
    with subprocess.Popen(command) as build:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("cache/novels/*/train/0????/shard_ledger.json")):
            assert time.monotonic() < deadline and build.poll() is None
            time.sleep(0.01)
        build.send_signal(signal.SIGKILL)
    assert build.returncode == -signal.SIGKILL
    kept = [p for p in tmp_path.glob("cache/novels/*/train/0*") if ".tmp." not in p.name]
    assert kept and not caches(tmp_path)
    leftovers = list(tmp_path.glob("cache/novels/*/train/*.tmp.*"))
    for leftover in leftovers[:1]:
        os.utime(leftover, (0, 0))
    built_at = {p: (p / "shard_ledger.json").stat().st_mtime_ns for p in kept}

    data = draccus.decode(MlmDataConfig, raw)
    cache = data.build_caches("train")["novels"]
    assert len(cache) == 8 * 6 * 6
    assert {p: (p / "shard_ledger.json").stat().st_mtime_ns for p in kept} == built_at
    assert set(tmp_path.glob("cache/novels/*/train/*.tmp.*")) == set(leftovers[1:])
    (last,) = cache.get_batch_sync([len(cache) - 1])
    assert DECODE(last["input_ids"].tolist()) == chapters[-1]
