"""The entry of the recipe: the program that is proved is the one that training runs."""

import jax
import pytest
from launching import SMALL, TINY_CONFIG, small_corpus

import mlm_recipe.recipe
from mlm_recipe.launch.overlay import load_yaml, set_path
from mlm_recipe.loss import masked_lm_loss
from mlm_recipe.preflight import audits
from mlm_recipe.preflight.program import BuildContext
from mlm_recipe.step import build

pytestmark = pytest.mark.filterwarnings("ignore:Global tracker is already set")


def programs(tmp_path, **changes):
    raw = load_yaml(TINY_CONFIG)
    values = {**SMALL, "data.components": small_corpus(tmp_path), "output_dir": str(tmp_path)}
    for key, value in {**values, **changes}.items():
        set_path(raw, key.replace("__", "."), value)
    return build(BuildContext({"config": raw}, jax.devices()))


def test_shapes_lower_to_the_program_that_arrays_do(tmp_path):
    (program, hooked) = programs(tmp_path)
    assert (program.name, hooked.name) == ("train_step", "train_step_with_hooks")
    assert program.concrete_args is not None
    with program.context():
        abstract = program.step.trace(*program.abstract_args).lower().as_text()
        donated, reserved = program.concrete_args()
        static = program.abstract_args[2]
        real = program.step.lower(donated, reserved, static).as_text()
    assert abstract == real
    assert "jax.buffer_donor" in abstract or "tf.aliasing_output" in abstract


def test_nothing_is_allocated_read_or_written(tmp_path):
    before = {id(array) for array in jax.live_arrays()}
    (program, _) = programs(tmp_path)
    with program.context():
        program.step.trace(*program.abstract_args).lower()
    made = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in made) < 4096  # keys and counters
    assert not list(tmp_path.glob("**/checkpoints")) and not (tmp_path / "cache").exists()


def test_a_schedule_of_batch_sizes_is_proved_size_by_size(tmp_path):
    schedule = [{"start": 0, "value": 8}, {"start": 3, "value": 16}]
    found = programs(tmp_path, trainer__train_batch_size=schedule, trainer__watch={"interval": 5})
    names = [program.name for program in found]
    assert names[0] == "train_step" and "train_step_of_8" in names
    assert found[0].facts["batch_size"] == 16


def test_a_breakpoint_in_the_loss_is_refused_with_its_line(tmp_path, monkeypatch):
    def broken(model, example, **kwargs):
        jax.debug.breakpoint()
        return masked_lm_loss(model, example, **kwargs)

    monkeypatch.setattr(mlm_recipe.recipe, "masked_lm_loss", broken)
    (program, _) = programs(tmp_path)
    with program.context():
        jaxpr = program.step.trace(*program.abstract_args).jaxpr
    found = audits.audit_host_callbacks(jaxpr, "refuse")
    line = broken.__code__.co_firstlineno + 1
    assert found.verdict == "refuse" and f"test_step.py:{line}" in (found.where or "")
    assert "jax.debug.breakpoint" in found.message


def test_parameters_have_the_names_of_their_fields(tmp_path):
    (program, _) = programs(tmp_path)
    assert program.parameters is not None
    names = program.parameters(program.dynamic_args)
    assert {"lm_head.bias", "embeddings.word_embeddings.weight"} <= names.keys()
