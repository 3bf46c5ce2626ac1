"""What is remembered, under which key, and for how long."""

import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlm_recipe.guard import verdicts
from mlm_recipe.guard.hardware import attached_platform, hardware_identity
from mlm_recipe.guard.types import Failure, FailureKind, Variant
from mlm_recipe.guard.verdicts import VerdictMemory, verdict_key, versions, worth_remembering

CRASH = Failure(
    FailureKind.COMPILE_CRASH, "a.cc: x", remedies=("no_autotune",), refs=("o/r#1",), flags=("f",)
)
DAY = 86400.0


def key(**changes: Any) -> str:
    question: dict[str, Any] = {
        "program": "abc",
        "versions": {"jax": "1", "jaxlib native": "d"},
        "target": "h200:8",
        "environ": {"XLA_FLAGS": "--xla_a=1 --xla_b=2", "HOME": "/x"},
        "variant": Variant("as_configured"),
        "mode": "compile",
    }
    return verdict_key(**{**question, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"environ": {"XLA_FLAGS": "--xla_b=2 --xla_a=1"}},
        {"environ": {"XLA_FLAGS": "--xla_a=0 --xla_a=1 --xla_b=2"}},
        {"environ": {"XLA_FLAGS": "--xla_a=1 --xla_b=2 --xla_dump_to=/tmp", "LANG": "C"}},
        {
            "environ": {
                "XLA_FLAGS": "--xla_a=1 --xla_b=2",
                "JAX_COMPILATION_CACHE_DIR": "c",
                "JAX_ENABLE_COMPILATION_CACHE": "0",
                "JAX_LOGGING_LEVEL": "DEBUG",
            }
        },
        {"versions": {"jaxlib native": "d", "jax": "1"}},
        {"variant": Variant("other name", cost="dear")},
    ],
)
def test_equal_questions_have_one_key(changes: dict[str, Any]) -> None:
    assert key(**changes) == key()


@pytest.mark.parametrize(
    "changes",
    [
        {"program": "abd"},
        {"versions": {"jax": "1", "jaxlib native": "e"}},
        {"target": "h200:4"},
        {"environ": {"XLA_FLAGS": "--xla_a=1"}},
        {"environ": {"XLA_FLAGS": "--xla_a=1 --xla_b=2", "LIBTPU_INIT_ARGS": "--x=1"}},
        {"environ": {"XLA_FLAGS": "--xla_a=1 --xla_b=2", "JAX_ENABLE_X64": "1"}},
        {"variant": Variant("v", overrides={"model.scan_layers": False})},
        {"variant": Variant("v", env={"NCCL_NVLS_ENABLE": "0"})},
        {"mode": "execute:2"},
    ],
)
def test_different_questions_have_different_keys(changes: dict[str, Any]) -> None:
    assert key(**changes) != key()


def test_a_pass_is_remembered_with_what_was_kept(tmp_path: Path) -> None:
    memory = VerdictMemory(tmp_path / "verdicts")
    assert memory.find("k") is None
    assert memory.remember("k", None, {"variant": "no_autotune", "need": 3})
    found = memory.find("k", now=time.time() + 1000 * DAY)
    assert found is not None and found.passed and found.failure is None
    assert found.payload == {"variant": "no_autotune", "need": 3}
    assert stat.S_IMODE((tmp_path / "verdicts").stat().st_mode) == 0o700
    assert os.listdir(tmp_path / "verdicts") == ["k.json"]
    memory.forget("k")
    assert memory.find("k") is None


def test_a_failure_is_remembered_whole_and_for_its_time(tmp_path: Path) -> None:
    memory = VerdictMemory(tmp_path, remember_days=14)
    memory.remember("k", CRASH, {}, now=1000.0)
    found = memory.find("k", now=1000.0 + 13.9 * DAY)
    assert found is not None and found.failure == CRASH and not found.passed
    assert memory.find("k", now=1000.0 + 14.1 * DAY) is None
    assert memory.find("k", now=900.0) is None  # a clock that went back
    assert VerdictMemory(tmp_path, force=True).find("k", now=1000.0) is None
    assert not VerdictMemory(tmp_path, remember_days=0).remember("j", CRASH, {})


@pytest.mark.parametrize(
    ("failure", "kept"),
    [
        (CRASH, True),
        (replace(CRASH, transient=True), False),
        (replace(CRASH, kind=FailureKind.NUMERIC_MISMATCH), True),
        (replace(CRASH, kind=FailureKind.AUDIT_FAILED), True),
        (replace(CRASH, kind=FailureKind.TIMEOUT), False),
        (replace(CRASH, kind=FailureKind.INFRASTRUCTURE), False),
        (replace(CRASH, kind=FailureKind.ENVIRONMENT), False),
        (replace(CRASH, kind=FailureKind.UNKNOWN), False),
        (Failure(FailureKind.OUT_OF_MEMORY, "s", reason="device", phase="compiled"), True),
        (Failure(FailureKind.OUT_OF_MEMORY, "s", reason="device", phase="budgeted"), False),
        (Failure(FailureKind.OUT_OF_MEMORY, "s", reason="host", phase="compile_begin"), False),
        (None, True),
    ],
)
def test_only_what_comes_again_is_remembered(failure: Failure | None, kept: bool) -> None:
    assert worth_remembering(failure) is kept


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema_version": 1}', '{"schema_version": 99, "failure": null}']
)
def test_a_torn_or_foreign_file_is_no_memory(tmp_path: Path, text: str) -> None:
    (tmp_path / "k.json").write_text(text)
    assert VerdictMemory(tmp_path).find("k") is None


def test_memory_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not VerdictMemory(tmp_path / "file" / "below").remember("k", None, {})


def test_two_writers_leave_one_whole_file(tmp_path: Path) -> None:
    memories = [VerdictMemory(tmp_path) for _ in range(2)]
    for index in range(20):
        assert memories[index % 2].remember("k", None, {"index": index})
    found = VerdictMemory(tmp_path).find("k")
    assert found is not None and found.payload["index"] == 19
    assert os.listdir(tmp_path) == ["k.json"]


def test_digests_follow_the_bytes_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib.so"

    class Package:
        version = "1.0"
        files = (Path("lib.so"), Path("data.txt"))

        def locate_file(self, entry: Path) -> Path:
            return tmp_path / entry

    def distribution(name: str) -> Package:
        if name != "jaxlib":
            raise verdicts.importlib.metadata.PackageNotFoundError(name)
        return Package()

    monkeypatch.setattr(verdicts.importlib.metadata, "distribution", distribution)
    digests, seen = tmp_path / "digests.json", []
    for content in (b"one", b"one", b"three"):
        library.write_bytes(content)
        os.utime(library, ns=(len(content), len(content)))
        seen.append(versions(digests)["jaxlib native"])
    assert seen[0] == seen[1] != seen[2]
    assert versions(None)["jaxlib native"] == seen[2]
    os.utime(library, ns=(7, 7))  # a new time alone is read again, and found to be the same
    assert versions(digests)["jaxlib native"] == seen[2]


def test_a_warm_lookup_reads_no_library_and_nothing_imports_jax(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from mlm_recipe.guard import verdicts, hardware;"
        f"path = pathlib.Path({str(tmp_path / 'd.json')!r});"
        "first = verdicts.versions(path);"
        "verdicts.hashlib.file_digest = None;"
        "assert verdicts.versions(path) == first;"
        "assert len(first['jaxlib native']) == 64;"
        "hardware.hardware_identity();"
        "assert 'jax' not in sys.modules and 'jaxlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_hardware_names_gpus_by_their_driver(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1'\necho 'NVIDIA H200, 570.1'\n")
    program.chmod(0o755)
    found = hardware_identity({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"})
    assert found["gpus"] == ["NVIDIA H200, 570.1"] * 2
    assert found["visible_gpus"] == "0" and len(found["cpu_features"]) in (0, 16)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (broken / "nvidia-smi").chmod(0o755)
    found = hardware_identity({"PATH": str(broken)})
    assert found["gpus"] == "nvidia-smi: CalledProcessError"


def test_the_platform_asked_for_is_the_one_attached(tmp_path: Path) -> None:
    for asked, platform in (("cpu", "cpu"), ("cuda,cpu", "cuda"), ("gpu", "cuda"), ("tpu", "tpu")):
        assert attached_platform({"JAX_PLATFORMS": asked}) == platform
    assert attached_platform({"PATH": str(tmp_path)}) in ("cpu", "tpu")
