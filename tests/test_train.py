"""The launcher and the training program, end to end in child processes."""

import glob
import json
import os
import struct
from pathlib import Path

import pytest
from launching import ROOT, launch
from wandb.proto import wandb_internal_pb2


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run with every kind of tracker, on a machine without git and with no home to write."""
    output_dir = tmp_path_factory.mktemp("runs")
    trackers = [
        {"type": "wandb", "project": "test", "mode": "offline", "save_code": False},
        {"type": "json_logger"},
        {"type": "json_file"},
        {"type": "tensorboard"},
    ]
    python_only = f"{ROOT / '.venv/bin'}"
    env = {"HOME": "/proc/none", "PATH": python_only}
    return launch(output_dir, env=env, trainer__tracker=trackers)


def test_it_ends_with_0_after_the_last_step(finished):
    assert finished.code == 0, finished.output[-3000:]
    assert "Exception ignored" not in finished.output
    assert "Traceback" not in finished.output


def test_everything_it_wrote_is_in_the_run_directory(finished):
    names = {path.name for path in finished.run_dir.iterdir()}
    assert {"config.yaml", "summary.json", "checkpoints", "logs", "wandb", "tensorboard"} <= names
    around = {path.name for path in finished.run_dir.parent.iterdir()}
    assert around == {"small", "cache", "train.jsonl", "validation.jsonl"}


def test_summary_says_what_it_learned(finished):
    summary = finished.summary
    assert summary["exit_reason"] == "finished"
    assert summary["final_step"] == summary["num_train_steps"] == 6
    assert summary["tokens_seen"] == 6 * 8 * 64
    assert 0.9 < summary["useful_token_share"] <= 1.0
    assert summary["num_parameters"] == num_parameters(vocab=4096, positions=66, width=32, mlp=64)
    # ln 4096 = 8.32 for an untrained model; the unigram entropy of the text 6.28.
    assert 7.5 < summary["eval_loss"] < 8.5
    assert summary["unigram_nats"] == pytest.approx(6.28047, abs=1e-5)
    kinds = summary["eval_by_kind"]
    total = sum(kind["num_masked"] for kind in kinds.values())
    mean = sum(kind["loss"] * kind["num_masked"] for kind in kinds.values()) / total
    assert mean == pytest.approx(summary["eval_loss"], rel=1e-6)
    assert kinds["mask"]["num_masked"] / total == pytest.approx(0.8, abs=0.06)
    assert summary["device"]["backend"] == "cpu"
    assert summary["versions"]["jax"] == "0.11.2"
    assert {"imports", "initialize", "data", "state", "first_step", "train"} <= set(
        summary["seconds"]
    )


def num_parameters(*, vocab, positions, width, mlp):
    """One layer, written out as Hugging Face lays it out."""
    norm = 2 * width
    embeddings = (vocab + positions + 1) * width + norm
    layer = 4 * (width * width + width) + norm + 2 * width * mlp + mlp + width + norm
    head = width * width + width + norm + vocab
    return embeddings + layer + head


def test_metrics_reach_every_tracker(finished):
    logged = [line for line in finished.metrics if line["event"] == "log"]
    evals = [line for line in logged if "eval/loss" in line["metrics"]]
    assert [line["step"] for line in evals] == [2, 5]
    losses = [line["metrics"]["train/loss"] for line in logged if "train/loss" in line["metrics"]]
    assert len(losses) >= 6
    results = json.loads((finished.run_dir / "eval_results.json").read_text())
    assert results["summary/final_step"] == 6
    assert glob.glob(str(finished.run_dir / "tensorboard/**/events.*"), recursive=True)


def test_the_offline_wandb_run_holds_the_facts(finished):
    config, summary = read_wandb(finished.run_dir)
    assert config["model"]["hidden_dim"] == 32
    assert config["optimizer"]["beta2"] == 0.98
    for key in (
        "run/device_kind",
        "run/num_parameters",
        "versions/jax",
        "masking_audit/masked_rate",
        "eval/loss",
        "eval/perplexity",
        "eval/masked_accuracy",
        "eval/mask/loss",
        "eval/random/masked_accuracy",
        "eval/kept/masked_accuracy",
        "train/loss",
        "train/masked_accuracy",
        "train/tokens_seen",
        "throughput/tokens_per_second",
        "throughput/useful_tokens_per_second",
        "summary/exit_reason",
    ):
        assert key in summary, key


def read_wandb(run_dir):
    """Configuration and last value of every key in the offline run file."""
    (path,) = glob.glob(str(run_dir / "wandb/offline-run-*/run-*.wandb"))
    config, summary = {}, {}
    for data in leveldb_records(Path(path).read_bytes(), header=7):
        record = wandb_internal_pb2.Record.FromString(data)  # pyright: ignore[reportAttributeAccessIssue]  # made at import
        updates = [*record.run.config.update, *record.config.update]
        config |= {u.key: json.loads(u.value_json) for u in updates if u.key}
        for item in [*record.summary.update, *record.run.summary.update, *record.history.item]:
            summary[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return config, summary


def leveldb_records(content, *, header):
    """Records of a LevelDB log: 32 KiB blocks of (crc32, length, type) and data."""
    data, offset = b"", header
    while offset + 7 <= len(content):
        room = 32768 - offset % 32768
        if room < 7:
            offset += room
            continue
        length, kind = struct.unpack("<HB", content[offset + 4 : offset + 7])
        data += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield data
            data = b""


def test_json_of_the_effective_configuration_is_what_ran(finished):
    text = (finished.run_dir / "config.yaml").read_text()
    assert "id: small" in text
    assert os.fspath(finished.run_dir / "checkpoints") in text
