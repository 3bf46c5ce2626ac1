"""The scripts that make a corpus and its tokenizer: what ships is what they make."""

import gzip
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AUSTEN = ROOT / "corpus" / "austen"
SCRIPTS = ROOT / "scripts"


def run(script: str, *args: str) -> None:
    runpy.run_path(str(SCRIPTS / script))["main"]([str(arg) for arg in args])


def test_the_shipped_tokenizer_is_rebuilt_byte_for_byte(tmp_path):
    run("train_tokenizer.py", str(AUSTEN / "train.jsonl.gz"), "--output", str(tmp_path))
    shipped = {p.name: p.read_bytes() for p in (AUSTEN / "tokenizer").iterdir()}
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == shipped


def test_too_little_text_for_the_vocabulary_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("the sea")
    with pytest.raises(ValueError, match="supports only"):
        run("train_tokenizer.py", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_shipped_corpus_is_what_its_readme_says():
    counts = {}
    for name in ("train", "validation"):
        with gzip.open(AUSTEN / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            documents = [json.loads(line) for line in file]
        assert all(document["text"].strip() for document in documents)
        counts[name] = (len(documents), sum(len(d["text"].encode()) for d in documents))
    assert counts == {"train": (243, 3_636_839), "validation": (26, 365_902)}


def prepare(folder: Path, output: Path, *options: str) -> dict[str, list[dict[str, str]]]:
    run("prepare_corpus.py", str(folder), "--output", str(output), *options)
    corpus = {}
    for path in output.iterdir():
        with gzip.open(path, "rt", encoding="utf-8") as file:
            corpus[path.name] = [json.loads(line) for line in file]
    return corpus


def test_a_folder_of_text_becomes_a_corpus(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "b.txt").write_text("A hard\n  wrapped line.\n\n\nNext\u00e9.\n", "utf-8")
    (folder / "a.txt").write_text("One.\n\nTwo.\n\n \n\nThree.", "utf-8")
    assert prepare(folder, tmp_path / "files", "--validation-every", "2") == {
        "train.jsonl.gz": [{"name": "a", "text": "One.\nTwo.\nThree."}],
        "validation.jsonl.gz": [{"name": "b", "text": "A hard wrapped line.\nNext\u00e9."}],
    }
    options = ("--text-unit", "paragraph", "--validation-every", "3")
    assert prepare(folder, tmp_path / "paragraphs", *options) == {
        "train.jsonl.gz": [
            {"name": "a", "text": "One."},
            {"name": "a", "text": "Two."},
            {"name": "b", "text": "A hard wrapped line."},
            {"name": "b", "text": "Next\u00e9."},
        ],
        "validation.jsonl.gz": [{"name": "a", "text": "Three."}],
    }


def test_the_same_folder_gives_the_same_bytes(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"text {i}")
    for output in ("one", "two"):
        prepare(folder, tmp_path / output)
    for name in ("train.jsonl.gz", "validation.jsonl.gz"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_holding_out_everything_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(
            "prepare_corpus.py", str(tmp_path), "--output", str(tmp_path), "--validation-every", "1"
        )
    assert "at least 2" in capsys.readouterr().err
