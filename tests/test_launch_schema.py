"""The schema that the launcher validates against is the one the config classes have."""

import importlib.util
import json

import pytest
import yaml
from launching import ROOT, TINY_CONFIG

from mlm_recipe.errors import ConfigError
from mlm_recipe.launch.help import help_text
from mlm_recipe.launch.schema import load_schema

SCHEMA = load_schema()


def test_schema_file_is_up_to_date():
    script = ROOT / "scripts/make_schema.py"
    spec = importlib.util.spec_from_file_location("make_schema", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built = json.loads(json.dumps(module.build_schema()))
    assert built == json.loads(module.SCHEMA_FILE.read_text()), "run scripts/make_schema.py"


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("trainer.id", "0123", "0123"),
        ("trainer.id", "1e5", "1e5"),
        ("trainer.num_train_steps", "12", 12),
        ("optimizer.learning_rate", "1e-4", 1e-4),
        ("trainer.load_checkpoint", "true", True),
        ("trainer.tracker.mode", "online", "online"),
        ("data.tokenizer", "null", "null"),
        ("no.such.key", "3", 3),
    ],
)
def test_a_command_line_value_takes_the_type_of_its_field(path, text, value):
    assert SCHEMA.coerce(path, text, yaml.safe_load(TINY_CONFIG.read_text())) == value


def test_defaults_are_those_of_the_recipe():
    adamw = SCHEMA.defaults("RobertaAdamWConfig")
    assert (adamw["beta1"], adamw["beta2"], adamw["epsilon"]) == (0.9, 0.98, 1e-6)
    assert (adamw["weight_decay"], adamw["lr_schedule"], adamw["min_lr_ratio"]) == (
        0.01,
        "linear",
        0,
    )
    assert SCHEMA.default("masking.rate") == 0.15
    assert SCHEMA.default("audit_batches") == 4


@pytest.mark.parametrize("block", ["", "masking", "trainer.checkpointer", "data.components"])
def test_help_describes_every_field_of_a_block(block):
    text = help_text(SCHEMA, block)
    assert text.count("  --") >= 4
    assert "_field_types" not in text


def test_help_for_no_such_block():
    with pytest.raises(ConfigError, match="no such block"):
        help_text(SCHEMA, "trainer.nothing")
