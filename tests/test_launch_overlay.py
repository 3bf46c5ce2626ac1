"""YAML in, overrides on, YAML out."""

import pytest

from mlm_recipe.errors import ConfigError
from mlm_recipe.launch.overlay import (
    get_path,
    load_yaml,
    parse_overrides,
    parse_value,
    set_path,
    write_yaml,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("6e-4", 6e-4),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        ("6.0e-4", 6e-4),
        ("true", True),
        ("null", None),
        ("[a, 1]", ["a", 1]),
        ("{type: noop}", {"type": "noop"}),
        ("p=f32,c=bf16", "p=f32,c=bf16"),
        ("5m", "5m"),
        ("run-1e5x", "run-1e5x"),
        ("a: b: c", "a: b: c"),
    ],
)
def test_command_line_values_are_yaml(text, value):
    assert parse_value(text) == value


def test_both_spellings_of_an_override():
    words = ["--a.b", "1", "--c=x=y", "--audit-batches", "0", "--d", "-1"]
    assert parse_overrides(words) == [
        ("a.b", "1"),
        ("c", "x=y"),
        ("audit_batches", "0"),
        ("d", "-1"),
    ]


@pytest.mark.parametrize("words", [["stray"], ["--a"], ["--a", "--b", "1"], ["--", "1"]])
def test_a_malformed_command_line_is_refused(words):
    with pytest.raises(ConfigError):
        parse_overrides(words)


def test_a_path_replaces_and_does_not_merge():
    config = {"a": {"b": {"x": 1, "y": 2}}}
    set_path(config, "a.b", {"x": 3})
    set_path(config, "new.block.key", 1)
    assert config == {"a": {"b": {"x": 3}}, "new": {"block": {"key": 1}}}


def test_a_null_block_can_be_entered():
    config = {"a": None}
    set_path(config, "a.b", 1)
    assert get_path(config, "a.b") == 1


def test_a_path_through_a_value_is_refused():
    with pytest.raises(ConfigError, match=r"`a\.b` is the value 1, not a block"):
        set_path({"a": {"b": 1}}, "a.b.c", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3"),
        ("a: [1\n", "line"),
        ("just words\n", "no blocks"),
        ("", "no blocks"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, text, message):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_yaml(file)


def test_binary_and_missing_files_are_config_errors(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    for name in ("binary.yaml", "missing.yaml", "."):
        with pytest.raises(ConfigError, match="--config"):
            load_yaml(tmp_path / name)


def test_what_is_written_is_read_back(tmp_path):
    config = {"optimizer": {"learning_rate": 1e-05, "warmup": 0.1}, "trainer": {"id": "0123"}}
    write_yaml(config, tmp_path / "config.yaml")
    assert load_yaml(tmp_path / "config.yaml") == config
    assert [f.name for f in tmp_path.iterdir()] == ["config.yaml"]
