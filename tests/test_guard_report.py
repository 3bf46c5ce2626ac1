"""preflight.json against its schema, the table, the W&B summary."""

import io
import json
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from mlm_recipe.guard.attempts import Attempted, Outcome, Tried
from mlm_recipe.guard.exits import ExitCode
from mlm_recipe.guard.report import (
    AttemptRecord,
    Report,
    TargetReport,
    attempts_rows,
    read_report,
    target_report,
    wandb_summary,
)
from mlm_recipe.guard.table import print_report, size
from mlm_recipe.guard.types import ChildExit, Failure, FailureKind, Neutrality, Variant

SCHEMA = json.loads(
    resources.files("mlm_recipe.guard").joinpath("report.schema.json").read_text("utf-8")
)
GIB = 2**30
RESULT: dict[str, Any] = {
    "schema_version": 1,
    "verdict": "warn",
    "failure": None,
    "target": {"name": "h200:8", "absent": True, "not_proved": ["NCCL: no network was used"]},
    "versions": {"jax": "0.11.2"},
    "programs": [
        {
            "name": "train_step",
            "stablehlo_sha256": "0" * 64,
            "facts": {"parameters": 124},
            "audits": [
                {
                    "name": "donation",
                    "verdict": "warn",
                    "message": "12 of 30 buffers are not reused",
                    "where": "fit.py:3",
                    "details": {},
                },
                {"name": "float64", "verdict": "ok", "message": "", "where": None, "details": {}},
            ],
            "memory": {
                "arguments": 1 * GIB,
                "outputs": 1 * GIB,
                "alias": 1 * GIB,
                "temporary": 5 * GIB,
                "code": 0,
                "need": 6 * GIB,
                "budget": 100 * GIB,
                "fraction": 0.06,
                "verdict": "ok",
            },
            "collectives": {"all-gather": {"count": 4, "bytes": 3 * 2**20}},
            "flops": 2.5e14,
            "flops_hlo": None,
            "roofline_seconds": 0.0316,
            "layouts": [],
            "compile_seconds": 12.34,
            "cache_hit": False,
        }
    ],
    "execution": {"steps": 2, "losses": [10.9, 10.8], "seconds": [1.0, 0.1]},
    "numerics": {"precision": "float32", "loss": 10.9, "gradient_norm": 1.0, "sketch": [0.0] * 9},
}
CRASH = Failure(
    FailureKind.COMPILE_CRASH,
    "shape_tree.cc: children_start_id >= 0",
    message="Check failed: [x] >= 0",
    advice="see the remedies",
)
START = Variant("as_configured")
CURE = Variant(
    "no_dynamic_slice_fusion",
    {"xla_gpu_enable_dynamic_slice_fusion": "false"},
    neutrality=Neutrality.SAME_PLAN,
    cost="a copy of each slice",
)
DEATH = ChildExit(("python",), -6, "compile_begin", 8.5, peak_rss=2**30, log_path="a/log.txt")


def attempted(variant: Variant, failure: Failure | None, role: str, **tried: Any) -> Attempted:
    return Attempted(variant, role, Tried(failure, directory="d1", **tried), failure, 8.51)


def fallback() -> TargetReport:
    winner = attempted(CURE, None, "remedy", result=RESULT)
    first = attempted(START, CRASH, "first", exit=DEATH)
    outcome = Outcome(
        (first, winner), CURE, winner, None, ExitCode.FALLBACK, 17.0, {"no_fusion": "cpu only"}
    )
    return target_report(outcome, bundles={"d1": "cache/bundle-1"})


def failed() -> TargetReport:
    first = attempted(START, CRASH, "first", exit=DEATH)
    outcome = Outcome(
        (first,), None, None, CRASH, ExitCode.NO_VARIANT_COMPILES, 9.0, stopped_by="attempts"
    )
    return target_report(outcome, target={"name": "v5e:2x4"})


def report(*targets: TargetReport, strict: bool = False) -> Report:
    return Report(targets, "2026-01-02T03:04:05+00:00", 26.5, strict, {"cpu": "x"})


def check(value: Any, schema: dict[str, Any], path: str = "$") -> None:
    """The part of JSON Schema that report.schema.json uses; raises AssertionError."""
    known = {"description", "type", "properties", "required", "additionalProperties", "enum"}
    known |= {"items", "anyOf", "$ref", "minimum", "$schema", "title", "$defs"}
    assert schema.keys() <= known, schema.keys() - known
    if "$ref" in schema:
        return check(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], path)
    if "anyOf" in schema:
        errors = []
        for option in schema["anyOf"]:
            try:
                return check(value, option, path)
            except AssertionError as error:
                errors.append(str(error))
        raise AssertionError(errors)
    kinds = schema.get("type", [])
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    types |= {"integer": int, "number": (int, float)}
    kinds = [kinds] if isinstance(kinds, str) else kinds
    fits = [isinstance(value, types[kind]) for kind in kinds]
    assert not kinds or any(fits), f"{path}: {value!r} is no {kinds}"
    assert not isinstance(value, bool) or not kinds or "boolean" in kinds, path
    assert "enum" not in schema or value in schema["enum"], f"{path}: {value!r}"
    assert "minimum" not in schema or value >= schema["minimum"], path
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        assert set(schema.get("required", [])) <= value.keys(), f"{path}: {value.keys()}"
        for name, entry in value.items():
            extra = schema.get("additionalProperties", True)
            assert name in properties or extra, f"{path}.{name} is not in the schema"
            below = properties.get(name, extra)
            check(entry, below if isinstance(below, dict) else {}, f"{path}.{name}")
    if isinstance(value, list):
        for index, entry in enumerate(value):
            check(entry, schema.get("items", {}), f"{path}[{index}]")


def test_what_is_written_fits_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "preflight.json"
    report(fallback(), failed()).write(path)
    content = json.loads(path.read_text())
    check(content, SCHEMA)
    assert json.loads(json.dumps(read_report(path).as_json())) == content
    assert content["exit_code"] == 20
    first, second = content["targets"]
    assert first["verdict"] == "fallback" and first["exit_code"] == 10
    assert first["attempts"][0]["bundle"] == "cache/bundle-1"
    assert first["attempts"][0]["signal"] == 6
    assert "sketch" not in first["numerics"]
    assert second["variant"] is None and second["target"] == {"name": "v5e:2x4"}


@pytest.mark.parametrize(
    "damage",
    [
        {"exit_code": 3},
        {"schema_version": 2},
        {"targets": None},
        {"seconds": -1},
        {"surplus": 1},
        {"strict": 1},
    ],
)
def test_the_schema_refuses_damage(damage: dict[str, Any]) -> None:
    content = json.loads(json.dumps(report(fallback()).as_json()))
    with pytest.raises(AssertionError):
        check({**content, **damage}, SCHEMA)


def test_every_field_is_described() -> None:
    for name, cls in (("target", TargetReport), ("attempt", AttemptRecord), ("failure", Failure)):
        definition = SCHEMA["$defs"][name]
        assert set(definition["properties"]) == {field.name for field in fields(cls)}

    def walk(schema: dict[str, Any]) -> None:
        for name, entry in schema.get("properties", {}).items():
            assert entry.get("description") or "$ref" in entry, name
            walk(entry)

    walk(SCHEMA)
    for definition in SCHEMA["$defs"].values():
        walk(definition)


def test_strict_and_the_exit_code_over_targets() -> None:
    assert report(fallback()).exit_code == 10
    assert report(fallback(), strict=True).exit_code == 20
    assert report(fallback(), failed()).exit_code == 20
    assert report().exit_code == 0


def test_the_table_is_plain_text_where_it_is_piped() -> None:
    file = io.StringIO()
    print_report(report(fallback(), failed()), file)
    text = file.getvalue()
    assert "\x1b" not in text
    assert max(len(line.rstrip()) for line in text.splitlines() if "preflight" not in line) <= 100
    for part in (
        "h200:8",
        "6.00 GiB",
        "6.0 % of 100.0",
        "250 TFLOP",
        "31.6 ms",
        "4 all-gather 3 MiB",
        "12.3 s",
        "compile_crash: shape_tree.cc:",
        "children_start_id >= 0",
        "h200:8: not proved: NCCL: no network was used",
        "h200:8: train_step: 12 of 30 buffers are not reused (fit.py:3)",
        "price of no_dynamic_slice_fusion: a copy of each slice",
        "v5e:2x4: compile_crash: Check failed: [x] >= 0",
        "v5e:2x4: stopped by guard.max_attempts",
    ):
        assert part in text, part


def test_one_clean_target_has_no_table_of_attempts() -> None:
    winner = attempted(START, None, "first", result=RESULT | {"verdict": "ok"})
    outcome = Outcome((winner,), START, winner, None, ExitCode.OK, 9.0)
    file = io.StringIO()
    print_report(report(target_report(outcome)), file)
    assert "attempts" not in file.getvalue() and "failed" not in file.getvalue()


def test_sizes() -> None:
    assert [size(n) for n in (0, 512, 1536, 3 * GIB)] == ["0 B", "512 B", "1.5 KiB", "3 GiB"]


def test_the_wandb_summary_holds_scalars() -> None:
    summary = wandb_summary(report(fallback()))
    assert all(isinstance(value, str | int | float | bool) for value in summary.values())
    assert all(name.startswith("guard/") for name in summary)
    assert summary["guard/variant"] == "no_dynamic_slice_fusion"
    assert summary["guard/kind"] == "compile_crash"
    assert (summary["guard/memory_gib"], summary["guard/memory_fraction"]) == (6.0, 0.06)
    assert (summary["guard/attempts"], summary["guard/cache_hit"]) == (2, False)
    assert wandb_summary(report())["guard/targets"] == 0


def test_the_rows_of_attempts() -> None:
    columns, rows = attempts_rows(report(fallback(), failed()))
    assert len(rows) == 3 and all(len(row) == len(columns) for row in rows)
    first = dict(zip(columns, rows[0], strict=True))
    assert (first["target"], first["verdict"], first["phase"]) == (
        "h200:8",
        "failed",
        "compile_begin",
    )
