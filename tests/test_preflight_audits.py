"""Audits find what they are named after, with its source line, at any depth of a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from mlm_recipe.preflight import audits
from mlm_recipe.preflight.jaxpr import equations


def jaxpr_of(step, *args):
    return jax.jit(step).trace(*args).jaxpr


X = jax.ShapeDtypeStruct((4,), jnp.float32)


def ordered(x):
    io_callback(lambda v: None, None, x, ordered=True)
    return x


def unordered(x):
    io_callback(lambda v: None, None, x, ordered=False)
    return x


def pure(x):
    return jax.pure_callback(np.sin, X, x)


def printing(x):
    jax.debug.print("{x}", x=x)
    return x


def breaking(x):
    jax.debug.breakpoint()
    return x


def in_a_loop(step):
    return lambda x: jax.lax.fori_loop(0, 3, lambda i, v: step(v) * 2, x)


def in_a_branch(step):
    return lambda x: jax.lax.cond(x.sum() > 0, step, lambda v: v, x)


def in_a_gradient(step):
    return lambda x: jax.grad(lambda v: jax.checkpoint(step)(v * v).sum())(x)


@pytest.mark.parametrize("wrap", [lambda s: s, in_a_loop, in_a_branch, jax.jit])
@pytest.mark.parametrize("step", [ordered, unordered, pure, printing, breaking])
def test_every_callback_is_found_at_any_depth_with_its_line(step, wrap):
    found = audits.audit_host_callbacks(jaxpr_of(wrap(step), X), "refuse")
    assert found.verdict == "refuse"
    line = step.__code__.co_firstlineno + 1
    assert f"test_preflight_audits.py:{line}" in (found.where or ""), found


def test_a_breakpoint_is_called_one():
    found = audits.audit_host_callbacks(jaxpr_of(breaking, X), "refuse")
    assert "jax.debug.breakpoint" in found.message


def test_a_callback_in_a_gradient_is_found():
    found = audits.audit_host_callbacks(jaxpr_of(in_a_gradient(printing), X), "warn")
    assert found.verdict == "warn"


@pytest.mark.parametrize("step", [unordered, pure, printing])
def test_only_ordered_callbacks_are_ordered(step):
    assert audits.audit_ordered_effects(jaxpr_of(step, X), "refuse").verdict == "ok"
    assert audits.audit_ordered_effects(jaxpr_of(in_a_loop(ordered), X), "refuse").verdict != "ok"


def test_a_clean_step_passes_every_audit():
    jaxpr = jaxpr_of(in_a_gradient(jnp.sin), X)
    assert audits.audit_host_callbacks(jaxpr, "refuse").verdict == "ok"
    assert audits.audit_ordered_effects(jaxpr, "refuse").verdict == "ok"
    assert audits.audit_float64(jaxpr, "refuse").verdict == "ok"
    assert audits.audit_captured_constants(jaxpr, 0, "refuse").verdict == "ok"
    assert len(list(equations(jaxpr))) > 2


def test_float64_is_found_inside_and_in_arguments():
    with jax.enable_x64(True):
        inside = jaxpr_of(lambda x: (x.astype(jnp.float64) * 2).astype(jnp.float32), X)
        wide = jax.ShapeDtypeStruct((4,), jnp.float64)
        outside = jaxpr_of(lambda x: x, wide)
    found = audits.audit_float64(inside, "refuse")
    assert found.verdict == "refuse" and "test_preflight_audits.py" in (found.where or "")
    assert audits.audit_float64(outside, "refuse").verdict == "refuse"


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray])
def test_captured_constants_count_above_the_limit(make):
    table = make(np.ones((512, 512), np.float32))  # 1 MiB
    jaxpr = jaxpr_of(lambda x: (table * x[0]).sum() + x, X)
    assert audits.audit_captured_constants(jaxpr, 2**20, "warn").verdict == "ok"
    found = audits.audit_captured_constants(jaxpr, 2**20 - 1, "warn")
    assert found.verdict == "warn" and "float32[512, 512]" in found.message
    assert found.details["bytes"] == 2**20
