"""The recipe's entry for the preflight: the very train step that training will run.

``mlm_recipe.step:build`` goes through the same `recipe.build` as the training program; state and
batch are shapes, so nothing is allocated, read or written until a step is really executed.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import levanter.tracker
from haliax import Axis
from levanter.tracker.tracker import NoopTracker
from levanter.trainer_state import TrainerState
from levanter.utils.tree_utils import inference_mode

from mlm_recipe.abstract import (
    abstract_batch,
    abstract_state,
    let_haliax_run_nothing,
    named_jit_call,
    with_shardings,
)
from mlm_recipe.config import TrainMlmConfig, decode_config
from mlm_recipe.data.example import MlmExample
from mlm_recipe.model.roberta import RobertaForMaskedLM
from mlm_recipe.preflight.program import BuildContext, Gradient, StepProgram
from mlm_recipe.recipe import Recipe
from mlm_recipe.recipe import build as build_recipe
from mlm_recipe.stored import as_stored, latest_checkpoint, stored_arrays
from mlm_recipe.synthetic import place, synthetic_batch

_GRADIENT_ROWS = 8


def build(context: BuildContext) -> list[StepProgram]:
    """The train step; and the step with jit hooks, where the configuration has such hooks.

    ``context.arguments`` holds ``config``, the effective configuration, and may hold
    ``gradient_rows``, the examples of the gate's gradient.

    Raises:
        ConfigError: see `recipe.build`; or the run's checkpoint does not fit the configuration.
        ValueError: the devices do not fit the mesh or the batch.
    """
    levanter.tracker.set_global_tracker(NoopTracker())
    if context.absent:
        let_haliax_run_nothing()
    asked = decode_config(context.arguments["config"])
    found = latest_checkpoint(asked)
    config = _placed(asked, context)
    recipe = build_recipe(config, hooks=False)
    trainer = recipe.trainer
    steps = {"train_step": trainer._jit_train_step_fn_no_hook}
    if config.trainer.watch.is_enabled:
        trainer.add_hook(config.trainer.watch.build(), every=config.trainer.watch.interval)
        steps["train_step_with_hooks"] = trainer._jit_train_step_fn
    rows = int(context.arguments.get("gradient_rows") or 0)
    sizes = sorted(config.trainer.batch_schedule.unique_batch_sizes(), reverse=True)
    return [
        _program(recipe, f"{name}_of_{size}" if size < sizes[0] else name, step, size, rows, found)
        for size in sizes  # the largest first: its memory decides
        for name, step in steps.items()
    ]


def _placed(config: TrainMlmConfig, context: BuildContext) -> TrainMlmConfig:
    """On the context's devices, defaults resolved as Levanter does when it initialises."""
    trainer = copy.copy(config.trainer)
    trainer._initialize_jax_config()
    trainer = trainer.on(context.devices)
    trainer.load_checkpoint, trainer.initialize_from = False, None
    trainer._validate_and_set_defaults()
    return dataclasses.replace(config, trainer=trainer)


def _program(
    recipe: Recipe,
    name: str,
    step: Any,
    batch_size: int,
    gradient_rows: int,
    checkpoint: str | None,
) -> StepProgram:
    trainer, mesh = recipe.trainer, recipe.trainer.device_mesh
    Batch = Axis("batch", batch_size)
    with trainer:
        state = abstract_state(trainer, recipe.streams.dropout, recipe.init_model, mesh)
        if checkpoint is not None:
            run_id = str(recipe.config.trainer.id)
            arrays = stored_arrays(checkpoint)
            state = as_stored(state, arrays, checkpoint=checkpoint, run_id=run_id)
        batch = _batch_shapes(recipe, Batch)
        jitted, arguments = named_jit_call(step, state, (batch,), {})

    def concrete_args() -> tuple[Any, ...]:
        fresh = _fresh_state(recipe)
        _, (donated, reserved, _) = named_jit_call(step, fresh, (_filled(recipe, batch),), {})
        return donated, reserved

    return StepProgram(
        name=name,
        step=jitted,
        abstract_args=arguments,
        static_argnums=(2,),
        mesh=mesh,
        context=lambda: trainer,
        parameters=_parameters,
        carry=_carry,
        concrete_args=concrete_args,
        loss=lambda outputs: outputs[0].loss,
        gradient=_gradient(recipe, gradient_rows),
        flops=recipe.train_flops_per_example * Batch.size,
        facts={
            "num_parameters": recipe.num_parameters,
            "batch_size": Batch.size,
            "tokens_per_step": Batch.size * recipe.Pos.size,
            "data_axis_size": recipe.config.trainer.data_axis_size,
            "microbatch_size": recipe.config.trainer.microbatch_size,
            "precision": str(recipe.config.trainer.mp.compute_dtype.__name__),
        },
    )


def _batch_shapes(recipe: Recipe, Batch: Axis) -> MlmExample:
    shapes = abstract_batch(Batch, recipe.Pos, recipe.Masked)
    return with_shardings(shapes, recipe.trainer.compute_axis_mapping, recipe.trainer.device_mesh)


def _fresh_state(recipe: Recipe) -> TrainerState[RobertaForMaskedLM]:
    key = jnp.copy(recipe.streams.dropout)  # Levanter donates it
    return recipe.trainer.initial_state(key, model_init=recipe.init_model)


def _filled(recipe: Recipe, shapes: MlmExample) -> MlmExample:
    Batch = shapes.input_ids.axes[0]
    host = synthetic_batch(
        Batch,
        recipe.Pos,
        recipe.Masked,
        vocab_size=recipe.vocab_size,
        pad_token_id=recipe.config.roberta.pad_token_id,
    )
    return place(host, shapes)


# The jitted step takes ((function, ((state, batch, {}), {})), the same with what is not donated)
# and returns (TrainStepResult, its static part).


def _carry(args: tuple[Any, ...], outputs: Any) -> tuple[Any, ...]:
    (function, (positional, keywords)), reserved = args
    positional = (outputs[0].new_state, *positional[1:])
    return (function, (positional, keywords)), reserved


def _parameters(args: tuple[Any, ...]) -> Mapping[str, Any]:
    model = args[0][1][0][0].model
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: Any) -> str:
    """Dotted field names; the array of a NamedArray adds nothing to them."""
    kept = (key for key in path if not isinstance(key, jax.tree_util.FlattenedIndexKey))
    return ".".join(str(getattr(key, "name", None) or getattr(key, "key", key)) for key in kept)


def _gradient(recipe: Recipe, rows: int) -> Gradient:
    trainer = recipe.trainer
    data = recipe.config.trainer.data_axis_size
    Batch = Axis("batch", rows or -(-_GRADIENT_ROWS // data) * data)
    shapes = eqx.filter_eval_shape(recipe.init_model)
    static = eqx.filter(shapes, lambda leaf: not isinstance(leaf, jax.ShapeDtypeStruct))

    def function(parameters: Any, batch: MlmExample) -> tuple[Any, Any]:
        def loss(parameters: Any) -> Any:
            model = inference_mode(eqx.combine(parameters, static), True)
            return trainer.loss_fn(model, batch, key=None)[0]

        return jax.value_and_grad(loss)(parameters)

    def arguments() -> tuple[Any, ...]:
        parameters = eqx.filter(_fresh_state(recipe).model, eqx.is_array)
        return parameters, _filled(recipe, _batch_shapes(recipe, Batch))

    precision = recipe.config.trainer.mp.compute_dtype.__name__
    return Gradient(function, arguments, precision, rows=Batch.size)
