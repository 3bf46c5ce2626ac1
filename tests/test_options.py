"""Options that only a whole run can show to work, several to a run."""

import json
import math
import signal
import subprocess
import time

import numpy as np
import pytest
from launching import ROOT, command, launch

from mlm_recipe.data.example import MaskKind
from mlm_recipe.scores import EvalResult
from mlm_recipe.summary import RunSummary

SHORT = {
    "trainer__tracker": {"type": "json_logger"},
    "trainer__num_train_steps": 4,
    "trainer__steps_per_eval": 4,
    "trainer__max_eval_batches": 2,
}
RUNS = {
    "words-schedule-bf16-skip": {
        "masking__unit": "whole_word",
        "masking__rate_schedule": [{"step": 0, "rate": 0.3}, {"step": 3, "rate": 0.15}],
        "masking__interpolation": "linear",
        "trainer__mp": "p=f32,c=bf16",
        "optimizer__skip_bad_steps": True,
        "z_loss_weight": 1e-4,
    },
    "spans-watch-profiler-scan": {
        "masking__unit": "span",
        "data__packing": {"positions": "continuous"},
        "trainer__watch": {"interval": 2},
        "trainer__profiler": {"enabled": True, "start_step": 1, "num_steps": 1},
        "model__scan_layers": True,
        "model__gradient_checkpointing": True,
    },
    "batch-schedule-held-out-lion": {
        "optimizer": {"type": "lion"},
        "trainer__train_batch_size": [{"start": 0, "value": 4}, {"start": 2, "value": 8}],
        "data__num_validation_sequences": {"austen": 20},
        "data__components": {
            "austen": {"source": {"train_urls": ["corpus/austen/validation.jsonl.gz"]}}
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_a_run_with_these_options_finishes(tmp_path, changes):
    done = launch(tmp_path, **{**SHORT, **changes})
    assert done.code == 0, done.output[-3000:]
    assert done.summary["final_step"] == 4
    # Untrained: about ln 4096 = 8.3 nats.
    assert 7.5 < done.summary["eval_loss"] < 8.6


@pytest.mark.slow
def test_masks_without_a_slot_cannot_be_missed(tmp_path):
    done = launch(
        tmp_path,
        masking__selection="bernoulli",
        masking__max_masked=8,
        audit_batches=0,
        **SHORT,
    )
    assert done.code == 0, done.output[-3000:]
    logged = [line["metrics"] for line in done.metrics if line["event"] == "log"]
    counts = [metrics.get("train/mask_overflow", 0) for metrics in logged]
    assert done.summary["mask_overflow"] == sum(counts) > 0
    assert "tokens selected for masking found no slot" in done.output


@pytest.mark.slow
def test_without_validation_documents_it_says_so(tmp_path):
    source = {"train_urls": ["corpus/austen/validation.jsonl.gz"]}
    done = launch(tmp_path, **{**SHORT, "data__components": {"austen": {"source": source}}})
    assert done.code == 0, done.output[-3000:]
    assert "nothing will be evaluated" in done.output
    assert done.summary["eval_loss"] is None


@pytest.mark.slow
def test_sigterm_ends_it_with_a_summary(tmp_path):
    words = command(tmp_path, **{**SHORT, "trainer__num_train_steps": 100000})
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    log = tmp_path / "small/logs/small.log.log"
    deadline = time.monotonic() + 240
    while not log.exists() or "First train step completed" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    assert summary["exit_reason"] == "interrupted"
    assert 1 <= summary["final_step"] < 100000


def test_a_summary_is_strict_json_whatever_its_figures(tmp_path):
    path = tmp_path / "summary.json"
    RunSummary(eval_loss=math.nan, seconds={"train": math.inf, "eval": 1.5}).write(path)
    content = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(text))
    assert content["eval_loss"] is None
    assert content["seconds"] == {"train": None, "eval": 1.5}


def test_nothing_scored_is_not_a_perfect_score():
    totals = [[6.0, 1.0, 2.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    result = EvalResult.from_totals(np.array(totals))
    assert (result.all.loss, result.all.masked_accuracy, result.all.num_masked) == (3.0, 0.5, 2)
    assert result.by_kind[MaskKind.MASK.name.lower()].loss == 3.0
    assert math.isnan(result.by_kind["random"].loss)
    assert math.isnan(result.by_kind["kept"].perplexity)
