"""Names of targets, the table behind them, and what is said where a compiler is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlm_recipe.errors import ConfigError
from mlm_recipe.guard.targets import (
    install_command,
    known_targets,
    list_targets,
    near_cube,
    parse_target,
    targets_text,
)
from mlm_recipe.preflight import targets
from mlm_recipe.preflight.capture import capture_target
from mlm_recipe.preflight.targets import TargetUnavailableError, gpu_description, open_target

GIB = 2**30
LIMITS = {"gpu_memory_fraction": 0.75, "gpu_reserve_gib": 1.5}


@pytest.mark.parametrize(
    ("text", "platform", "topology", "count"),
    [
        ("h200:8", "cuda", "1x1x8", 8),
        ("h100", "cuda", "1x1x1", 1),
        ("h100:3", "cuda", "1x1x3", 3),
        ("a100-80:16", "cuda", "1x2x8", 16),
        ("b200:8", "cuda", "1x1x8", 8),
        ("v5e:2x4", "tpu", "v5e:2x4", 8),
        ("v5e-16", "tpu", "v5e:4x4", 16),
        ("v5e-8", "tpu", "v5e:2x4", 8),
        ("v5e:8", "tpu", "v5e:2x4", 8),
        ("v5e-1", "tpu", "v5e:1x1", 1),
        ("v5e", "tpu", "v5e:2x4", 8),
        ("v4:2x2x1", "tpu", "v4:2x2x1", 4),
        ("v4-8", "tpu", "v4:2x2x1", 4),  # named by cores, two to a chip
        ("v4:8", "tpu", "v4:2x2x2", 8),  # chips
        ("v5p-128", "tpu", "v5p:4x4x4", 64),
        ("v6e-256", "tpu", "v6e:16x16", 256),
    ],
)
def test_names(text, platform, topology, count):
    spec = parse_target(text)
    assert (spec.name, spec.platform) == (text, platform)
    assert (spec.topology, spec.count) == (topology, count)


@pytest.mark.parametrize(
    "text",
    [
        "x9", "h2000", "h200:", "h200:0", "h200:12", "h200:-1", "h200:2x4", "h200-8",
        "v5e:3x5", "v5e:2x3", "v5e:0x2", "v5e:2x2x1", "v5e-12", "v5e-", "v5e:1x3",
        "v4:2x2", "v4-3", "v5p:1x1x2", "v7x:2x2", "", "/no/such/file",
    ],
)  # fmt: skip
def test_other_names_are_refused_with_a_way_out(text):
    with pytest.raises(ConfigError) as caught:
        parse_target(text)
    assert (caught.value.field, caught.value.value) == ("--target", text)
    assert "h200:8" in caught.value.fix or caught.value.fix.startswith("give ")


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        parse_target("h300:8")
    assert all(kind in caught.value.fix for kind in ("auto", *known_targets()))


@pytest.mark.parametrize(
    ("chips", "dimensions", "shape"),
    [
        (4, 3, (2, 2, 1)), (8, 3, (2, 2, 2)), (16, 3, (2, 2, 4)), (32, 3, (2, 4, 4)),
        (2, 2, (1, 2)), (32, 2, (4, 8)), (12, 2, ()), (0, 2, ()),
    ],
)  # fmt: skip
def test_slices_are_as_square_as_they_can_be(chips, dimensions, shape):
    assert near_cube(chips, dimensions) == shape


def test_the_table_holds_plausible_figures_with_sources():
    assert set(known_targets()) == {"h100", "h200", "a100-80", "b200", "v4", "v5e", "v5p", "v6e"}
    for kind, figures in known_targets().items():
        assert 16e9 <= figures["memory"] <= 200e9, kind
        assert 0.5e12 < figures["bandwidth"] <= 8e12, kind
        assert 100e12 < figures["peak"]["bfloat16"] < 3e15, kind
        assert figures["source"], kind
        if figures["platform"] == "tpu":
            assert 0.95 * figures["memory"] < figures["available"] <= figures["memory"], kind
        else:  # TF32 is half of bfloat16 on all of these
            ratio = figures["peak"]["float32"] / figures["peak"]["bfloat16"]
            assert ratio == pytest.approx(0.5, abs=0.001), kind


def test_the_list_names_what_each_needs():
    rows = {row["kind"]: row for row in list_targets()}
    assert (rows["h200"]["extra"], rows["v5e"]["extra"]) == ("gpu", "tpu")
    assert rows["h200"]["memory"] == 141e9 and rows["v5e"]["target"] == "v5e:2x4"
    for row in rows.values():
        assert parse_target(row["target"]).count in (4, 8)
        assert row["source"] in targets_text()
        assert install_command(row["platform"]) in targets_text()


def test_a_description_follows_the_table():
    h200, a100 = (gpu_description(parse_target(kind)) for kind in ("h200", "a100-80"))
    assert "device_memory_size: 141000000000\n" in h200
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACC" in h200
    assert "memory_bandwidth: 2039000000000\n" in a100
    assert "cuda_compute_capability { major: 8 minor: 0 }" in a100
    assert h200.count("{") == h200.count("}")


def test_a_description_for_old_jax_leaves_newer_fields_out(monkeypatch):
    monkeypatch.setattr(targets, "_is_new", lambda: False)
    text = gpu_description(parse_target("h100"))
    for newer in ("feature_extension", "driver_version", "device_vendor", "runtime_version"):
        assert newer not in text
    assert "cuda_compute_capability { major: 9 minor: 0 }" in text


@pytest.mark.parametrize(("name", "command"), [
    ("h200:8", "uv sync --extra gpu"), ("v5e:2x4", "uv sync --extra tpu"),
])  # fmt: skip
def test_a_missing_compiler_names_the_command_that_brings_it(name, command, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("topology not implemented")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", refuse)
    monkeypatch.setattr(targets, "_is_installed", lambda platform: False)
    with pytest.raises(TargetUnavailableError) as caught:
        open_target(name, LIMITS.__getitem__)
    assert command in str(caught.value) and name in str(caught.value)
    monkeypatch.setattr(targets, "_is_installed", lambda platform: True)
    with pytest.raises(TargetUnavailableError, match="topology not implemented") as caught:
        open_target(name, LIMITS.__getitem__)
    assert "uv sync" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "fraction", "budget"),
    [
        ("h200", None, 0.75 * 141e9),
        ("h200:8", None, 0.75 * 141e9 - 1.5 * GIB),
        ("h200:8", "0.9", 0.9 * 141e9 - 1.5 * GIB),
        ("v5e:2x4", "0.5", 15.75 * GIB),  # a GPU's variable
        ("v4-8", None, 30.75 * GIB),
    ],
)
def test_budgets_of_absent_devices(name, fraction, budget, monkeypatch):
    class Device:
        device_kind = "some"

    asked: dict = {}

    def make(topology_name="", platform=None, **options):
        asked.update(options, topology_name=topology_name, platform=platform)
        return type("Topology", (), {"devices": [Device()] * (parse_target(name).count or 0)})

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", make)
    if fraction is None:
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    else:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", fraction)
    target = open_target(name, LIMITS.__getitem__)
    assert target.absent and target.budget_bytes == pytest.approx(budget, rel=1e-9)
    assert target.as_json()["not_proved"]
    assert asked.get("chip_config_name") == ("megacore" if name == "v4-8" else None)


def test_attached_devices_of_one_host_share_its_memory():
    code = (
        "from mlm_recipe.preflight.targets import open_target\n"
        "target = open_target('auto', {}.__getitem__)\n"
        "print(len(target.devices), target.budget_bytes, target.absent, target.peak('float32'))"
    )
    found = []
    for count in (1, 8):
        flags = f"--xla_force_host_platform_device_count={count}"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(done.stdout.split())
    assert [row[0] for row in found] == ["1", "8"]
    assert float(found[0][1]) == pytest.approx(8 * float(found[1][1]))
    assert found[0][2:] == ["False", "None"]


def test_a_captured_file_is_read_back(tmp_path):
    path = tmp_path / "ours.json"
    content = {
        "platform": "cuda",
        "count": 4,
        "topology": "1x1x4",
        "figures": {"memory": 150.75e9, "name": "NVIDIA H200"},
        "description": "gpu_device_info {}",
    }
    path.write_text(json.dumps(content))
    spec = parse_target(str(path))
    assert (spec.kind, spec.count, spec.topology) == ("captured", 4, "1x1x4")
    assert spec.figures["memory"] == 150.75e9 and spec.description == "gpu_device_info {}"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"platform": "cuda"}', "\x00"])
def test_a_file_that_is_no_capture_is_refused(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--capture-target"):
        parse_target(str(path))


def test_a_cpu_has_nothing_to_capture(tmp_path):
    path: Path = tmp_path / "none.json"
    with pytest.raises(TargetUnavailableError, match="nothing to capture"):
        capture_target(path)
    assert not path.exists()


def test_tpus_are_captured_by_their_corners(tmp_path):
    class Chip:
        platform, device_kind, process_index = "tpu", "TPU v5 lite", 0

        def __init__(self, *coords):
            self.coords = coords

    chips = [Chip(x, y, 0) for x in range(4) for y in range(8)]
    said = capture_target(tmp_path / "pod.json", chips)
    assert "32 x TPU v5 lite" in said
    spec = parse_target(str(tmp_path / "pod.json"))
    assert (spec.topology, spec.count, spec.platform) == ("v5e:4x8", 32, "tpu")
    assert spec.figures["available"] == 15.75 * GIB
