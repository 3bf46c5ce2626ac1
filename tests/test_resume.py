"""A run killed with SIGKILL and started again ends bit for bit where it would have ended."""

import json
import os
import signal
import subprocess
import time

import pytest
import tensorstore as ts
from launching import ROOT, command, launch

pytestmark = pytest.mark.slow

# Dropout on, so that its stream is tested too; steps enough that the kill falls between them.
SETTINGS = {
    "model__hidden_dropout": 0.1,
    "model__attention_dropout": 0.1,
    "trainer__num_train_steps": 120,
    "trainer__steps_per_eval": 60,
    "trainer__tracker": {"type": "json_logger"},
    "trainer__checkpointer__keep": [{"every": 10}],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    done = launch(tmp_path_factory.mktemp("resume"), trainer__id="whole", **SETTINGS)
    assert done.code == 0, done.output[-3000:]
    return done


def kill_after_first_checkpoint(output_dir, run_id):
    """Start a run and SIGKILL it once a checkpoint is committed and steps went past it."""
    process = subprocess.Popen(
        command(output_dir, trainer__id=run_id, **SETTINGS),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    checkpoints = output_dir / run_id / "checkpoints"
    deadline = time.monotonic() + 240
    while not list(checkpoints.glob("step-*/metadata.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def resumed(whole):
    output_dir = whole.run_dir.parent
    kill_after_first_checkpoint(output_dir, "killed")
    assert not (output_dir / "killed/summary.json").exists()
    done = launch(output_dir, trainer__id="killed", **SETTINGS)
    assert done.code == 0, done.output[-3000:]
    return done


def arrays(checkpoint):
    """Stored bytes of every array of a checkpoint, by name."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{checkpoint}/"}).result()
    return {key: store.read(key).result().value for key in store.list().result()}


def losses(run):
    """Loss by step, as printed: JSON keeps every bit of a float."""
    logged = (line for line in run.metrics if line["event"] == "log")
    steps = {line["step"]: line["metrics"] for line in logged if "train/loss" in line["metrics"]}
    return {step: json.dumps(metrics["train/loss"]) for step, metrics in steps.items()}


def test_parameters_optimizer_and_streams_are_equal_bit_for_bit(whole, resumed):
    last = "checkpoints/step-119"
    expected, got = arrays(whole.run_dir / last), arrays(resumed.run_dir / last)
    assert len(expected) > 100
    assert expected.keys() == got.keys()
    assert [key for key in expected if expected[key] != got[key]] == []


def test_it_resumed_rather_than_repeated(whole, resumed):
    start = resumed.summary["resumed_from_step"]
    assert start is not None and 10 < start <= 120
    expected, got = losses(whole), losses(resumed)
    assert min(got) == start
    assert {step: expected[step] for step in got} == got


def test_evaluation_is_equal(whole, resumed):
    for key in ("eval_loss", "eval_masked_accuracy", "eval_by_kind", "unigram_nats"):
        assert whole.summary[key] == resumed.summary[key], key
    assert whole.summary["tokens_seen"] == resumed.summary["tokens_seen"]


def test_a_finished_run_started_again_is_a_success_without_training(whole):
    again = launch(whole.run_dir.parent, trainer__id="whole", **SETTINGS)
    assert again.code == 0, again.output[-3000:]
    assert again.summary["final_step"] == 120
    assert again.summary["eval_loss"] == whole.summary["eval_loss"]
    assert again.summary["train_loss"] is None


def test_data_that_ends_early_is_a_failure(tmp_path):
    # One novel of 2,000 words, so that its end comes soon.
    text = tmp_path / "text.txt"
    text.write_text("It was a truth, universally acknowledged, and yet. " * 250)
    component = {"source": {"type": "url", "train_urls": [str(text)]}}
    done = launch(
        tmp_path,
        data__components={"novel": component},
        data__stop_strategy="all_exhausted",
        trainer__num_train_steps=10000,
    )
    assert done.code == 1, done.output[-3000:]
    assert done.summary["exit_reason"] == "data_exhausted"
    assert 0 < done.summary["final_step"] < 10000
    assert f"ended at step {done.summary['final_step']} of 10000" in done.output
    assert "num_train_steps" in done.summary["error"]
