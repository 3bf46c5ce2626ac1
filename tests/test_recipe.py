"""What a run is given does not depend on devices, batch split or, for evaluation, on the run."""

import json
import os
import subprocess
import sys

import pytest
from launching import ROOT, command, launch

from mlm_recipe import train

SILENT = {"trainer__tracker": {"type": "noop"}}


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("probe")
    words = command(output_dir, trainer__max_eval_batches="null", **SILENT)[3:]
    previous = os.getcwd()
    os.chdir(ROOT)
    try:
        config = train.effective_config(train.parse_options(words))
        file = train.write_effective_config(config)
    finally:
        os.chdir(previous)
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    probe = [sys.executable, str(ROOT / "tests/recipe_probe.py"), str(file)]
    done = subprocess.run(probe, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_batches_and_masks_are_the_same_on_any_number_of_devices(probed):
    assert len(set(probed["devices"].values())) == 1


def test_rows_and_masks_are_the_same_in_any_batch_size(probed):
    assert {*probed["batches"].values()} == {probed["devices"]["8"]}


def test_another_seed_gives_other_batches(probed):
    assert probed["seed 1"] != probed["devices"]["1"]


def test_evaluation_depends_on_the_model_alone(probed):
    evals = probed["evals"]
    assert evals["first"] == evals["second"] == evals["seed 1"] == evals["train rate 0.4"]
    assert evals["batch 32"] == pytest.approx(evals["first"], rel=1e-6)
    counts = ["num_masked", "mask/num_masked", "random/num_masked", "kept/num_masked"]
    assert [evals["batch 32"][c] for c in counts] == [evals["first"][c] for c in counts]
    # 15 % of the validation text's 10,358 tokens, whatever the training rate.
    assert evals["train rate 0.4"]["num_masked"] == pytest.approx(0.15 * 10358, rel=0.01)


@pytest.mark.slow
def test_training_on_8_devices_and_in_microbatches_gives_the_same_losses(tmp_path):
    settings = {
        "trainer__tracker": {"type": "json_logger"},
        "trainer__num_train_steps": 20,
        "trainer__steps_per_eval": 20,
    }
    runs = {
        "one": {},
        "eight": {"env": {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}},
        "micro": {"trainer__per_device_parallelism": 2},
    }
    losses = {}
    for run_id, changes in runs.items():
        done = launch(tmp_path, trainer__id=run_id, **settings, **changes)
        assert done.code == 0, done.output[-3000:]
        logged = [line["metrics"] for line in done.metrics if line["event"] == "log"]
        losses[run_id] = [m["train/loss"] for m in logged if "train/loss" in m][:20]
        assert len(losses[run_id]) == 20
    assert losses["eight"] == pytest.approx(losses["one"], abs=2e-5)
    assert losses["micro"] == pytest.approx(losses["one"], abs=2e-5)


@pytest.mark.slow
def test_a_memorizable_corpus_is_memorized(tmp_path):
    text = tmp_path / "verse.txt"
    text.write_text(
        "The quick brown fox jumps over the lazy dog, while seven wizards bake plum cakes. " * 40
    )
    source = {"type": "url", "train_urls": [str(text)], "validation_urls": [str(text)]}
    done = launch(
        tmp_path,
        data__components={"verse": {"source": source}},
        model__hidden_dim=64,
        model__intermediate_dim=256,
        model__num_layers=2,
        optimizer__learning_rate=3e-3,
        trainer__num_train_steps=800,
        trainer__steps_per_eval=800,
        trainer__max_eval_batches="null",
    )
    assert done.code == 0, done.output[-3000:]
    assert done.summary["eval_masked_accuracy"] > 0.95


@pytest.mark.slow
def test_ten_runs_end_with_exit_code_0(tmp_path):
    codes = []
    for index in range(10):
        done = launch(tmp_path, trainer__id=f"run-{index}", trainer__num_train_steps=3)
        codes.append(done.code)
        assert "FATAL" not in done.output and "Exception ignored" not in done.output
    assert codes == [0] * 10
