"""``python -m mlm_recipe.guard``: records, exit codes, output as it comes, and nothing left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOGS = Path(__file__).parent / "golden" / "logs"
GUARD = [sys.executable, "-m", "mlm_recipe.guard"]


def guard(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GUARD, *arguments], capture_output=True, text=True, timeout=60, **kwargs
    )


def python(code: str) -> list[str]:
    return ["--", sys.executable, "-c", code]


def record_of(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict]:
    done = guard("--json", str(tmp_path / "deep" / "record.json"), *arguments)
    return done, json.loads((tmp_path / "deep" / "record.json").read_text())


def test_a_success_is_quiet(tmp_path):
    code = "import sys; print('hello', flush=True); sys.stderr.write('e')"
    done, record = record_of(tmp_path, *python(code))
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\ne", "")
    assert record["kind"] is None and record["exit_code"] == 0 and record["signal"] is None


def test_a_crash_is_told_apart_and_recorded(tmp_path):
    log = (LOGS / "levanter_727.txt").as_posix()
    code = f"import os, sys; sys.stdout.write(open({log!r}).read()); sys.stdout.flush(); os.abort()"
    done, record = record_of(tmp_path, "--log", str(tmp_path / "kept.txt"), *python(code))
    assert done.returncode == 128 + signal.SIGABRT
    assert done.stdout == (tmp_path / "kept.txt").read_text()
    wanted = {
        "kind": "compile_crash",
        "signature": "shape_tree.cc: result->children_start_id >= 0 (DynamicSliceFusion)",
        "phase": "compile_begin",
        "signal": "SIGABRT",
        "exit_code": None,
        "schema_version": 1,
        "timed_out": False,
        "log_path": str(tmp_path / "kept.txt"),
    }
    assert {name: record[name] for name in wanted} == wanted
    assert record["remedies"][0] == "no_dynamic_slice_fusion"
    assert "marin-community/levanter#727" in record["refs"]
    assert record["seconds"] > 0 and record["command"][0] == sys.executable
    for word in ("compile_crash", "SIGABRT", "no_dynamic_slice_fusion", "levanter#727"):
        assert word in done.stderr


def test_its_own_exit_code(tmp_path):
    done, record = record_of(tmp_path, *python("raise SystemExit(41)"))
    assert done.returncode == record["exit_code"] == 41
    done, record = record_of(tmp_path, *python("{}['a']"))
    assert (done.returncode, record["kind"], record["ladder"]) == (1, "config_error", False)
    assert record["signature"] == "KeyError: 'a'"


def test_deadline(tmp_path):
    done, record = record_of(
        tmp_path, "--timeout", "0.6", "--grace", "1", *python("import time; time.sleep(99)")
    )
    assert done.returncode == 124
    assert record["kind"] == "timeout" and record["timed_out"] is True
    assert "deadline" in done.stderr


def test_memory_ceiling(tmp_path):
    code = "import time; x = bytearray(200 * 2**20); time.sleep(99)"
    done, record = record_of(tmp_path, "--memory-gib", "0.1", *python(code))
    assert done.returncode == 137
    assert (record["kind"], record["reason"]) == ("out_of_memory", "host")
    assert record["peak_rss"] > 100 * 2**20


def test_a_success_that_cannot_fit_is_none(tmp_path):
    log = (LOGS / "gpu_silent_hbm_overflow.txt").as_posix()
    done, record = record_of(tmp_path, *python(f"print(open({log!r}).read())"))
    assert done.returncode == 21
    assert (record["kind"], record["reason"]) == ("out_of_memory", "device")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a command"),
        (["--"], "give a command"),
        (["python", "x.py"], "unrecognized arguments"),
        (["--timeout", "-1", "--", "true"], "not a positive number"),
        (["--timeout", "soon", "--", "true"], "invalid"),
        (["--catalogue", "absent.yaml", "--", "true"], "cannot be read"),
        (["--log", "/proc/none/log", "--", "true"], "--log = '/proc/none/log'"),
        (["--json", "/", "--", "true"], "--json = '/'"),
        (["--json", "/dev/null", "--", "true"], "not a regular file"),
        (["--log", "/tmp/a", "--json", "/tmp/a", "--", "true"], "--log names the same file"),
    ],
)
def test_bad_usage(arguments, words):
    done = guard(*arguments)
    assert done.returncode == 2
    assert words in done.stderr and "Traceback" not in done.stderr


def test_an_older_record_is_not_read_as_this_runs(tmp_path):
    record = tmp_path / "record.json"
    record.write_text('{"kind": null}')
    words = ["--json", str(record), *python("import time; time.sleep(60)")]
    with subprocess.Popen([*GUARD, *words], stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 20
        while record.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
    assert run.returncode == 128 + signal.SIGTERM and not record.exists()


def test_help_says_what_it_does():
    text = guard("--help").stdout
    for word in ("--timeout", "--memory-gib", "--json", "--log", "--catalogue", "124", "137"):
        assert word in text
    assert "Nothing that the command started is left behind" in text


def test_the_commands_own_options_are_untouched():
    done = guard("--", sys.executable, "-c", "import sys; print(sys.argv)", "--json", "--", "-x")
    assert done.stdout == "['-c', '--json', '--', '-x']\n"


def test_users_catalogue(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "entries: [{name: mine, kind: infrastructure, patterns: [flux], advice: wait}]"
    )
    code = "raise RuntimeError('flux capacitor')"
    done, record = record_of(tmp_path, "--catalogue", str(tmp_path / "mine.yaml"), *python(code))
    assert (record["kind"], record["name"], record["advice"]) == ("infrastructure", "mine", "wait")
    assert done.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_output_comes_live_and_nothing_survives(number):
    code = (
        "import os, subprocess, sys, time\n"
        "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " start_new_session=True)\n"
        "print(os.getpid(), c.pid, flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen(
        [*GUARD, "--grace", "1", *python(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    killed = number == signal.SIGKILL
    assert process.returncode == (-number if killed else 128 + number)
    assert ("the command is ended" in stderr) != killed
    deadline = time.monotonic() + 5
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
