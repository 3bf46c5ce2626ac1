"""The launcher with its guard: real children, real deaths, real training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, command, launch

sys.path.insert(0, str(ROOT / "scripts"))
from inject_fault import fault_environment  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.slow

# One train step instead of two, and no W&B: what takes time here is imports and compilation.
GUARDED = {
    "guard__preflight": True,
    "trainer__tracker": {"type": "json_logger"},
    "trainer__watch": {"watch_targets": []},
}


def report(run):
    (target,) = json.loads((run.run_dir / "preflight.json").read_text())["targets"]
    return target


@pytest.fixture(scope="module", params=[1, 8])
def proved(request, tmp_path_factory):
    """A fresh run after a preflight, on so many virtual devices."""
    output = tmp_path_factory.mktemp(f"on{request.param}")
    env = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={request.param}"}
    done = launch(output, env=env, trainer__id="fresh", **GUARDED)
    assert done.code == 0, done.output[-4000:]
    return output, env, done


def test_training_compiles_its_step_zero_times(proved):
    _, _, fresh = proved
    assert report(fresh)["exit_code"] == 0
    assert fresh.summary["train_step_compiles"] == 0
    assert fresh.summary["train_step_cache_hits"] >= 1
    assert fresh.summary["variant"] == "as_configured"
    (logged,) = [m for m in fresh.metrics if "guard/verdict" in str(m)][:1]
    assert "guard/attempts" in str(logged)


def test_a_resumed_run_compiles_its_step_zero_times_too(proved):
    output, env, _ = proved
    more = {**GUARDED, "trainer__num_train_steps": 9}
    again = launch(output, env=env, trainer__id="fresh", **more)
    assert again.code == 0, again.output[-4000:]
    assert again.summary["resumed_from_step"] == 6
    assert again.summary["train_step_compiles"] == 0
    assert again.summary["train_step_cache_hits"] >= 1


def test_a_pass_is_remembered_and_force_forgets(proved):
    output, env, _ = proved
    if "count=8" in env["XLA_FLAGS"]:
        return  # once is enough
    only = {**GUARDED, "trainer__id": "again"}
    again = launch(output, "--preflight-only", env=env, **only)
    assert again.code == 0, again.output[-2000:]
    assert [a["remembered"] for a in report(again)["attempts"]] == [True]
    assert not (again.run_dir / "guard").exists(), "a child was started"
    assert not (again.run_dir / "checkpoints").exists()
    forced = launch(output, "--preflight-only", "--force", env=env, **only)
    assert [a["remembered"] for a in report(forced)["attempts"]] == [False]


def test_a_planted_death_ends_trained_by_a_fallback(tmp_path):
    env = fault_environment("abort@compile_begin")
    done = launch(tmp_path, env=env, timeout=900, **GUARDED)
    assert done.code == 0, done.output[-4000:]
    assert done.summary["exit_reason"] == "finished"
    found = report(done)
    assert found["verdict"] == "fallback" and found["exit_code"] == 10
    assert done.summary["variant"] == found["variant"]["name"] != "as_configured"
    assert done.summary["train_step_compiles"] == 0
    first = found["attempts"][0]
    assert first["failure"]["kind"] == "compile_crash"
    assert first["failure"]["phase"] == "compile_begin"
    assert (ROOT / first["bundle"] / "repro.sh").exists()
    config = (done.run_dir / "config.yaml").read_text()
    assert f"variant: {found['variant']['name']}" in config


DYING = {
    **GUARDED,
    "guard__preflight": False,
    "trainer__num_train_steps": 60,
    "trainer__steps_per_eval": 60,
    "trainer__checkpointer__keep": [{"every": 10}],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    done = launch(tmp_path_factory.mktemp("whole"), **DYING)
    assert done.code == 0, done.output[-3000:]
    return done


def test_a_transient_death_goes_on_from_the_checkpoint_as_if_nothing_was(tmp_path, undisturbed):
    env = {**fault_environment(""), "INJECT_TRAINING": f"124@{tmp_path}"}
    done = launch(tmp_path, env=env, **DYING)
    assert done.code == 0, done.output[-4000:]
    (line,) = (done.run_dir / "deaths.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "timeout" and json.loads(line)["action"] == "restart"
    assert done.summary["resumed_from_step"] >= 10
    for key in ("eval_loss", "eval_by_kind", "train_loss", "tokens_seen"):
        assert done.summary[key] == undisturbed.summary[key], key


def test_a_death_that_would_come_again_goes_on_as_another_variant(tmp_path, undisturbed):
    env = {**fault_environment(""), "INJECT_TRAINING": f"oom@{tmp_path}"}
    done = launch(tmp_path, env=env, timeout=900, **DYING)
    assert done.code == 0, done.output[-4000:]
    line = json.loads((done.run_dir / "deaths.jsonl").read_text().splitlines()[0])
    assert (line["kind"], line["action"]) == ("out_of_memory", "next_variant")
    assert done.summary["variant"] != "as_configured"
    assert done.summary["resumed_from_step"] >= 10
    assert done.summary["eval_loss"] == pytest.approx(undisturbed.summary["eval_loss"], rel=1e-3)


def test_the_contract_of_exit_codes_is_handed_on_when_the_budget_is_spent(tmp_path):
    env = {**fault_environment(""), "INJECT_TRAINING": f"125@{tmp_path}"}
    done = launch(tmp_path, env=env, guard__restarts=0, **DYING)
    assert done.code == 125


def descendants_with(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_no_child_behind(tmp_path, number):
    mark = f"LAUNCH_MARK={tmp_path.name}-{number}"
    process = subprocess.Popen(
        command(tmp_path, **GUARDED),
        cwd=ROOT,
        env={**os.environ, **dict([mark.split("=")])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while len(descendants_with(mark)) < 3:  # the launcher, a child of the guard, a trainer
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(number)
    process.wait(60)
    deadline = time.monotonic() + 30
    while descendants_with(mark) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert descendants_with(mark) == []
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)


def test_two_launches_at_once_do_not_disturb_each_other(tmp_path):
    words = [command(tmp_path, trainer__id=name, **GUARDED) for name in ("one", "two")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT}
    both = [subprocess.Popen(each, **pipes) for each in words]
    outputs = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], (
        outputs[0][-2000:] + outputs[1][-2000:]
    )
    losses = {
        json.loads((tmp_path / n / "summary.json").read_text())["eval_loss"] for n in ("one", "two")
    }
    assert len(losses) == 1
