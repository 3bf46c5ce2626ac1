"""Bad input: one message that names field, value and fix; nothing half-written."""

import gzip
import json
import os
import re

import pytest
import yaml
from launching import ROOT, TINY_CONFIG, launch

from mlm_recipe import train
from mlm_recipe.launch.launch import Launch
from mlm_recipe.launch.options import parse_options

COMPONENT = "data.components.austen"


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    # Input that is not refused must not replace the test process by a training run.
    monkeypatch.setattr(Launch, "run", lambda *_: pytest.fail("was not refused"))


def refuse(capsys, *words):
    """The launcher's message for a command line that must be refused."""
    assert train.main([str(word) for word in words]) == 2
    return capsys.readouterr().err


CASES = {
    "unknown key": (["--trainer.num_trian_steps", "5"], "num_trian_steps = 5", "`num_train_steps`"),
    "unknown block": (["--optimiser.lr", "1"], "optimiser", "did you mean `optimizer`"),
    "unknown key of a choice": (["--optimizer.beta3", "1"], "optimizer.beta3", "`beta2`"),
    "wrong type": (["--trainer.num_train_steps", "many"], "'many'", "whole number"),
    "bool for a number": (["--trainer.seed", "true"], "True", "whole number"),
    "block for a value": (["--masking.rate", "{a: 1}"], "masking.rate", "a number"),
    "value for a block": (["--trainer", "3"], "trainer = 3", "block"),
    "union": (["--trainer.train_batch_size", "[1, 2]"], "train_batch_size[0]", "block"),
    "no such optimizer": (["--optimizer", "{type: sgd}"], "'sgd'", "roberta_adamw"),
    "no masked-LM head": (["--model", "{type: gpt2}"], "'gpt2'", "no masked-LM head", "roberta"),
    "no such tracker": (["--trainer.tracker", "{type: mlflow}"], "'mlflow'", "wandb"),
    "wrong format": ([f"--{COMPONENT}.format", "{type: chat}"], "format.type = 'chat'", "text_key"),
    "wrong component": ([f"--{COMPONENT}.type", "concat"], "austen.type = 'concat'", "source"),
    "no steps": (["--trainer.num_train_steps", "0"], "num_train_steps = 0", "at least 1"),
    "no batch": (["--trainer.train_batch_size", "0"], "train_batch_size = 0", "at least 1"),
    "batch not divisible": (
        ["--trainer.train_batch_size", "10", "--trainer.per_device_parallelism", "4"],
        "train_batch_size = 10",
        "multiple of 4",
    ),
    "sequence too long": (
        ["--model.max_seq_len", "512", "--model.max_position_embeddings", "512"],
        "max_seq_len = 512",
        "510 tokens",
        "514",
    ),
    "heads": (["--model.num_heads", "3"], "hidden_dim = 128", "multiple of 3"),
    "dropout": (["--model.hidden_dropout", "1.0"], "hidden_dropout = 1.0", "[0, 1)"),
    "masking rate": (["--masking.rate", "1.5"], "masking.rate = 1.5", "(0, 1]"),
    "fractions": (["--masking.random_fraction", "0.5"], "mask_fraction = 0.8", "above 1"),
    "masking unit": (["--masking.unit", "sentence"], "'sentence'", "whole_word"),
    "too few slots": (["--masking.max_masked", "4"], "max_masked = 4", "7 masks"),
    "vocabulary too small": (["--model.vocab_size", "1000"], "vocab_size = 1000", "4096"),
    "padding id": (["--model.pad_token_id", "0"], "pad_token_id = 0", "set it to 1"),
    "no tokenizer": (["--data.tokenizer", ""], "tokenizer", "directory"),
    "tokenizer missing": (["--data.tokenizer", "./nowhere"], "./nowhere", "directory"),
    "no components": (["--data.components", "{}"], "data.components", "no training data"),
    "weight of nothing": (["--data.train_weights", "{poe: 1.0}"], "poe", "use one of: austen"),
    "missing file": ([f"--{COMPONENT}.source.train_urls", "[no.jsonl]"], "no.jsonl", "existing"),
    "empty glob": ([f"--{COMPONENT}.source.train_urls", "[no-*.jsonl]"], "no-*.jsonl", "glob"),
    "unknown ending": (
        [f"--{COMPONENT}.source.train_urls", "[README.md]"],
        "README.md",
        ".jsonl",
    ),
    "stop strategy": (["--data.stop_strategy", "first_exhausted"], "first_exhausted", "restart"),
    "audit": (["--audit-batches", "-1"], "audit_batches = -1", "turns it off"),
    "stray word": (["train"], "'train'", "--section.field value"),
    "no value": (["--trainer.seed"], "--trainer.seed", "has no value"),
    "target unknown": (["--preflight-only", "--target", "h300:8"], "h300:8", "h200"),
    "target of no size": (["--preflight-only", "--target", "h200:9"], "h200:9", "multiple"),
    "topology": (["--preflight-only", "--target", "v5e:2x2x2"], "v5e:2x2x2", "2x4"),
    "target without a value": (["--preflight-only", "--target"], "--target", "h200:8"),
    "target in training": (["--target", "h200:8"], "attached devices only", "--preflight-only"),
    "contradiction": (["--no-preflight", "--preflight-only"], "--no-preflight", "one of them"),
    "variant": (["--variant", "faster"], "faster", "scanned_layers"),
    "guard shares": (["--guard.memory_warn", "0.99"], "memory_warn = 0.99", "memory_refuse"),
    "guard audit": (["--guard.audits.donation", "maybe"], "donation", "refuse"),
    "guard catalogue": (["--guard.catalogue", "no.yaml"], "no.yaml", "guard.catalogue"),
}


@pytest.mark.parametrize(("words", "fragments"), [(w, f) for w, *f in CASES.values()], ids=CASES)
def test_the_launcher_refuses(words, fragments, capsys, tmp_path):
    message = refuse(capsys, "--config", TINY_CONFIG, "--output_dir", tmp_path / "runs", *words)
    assert message.count("error:") == 1
    assert re.search(r"\n  fix: .", message), message
    for fragment in fragments:
        assert fragment in message
    assert "Traceback" not in message
    assert not (tmp_path / "runs").exists(), "something was written"


def test_missing_configuration(capsys, tmp_path):
    assert "no configuration" in refuse(capsys)
    assert "No such file" in refuse(capsys, "--config", tmp_path / "none.yaml")


def test_tokenizer_without_a_mask_token(capsys, tmp_path):
    source = ROOT / "corpus/austen/tokenizer"
    content = json.loads((source / "tokenizer.json").read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<mask>"]
    content["model"]["vocab"].pop("<mask>", None)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    message = refuse(capsys, "--config", TINY_CONFIG, "--data.tokenizer", tmp_path)
    assert "mask" in message and str(tmp_path) in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_unwritable_output_directory(capsys, tmp_path):
    tmp_path.chmod(0o500)
    message = refuse(capsys, "--config", TINY_CONFIG, "--output_dir", tmp_path / "runs")
    assert "output_dir" in message and "Permission denied" in message


def test_output_directory_that_is_a_file(capsys, tmp_path):
    (tmp_path / "runs").write_text("")
    message = refuse(capsys, "--config", TINY_CONFIG, "--output_dir", tmp_path / "runs")
    assert "output_dir" in message and "choose a writable one" in message


def jsonl(path, *lines):
    with gzip.open(path, "wt") as file:
        file.write("\n".join(lines) + "\n")
    return [str(path)]


def refused_by_training(tmp_path, *fragments, **kwargs):
    done = launch(tmp_path, **kwargs)
    assert done.code == 2, done.output[-3000:]
    errors = done.output[done.output.index("error:") :]
    for fragment in fragments:
        assert fragment in errors, errors
    assert "Traceback" not in done.output
    assert done.summary["exit_reason"] == "config_error"
    assert done.summary["final_step"] is None
    return done


def test_a_corrupt_line_is_named_and_skipped_only_on_demand(tmp_path):
    good = json.dumps({"text": "It is a truth universally acknowledged, " * 40})
    urls = jsonl(tmp_path / "broken.jsonl.gz", good, '{"text": "cut of', good)
    component = {"source": {"type": "url", "train_urls": urls}}
    place = f"{urls[0]}:2"
    refused_by_training(
        tmp_path, place, "skip_corrupt: true", data__components={"broken": component}
    )
    assert not list((tmp_path / "cache").rglob("shard_ledger.json")), "a half-written cache"

    component["format"] = {"skip_corrupt": True}
    done = launch(tmp_path, data__components={"broken": component}, trainer__num_train_steps=2)
    assert done.code == 0, done.output[-3000:]
    assert "skipped 1 corrupt" in done.output


def test_empty_corpus(tmp_path):
    urls = jsonl(tmp_path / "empty.jsonl.gz")
    component = {"source": {"type": "url", "train_urls": urls}}
    refused_by_training(tmp_path, "data.components.empty", data__components={"empty": component})


def test_an_accelerator_is_required_on_a_cpu(tmp_path):
    refused_by_training(
        tmp_path, "trainer.require_accelerator", "gpu or tpu", trainer__require_accelerator=True
    )


def test_batch_that_does_not_divide_over_the_devices(tmp_path):
    refused_by_training(
        tmp_path,
        "trainer.train_batch_size = 6",
        "multiple of the 4 devices",
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        trainer__train_batch_size=6,
    )


def test_every_shipped_configuration_is_valid(monkeypatch):
    for file in sorted((ROOT / "config").glob("*.yaml")):
        raw = yaml.safe_load(file.read_text())
        assert raw["model"]["type"] == "roberta"
        words = ["--config", str(file), "--no-preflight"]
        if "corpus/" not in file.read_text():
            words += ["--data.tokenizer", "corpus/austen/tokenizer"]
        train.effective_config(parse_options(words))
