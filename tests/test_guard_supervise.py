"""supervise: real processes that end, hang, grow, fork away; nothing of them is left."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mlm_recipe.guard.processes import descendants
from mlm_recipe.guard.status import PhaseFile
from mlm_recipe.guard.supervise import HEAD_BYTES, TAIL_BYTES, Limits, supervise

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
MIB = 2**20


def run(tmp_path: Path, code: str, *, limits: Limits | None = None, **kwargs):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return supervise(
        command,
        env=os.environ,
        log_path=tmp_path / "log.txt",
        limits=limits or Limits(seconds=60),
        **kwargs,
    )


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def gone(pid: int, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.parametrize(
    ("code", "returncode"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
    ],
)
def test_it_ends_as_the_command_did(tmp_path, code, returncode):
    ended = run(tmp_path, code)
    assert ended.returncode == returncode
    assert not ended.timed_out and not ended.over_memory
    assert ended.phase is None
    assert ended.command[0] == sys.executable


def test_frames_of_a_crash_and_no_core_file(tmp_path):
    code = """
    import ctypes, resource
    print("core", resource.getrlimit(resource.RLIMIT_CORE)[0], flush=True)
    def inner(): ctypes.string_at(0)
    inner()
    """
    ended = run(tmp_path, code, cwd=tmp_path)
    assert "core 0\n" in ended.log_tail
    assert "Fatal Python error: Segmentation fault" in ended.log_tail
    assert "in inner" in ended.log_tail
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]


def test_signal_dispositions_and_stdin_are_ordinary(tmp_path):
    code = """
    import signal, sys
    print(repr(sys.stdin.read()))
    mask = next(l.split()[1] for l in open("/proc/self/status") if l.startswith("SigIgn"))
    print("ignored", int(mask, 16) & ~(1 << signal.SIGPIPE - 1) & ~(1 << signal.SIGXFSZ - 1))
    """
    assert run(tmp_path, code).log_tail == "''\nignored 0\n"
    shell = supervise(
        ["sh", "-c", "grep SigIgn /proc/self/status"],
        env=os.environ,
        log_path=tmp_path / "shell.txt",
        limits=Limits(),
    )
    assert int(shell.log_tail.split()[1], 16) == 0


def test_a_command_that_is_not_there(tmp_path):
    ended = supervise(
        ["no-such-command"], env=os.environ, log_path=tmp_path / "log", limits=Limits()
    )
    assert ended.returncode == 127
    assert "no-such-command: command cannot be run" in ended.log_tail


def test_deadline_prints_where_it_hung(tmp_path):
    code = """
    import time
    def waits_forever(): time.sleep(600)
    waits_forever()
    """
    ended = run(tmp_path, code, limits=Limits(seconds=0.7, grace_seconds=1))
    assert ended.timed_out and not ended.over_memory
    assert 0.7 <= ended.seconds < 4
    assert "in waits_forever" in ended.log_tail


def test_grace_lets_it_clean_up_and_ends_in_sigkill(tmp_path):
    code = """
    import signal, time, sys
    def handler(*_):
        print("asked to stop", flush=True)
        if sys.argv[-1] == "nice": raise SystemExit(5)
    signal.signal(signal.SIGTERM, handler)
    while True: time.sleep(0.05)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    common = {"env": os.environ, "limits": Limits(seconds=0.7, grace_seconds=0.5)}
    nice = supervise([*command, "nice"], log_path=tmp_path / "nice", **common)
    stubborn = supervise([*command, "stubborn"], log_path=tmp_path / "stubborn", **common)
    assert (nice.returncode, nice.timed_out) == (5, True)
    assert (stubborn.returncode, stubborn.timed_out) == (-signal.SIGKILL, True)
    assert nice.log_tail == stubborn.log_tail == "asked to stop\n"


def test_deadline_of_a_phase(tmp_path):
    code = f"""
    import sys, time
    from pathlib import Path
    from mlm_recipe.guard.status import PhaseFile
    phases = PhaseFile(Path({str(tmp_path / "phase.json")!r}))
    phases.reach("start"); time.sleep(1.2)
    phases.reach("compile_begin"); time.sleep(600)
    """
    limits = Limits(seconds=60, phase_seconds={"compile_begin": 0.6}, grace_seconds=1)
    ended = run(tmp_path, code, limits=limits, phase_file=tmp_path / "phase.json")
    assert ended.timed_out
    assert ended.phase == "compile_begin"
    assert 1.8 <= ended.seconds < 8
    assert ended.phase_seconds["compile_begin"] >= 1.2


def test_an_old_phase_file_is_not_believed(tmp_path):
    PhaseFile(tmp_path / "phase.json").reach("done")
    ended = run(tmp_path, "raise SystemExit(1)", phase_file=tmp_path / "phase.json")
    assert ended.phase is None


@pytest.mark.parametrize("promised", [True, False])
def test_sigusr1_only_where_it_is_promised(tmp_path, promised):
    phase_file = tmp_path / "phase.json"
    code = f"""
    import faulthandler, signal, time
    from pathlib import Path
    from mlm_recipe.guard.status import PhaseFile
    signal.signal(signal.SIGTERM, lambda *_: exit(9))
    if {promised}: faulthandler.register(signal.SIGUSR1, all_threads=True)
    PhaseFile(Path({str(phase_file)!r}), dumps_on_sigusr1={promised}).reach("budgeted")
    def in_the_step():
        while True: time.sleep(0.05)
    in_the_step()
    """
    ended = run(tmp_path, code, limits=Limits(seconds=1.5, grace_seconds=2), phase_file=phase_file)
    assert ended.timed_out and ended.returncode == 9  # SIGUSR1 unasked would have killed it
    assert ("in in_the_step" in ended.log_tail) == promised


def test_memory_ceiling_counts_all_processes(tmp_path):
    code = """
    import subprocess, sys, time
    part = "x = bytearray(60 * 2**20); import time; time.sleep(600)"
    children = [subprocess.Popen([sys.executable, "-c", part]) for _ in range(3)]
    print(*(child.pid for child in children), flush=True)
    time.sleep(600)
    """
    ended = run(tmp_path, code, limits=Limits(seconds=60, memory_bytes=150 * MIB))
    assert ended.over_memory and not ended.timed_out
    assert ended.returncode == -signal.SIGKILL
    assert 150 * MIB < ended.peak_rss < 400 * MIB
    assert all(gone(int(pid)) for pid in ended.log_tail.split())


def test_peak_memory_of_one_that_fits(tmp_path):
    code = "x = bytearray(80 * 2**20); import time; time.sleep(0.6)"
    ended = run(tmp_path, code, limits=Limits(memory_bytes=300 * MIB))
    assert ended.returncode == 0
    assert 80 * MIB < ended.peak_rss < 160 * MIB


DAEMON = """
import os, subprocess, sys, time
code = "import os; os.fork() and os._exit(0); os.setsid(); import time; time.sleep(600)"
near = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
far = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
far.wait()
pids = [int(p) for p in os.listdir("/proc") if p.isdigit()]
def line(pid):
    try: return open(f"/proc/{pid}/cmdline").read()
    except OSError: return ""
daemon = [pid for pid in pids if "os.setsid(); import time" in line(pid) and pid != os.getpid()]
daemon = [pid for pid in daemon if "DAEMON" not in line(pid) and "near =" not in line(pid)]
print(os.getpid(), near.pid, *daemon, flush=True)
"""


@pytest.mark.parametrize("end", ["pass", "time.sleep(600)", "os._exit(3)"])
def test_grandchildren_and_daemons_end_with_it(tmp_path, end):
    ended = run(tmp_path, DAEMON + end, limits=Limits(seconds=3, grace_seconds=1))
    pids = [int(word) for word in ended.log_head.splitlines()[0].split()]
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)


def test_head_and_tail_of_a_huge_output(tmp_path):
    code = """
    import sys
    sys.stdout.write("first line\\n")
    for index in range(100_000): sys.stdout.write(f"{index:07d} {'x' * 40}\\n")
    sys.stdout.write("last line\\n")
    """
    ended = run(tmp_path, code)
    size = Path(ended.log_path).stat().st_size
    assert size == 100_000 * 49 + len("first line\nlast line\n")
    assert len(ended.log_head) == HEAD_BYTES and ended.log_head.startswith("first line\n0000000 ")
    assert len(ended.log_tail) == TAIL_BYTES and ended.log_tail.endswith("\nlast line\n")


SUPERVISOR = """
import os, sys, signal
from pathlib import Path
from mlm_recipe.guard.supervise import Limits, supervise
child = "import subprocess, sys, os, time; "
child += "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
child += "start_new_session=True); print(os.getpid(), c.pid, flush=True); time.sleep(600)"
try:
    supervise([sys.executable, "-c", child], env=os.environ, log_path=Path(sys.argv[1]),
              limits=Limits(grace_seconds=1))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_supervisor_that_dies_leaves_nothing(tmp_path, number):
    log = tmp_path / "log"
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(log)], stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (log.exists() and log.read_text().endswith("\n")):
        time.sleep(0.05)
    pids = [int(word) for word in log.read_text().split()]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    tree = descendants(supervisor.pid)
    assert set(pids) < set(tree)
    supervisor.send_signal(number)
    output, _ = supervisor.communicate(timeout=20)
    assert supervisor.returncode == (0 if number == signal.SIGINT else -number)
    assert output == ("interrupted\n" if number == signal.SIGINT else "")
    assert all(gone(pid) for pid in tree)


def test_the_record_of_an_exit_is_json(tmp_path):
    from mlm_recipe.guard.record import failure_record, write_record

    ended = run(tmp_path, "print('hello')")
    write_record(tmp_path / "record.json", failure_record(ended, None))
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["kind"] is None
    assert (record["exit_code"], record["signal"]) == (0, None)
    assert record["log_head"] == record["log_tail"] == "hello\n"
    assert record["schema_version"] == 1
    assert not list(tmp_path.glob(".record*"))
