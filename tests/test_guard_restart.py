"""What follows a death of training, and which exit code is handed on."""

import pytest

from mlm_recipe.guard.restart import Action, RestartPolicy
from mlm_recipe.guard.types import Failure, FailureKind
from mlm_recipe.launch.training import _shell_code


def death(kind: str, signature: str = "x", **fields) -> Failure:
    return Failure(FailureKind(kind), signature, **fields)


@pytest.mark.parametrize("kind", ["config_error", "environment", "numeric_mismatch"])
def test_what_comes_again_on_any_variant_stops(kind):
    assert RestartPolicy(3).decide(death(kind)) is Action.STOP


@pytest.mark.parametrize(
    "failure", [death("timeout"), death("infrastructure"), death("runtime_crash", transient=True)]
)
def test_a_transient_death_restarts_within_the_budget(failure):
    policy = RestartPolicy(2)
    assert [policy.decide(failure) for _ in range(3)] == [
        Action.RESTART,
        Action.RESTART,
        Action.STOP,
    ]


def test_a_known_death_goes_on_as_another_variant_at_once():
    known = death("runtime_crash", name="command_buffers")
    assert RestartPolicy(3).decide(known) is Action.NEXT_VARIANT


def test_an_unknown_death_is_tried_again_once_and_then_differently():
    policy = RestartPolicy(5)
    unknown = death("runtime_crash", "SIGSEGV in f")
    assert policy.decide(unknown) is Action.RESTART
    assert policy.decide(death("runtime_crash", "SIGSEGV in g")) is Action.RESTART
    assert policy.decide(unknown) is Action.NEXT_VARIANT


def test_no_ladder_and_no_budget_stop():
    assert RestartPolicy(3).decide(death("runtime_crash", name="x", ladder=False)) is Action.STOP
    assert RestartPolicy(0).decide(death("timeout")) is Action.STOP


def test_interrupted_stops():
    interrupted = death("infrastructure", "interrupted", reason="interrupted", ladder=False)
    assert RestartPolicy(3).decide(interrupted) is Action.STOP


@pytest.mark.parametrize(
    ("returncode", "code"), [(0, 0), (1, 1), (-6, 134), (124, 124), (125, 125)]
)
def test_exit_codes_are_handed_on_as_shells_have_them(returncode, code):
    assert _shell_code(returncode) == code
