"""Every program of tests/crashes that dies on a CPU, under supervision, without a phase file."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlm_recipe.guard.catalogue import load_catalogue
from mlm_recipe.guard.classify import HostFacts, classify
from mlm_recipe.guard.supervise import Limits, supervise
from mlm_recipe.guard.types import ChildExit, Failure

CRASHES = Path(__file__).parent / "crashes"
_SLOW = pytest.mark.slow
pytestmark = pytest.mark.slow  # a minute and more of real deaths; their logs are in golden/logs


@dataclass(frozen=True)
class Dies:
    """How one program ends, and what must be said of it."""

    program: str
    returncode: int
    kind: str
    reason: str
    phase: str | None
    signature: str
    remedies: tuple[str, ...] = ()
    ladder: bool = True
    env: dict[str, str] = field(default_factory=dict)
    seconds: float = 120.0


DEATHS = [
    Dies("cpu_reduce_window_crop_abort", -6, "compile_crash", "algsimp", "compile_begin",
         "algebraic_simplifier.cc", ("no_algsimp",)),
    Dies("cpu_sort_comparator_abort", -6, "compile_crash", "nested_computation", "compile_begin",
         "map_util.h: it != collection.end()"),
    Dies("cpu_conv_crop_segv", -11, "runtime_crash", "", "budgeted",
         "SIGSEGV in ExecuteReplicated.__call__"),
    Dies("cpu_outfeed_reducer_exec_abort", -6, "runtime_crash", "reducer", "budgeted",
         "ynn_emitter.cc: reduce_instr->to_apply()->instruction_count() == 3"),
    Dies("ordered_token_poison", 1, "runtime_crash", "callback_state", "budgeted",
         "stale error of an ordered callback", ladder=False),
    Dies("breakpoint_no_tty", 1, "runtime_crash", "callback", "budgeted",
         "jax.debug.breakpoint without a terminal", ladder=False),
    Dies("flags_unknown", 1, "unknown_flag", "unknown", "jax_imported",
         "parse_flags_from_env.cc: unknown flag", ("drop_unknown_flags",)),
    Dies("compiler_options_unknown", 1, "unknown_flag", "unknown", "compile_begin",
         "compiler_options: no such option", ("drop_unknown_flags",)),
    Dies("sharding_indivisible", 1, "config_error", "program", "configured", "IndivisibleError: ",
         ladder=False),
    Dies("cpu_ragged_all_to_all_unimplemented", 1, "unsupported_here", "unimplemented",
         "compile_begin", "UNIMPLEMENTED: HLO opcode", ladder=False),
    Dies("compile_bad_alloc", 1, "out_of_memory", "host", "compile_begin",
         "MemoryError: std::bad_alloc", ("single_threaded_compile", "scanned_layers")),
    Dies("compile_bad_alloc", -6, "out_of_memory", "host", "audited",
         "LLVM: pthread_create failed", ("single_threaded_compile", "scanned_layers"),
         env={"EXTRA_MIB": "8"}),
    Dies("cpu_collective_mismatch_deadlock", -6, "timeout", "rendezvous", "budgeted",
         "timeout: rendezvous", ladder=False, env={"TERM_S": "5"}),
    # The guard's deadline ends these two.
    Dies("cpu_constant_fold_hang", -6, "timeout", "constant_folding", "compile_begin",
         "timeout: constant folding", ("no_constant_folding",), seconds=14),
    Dies("cpu_unrolled_slow_compile", -6, "timeout", "slow_compile", "compile_begin",
         "timeout: compile", ("scanned_layers", "no_fusion"), seconds=14),
]  # fmt: skip


def run(program: Path, tmp_path: Path, seconds: float, **env: str) -> ChildExit:
    """The suite's own flags are not the program's."""
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return supervise(
        [sys.executable, str(program)],
        env={**inherited, "JAX_PLATFORMS": "cpu", **env},
        log_path=tmp_path / "log.txt",
        limits=Limits(seconds=seconds, grace_seconds=2),
    )


def diagnosed(ended: ChildExit, host: HostFacts) -> Failure:
    assert ended.returncode != 0
    return classify(ended, load_catalogue(), host=host)


def _parameters() -> list[Any]:
    """Those that wait for a deadline are slow; their captured logs are read in the daily suite."""
    waits = [d.seconds < 100 or "TERM_S" in d.env for d in DEATHS]
    return [
        pytest.param(d, id="-".join([d.program, *d.env.values()]), marks=_SLOW if late else ())
        for d, late in zip(DEATHS, waits, strict=True)
    ]


@pytest.mark.parametrize("dies", _parameters())
def test_what_is_said_of_each_death(dies, tmp_path):
    host = HostFacts.now()
    ended = run(CRASHES / f"{dies.program}.py", tmp_path, dies.seconds, **dies.env)
    failure = diagnosed(ended, host)
    assert ended.returncode == dies.returncode
    assert ended.timed_out == (dies.seconds < 100)
    assert (failure.kind, failure.reason) == (dies.kind, dies.reason), ended.log_tail[-2000:]
    assert failure.phase == dies.phase
    assert dies.signature in failure.signature
    assert failure.remedies[: len(dies.remedies)] == dies.remedies
    assert failure.ladder == dies.ladder
    if not failure.remedies and failure.ladder:
        assert "no flag is known to help" in failure.advice.lower()
    if dies.kind == "unknown_flag":
        assert len(failure.flags) == 1 and "no_such" in failure.flags[0]


def test_every_program_for_the_cpu_is_here():
    for_cpu = {
        path.stem
        for path in CRASHES.glob("*.py")
        if "\n# env: cpu:" in path.read_text() or path.stem.startswith("cpu_")
    }
    assert for_cpu == {dies.program for dies in DEATHS}


HEADER = """
import ctypes, os
import jax, jax.numpy as jnp, numpy as np
from jax import lax
x = jnp.ones(3)
"""
# Other programs of the same kinds: body, kind, reason, phase, part of the signature.
OTHERS = {
    "segv_in_callback": (
        "def boom(v): ctypes.string_at(0); return v\n"
        "jax.jit(lambda v: jax.pure_callback(boom, x, v))(x)",
        "runtime_crash", "", "budgeted", "SIGSEGV in string_at"),
    "callback_raises": (
        "def boom(v): raise KeyError('no row')\n"
        "jax.block_until_ready(jax.jit(lambda v: jax.pure_callback(boom, x, v))(x))",
        "runtime_crash", "callback", "budgeted", "KeyError: 'no row'"),
    "bad_option_value": (
        "jax.jit(lambda v: v).lower(x).compile("
        "compiler_options={'xla_gpu_autotune_level': 'abc'})",
        "unknown_flag", "bad_value", "compile_begin", "value of an option"),
    "type_error": ("jax.jit(lambda v: v + 'a')(x)", "config_error", "program", "configured",
                   "TypeError: unsupported operand"),
    "shapes": ("jax.jit(lambda v: v @ jnp.ones((5, 6)))(x)", "config_error", "program",
               "configured", "TypeError: dot_general requires"),
    "tracer_as_bool": ("jax.jit(lambda v: 1 if v else 2)(1.0)", "config_error", "program",
                       "configured", "TracerBoolConversionError"),
    "too_large": ("jnp.ones((1 << 40, 8)).block_until_ready()", "out_of_memory", "host",
                  "budgeted", "RESOURCE_EXHAUSTED: Out of memory"),
    "nan": ("jax.config.update('jax_debug_nans', True); jnp.log(-x)", "numeric_mismatch",
            "non_finite", "budgeted", "non-finite number"),
    "no_handler": (
        "jax.jit(lambda v: jax.ffi.ffi_call('no_such_target', x)(v))(x)",
        "unsupported_here", "custom_call", "compile_begin", "No FFI handler registered"),
    "no_gpu": ("jax.devices('gpu')", "environment", "backend", "jax_imported",
               "Unknown backend"),
    "donated": ("f = jax.jit(lambda v: v + 1, donate_argnums=0); f(x); print(x + 1)",
                "config_error", "program", "budgeted", "use of a donated array"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_programs_of_the_same_kinds(name, tmp_path):
    body, kind, reason, phase, signature = OTHERS[name]
    (tmp_path / "program.py").write_text(HEADER + body + "\n")
    host = HostFacts.now()
    failure = diagnosed(run(tmp_path / "program.py", tmp_path, 120), host)
    assert (failure.kind, failure.reason, failure.phase) == (kind, reason, phase), failure
    assert signature in failure.signature


@pytest.mark.parametrize(
    ("flags", "reason", "named"),
    [
        ("--xla_one=1 --xla_two", "unknown", ("xla_one", "xla_two")),
        ("--xla_gpu_autotune_level=abc", "bad_value", ("xla_gpu_autotune_level",)),
        ("xla_no_dashes=1", "not_a_flag", ("xla_no_dashes",)),
    ],
)
def test_other_bad_flags(flags, reason, named, tmp_path):
    (tmp_path / "program.py").write_text(HEADER)
    host = HostFacts.now()
    failure = diagnosed(run(tmp_path / "program.py", tmp_path, 120, XLA_FLAGS=flags), host)
    assert (failure.kind, failure.reason, failure.flags) == ("unknown_flag", reason, named)


@pytest.mark.slow
def test_a_step_that_does_not_end_is_a_stall(tmp_path):
    # The counter keeps XLA from seeing that nothing depends on the loop.
    loop = "lambda v: lax.while_loop(lambda c: c[0] > -1, lambda c: (c[0] * 1.0, c[1] + 1), (v, 0))"
    body = f"jax.jit({loop})(1.0)[0]\n"
    (tmp_path / "program.py").write_text(f"{HEADER}out = {body}out.block_until_ready()\n")
    ended = run(tmp_path / "program.py", tmp_path, 10)
    failure = diagnosed(ended, HostFacts.now())
    assert ended.timed_out
    assert (failure.kind, failure.reason, failure.phase) == ("timeout", "stall", "budgeted")
