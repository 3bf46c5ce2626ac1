"""The search over variants, with children that are functions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from mlm_recipe.guard.exits import ExitCode, overall
from mlm_recipe.guard.ladder import Attempt, Budget, Outcome, Tried, run_ladder
from mlm_recipe.guard.types import AS_CONFIGURED, ChildExit, Failure, FailureKind, Variant
from mlm_recipe.guard.variants import Context, load_variants

VARIANTS = load_variants()
START = Variant(AS_CONFIGURED)
CRASH = Failure(FailureKind.COMPILE_CRASH, "a.cc: x >= 0", name="a", phase="compile_begin")
CONFIG = {"trainer": {"train_batch_size": 64}, "model": {"attention_dropout": 0.0}}
CUDA = Context(config=CONFIG, platform="cuda", devices=8)

Rule = Callable[[Variant], Failure | None]


class Child:
    """Answers by a rule and keeps what it was asked."""

    def __init__(self, rule: Rule, signal: int | None = None):
        self.rule, self.signal = rule, signal
        self.names: list[str] = []
        self.breadcrumbs: list[bool] = []

    def __call__(self, variant: Variant, *, breadcrumbs: bool = False) -> Tried:
        self.names.append(variant.name)
        self.breadcrumbs.append(breadcrumbs)
        failure = self.rule(variant)
        code = -self.signal if self.signal and failure else 0
        return Tried(failure, ChildExit((), code, "compile_begin", 1.0), {"verdict": "ok"})


def climb(child: Attempt, context: Context = CUDA, **arguments: Any) -> Outcome:
    arguments.setdefault("gate", lambda variant, tried: None)
    return run_ladder(START, child, variants=VARIANTS, context=context, **arguments)


def cured_by(*flags: str, failure: Failure = CRASH) -> Rule:
    return lambda variant: None if all(f in variant.xla_flags for f in flags) else failure


def test_what_holds_as_configured_is_tried_once_and_passes_no_gate() -> None:
    def refuse(variant: Variant, tried: Tried) -> Failure:
        raise AssertionError("no gate for what was configured")

    child = Child(lambda variant: None)
    outcome = climb(child, gate=refuse)
    assert (child.names, outcome.exit_code) == ([AS_CONFIGURED], ExitCode.OK)
    assert outcome.chosen == START and outcome.failure is None


def test_the_remedies_of_the_signature_come_before_the_generic_order() -> None:
    failure = replace(CRASH, remedies=("no_autotune", "unrolled_layers"))
    child = Child(lambda v: None if "model.scan_layers" in v.overrides else failure)
    outcome = climb(child)
    assert child.names == [AS_CONFIGURED, "no_autotune", "unrolled_layers"]
    assert [done.role for done in outcome.attempts] == ["first", "remedy", "remedy"]
    assert outcome.exit_code is ExitCode.FALLBACK
    assert outcome.chosen is not None and outcome.chosen.name == "unrolled_layers"


def test_without_remedies_flags_come_first_and_two_without_effect_end_them() -> None:
    child = Child(lambda v: None if v.overrides.get("model.attn_backend") == "vanilla" else CRASH)
    outcome = climb(child)
    # The second tuning flag is related to the first, so a third flag is needed to give up.
    assert child.names == [
        AS_CONFIGURED,
        "no_dynamic_slice_fusion",
        "autotune_cublas_only",
        "attention_plain",
    ]
    assert outcome.skipped["no_autotune"] == "two unrelated flags changed nothing"


def test_a_refused_fallback_does_not_count_and_the_search_goes_on() -> None:
    wrong = Failure(FailureKind.NUMERIC_MISMATCH, "numeric gate: loss")
    failure = replace(CRASH, remedies=("autotune_cublas_only", "unrolled_layers"))
    child = Child(lambda v: failure if v.name == AS_CONFIGURED else None)
    outcome = climb(child, gate=lambda v, tried: wrong if v.xla_flags else None)
    assert outcome.chosen is not None and outcome.chosen.name == "unrolled_layers"
    assert [done.failure for done in outcome.attempts] == [failure, wrong, None]


def test_same_plan_needs_no_gate_and_others_are_refused_without_one() -> None:
    failure = replace(CRASH, remedies=("no_dynamic_slice_fusion",))
    child = Child(lambda v: failure if v.name == AS_CONFIGURED else None)
    assert climb(child, gate=None).exit_code is ExitCode.FALLBACK
    failure = replace(CRASH, remedies=("autotune_cublas_only",))
    child = Child(lambda v: None if v.name == "autotune_cublas_only" else failure)
    assert climb(child, gate=None, budget=Budget(attempts=2)).exit_code is ExitCode.NUMERIC


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (FailureKind.CONFIG_ERROR, 2),
        (FailureKind.ENVIRONMENT, 31),
        (FailureKind.UNSUPPORTED_HERE, 32),
        (FailureKind.AUDIT_FAILED, 24),
        (FailureKind.INFRASTRUCTURE, 31),
        (FailureKind.UNKNOWN_FLAG, 31),
    ],
)
def test_kinds_no_variant_helps_against_stop_at_once(kind: FailureKind, code: int) -> None:
    failure = Failure(kind, "s", remedies=("no_autotune",))
    child = Child(lambda v: failure)
    outcome = climb(child)
    assert child.names == [AS_CONFIGURED]
    assert (outcome.exit_code, outcome.failure) == (code, failure)


def test_a_failure_that_says_so_stops_at_once() -> None:
    hang = Failure(FailureKind.TIMEOUT, "rendezvous.cc", reason="rendezvous", ladder=False)
    child = Child(lambda v: hang)
    assert climb(child).exit_code is ExitCode.NONE_RUNS
    assert child.names == [AS_CONFIGURED]


def test_a_configuration_error_under_a_fallback_only_rules_that_fallback_out() -> None:
    error = Failure(FailureKind.CONFIG_ERROR, "indivisible")
    failure = replace(CRASH, remedies=("pure_data_parallel", "unrolled_layers"))
    ends = {AS_CONFIGURED: failure, "pure_data_parallel": error}
    outcome = climb(Child(lambda v: ends.get(v.name)))
    assert outcome.chosen is not None and outcome.chosen.name == "unrolled_layers"


def test_unknown_flags_of_the_user_are_dropped_and_are_no_fallback() -> None:
    def rule(variant: Variant) -> Failure | None:
        text = variant.env.get("XLA_FLAGS", "--xla_bad=1 --xla_gpu_autotune_level=3")
        return Failure(FailureKind.UNKNOWN_FLAG, "f", flags=("xla_bad",)) if "bad" in text else None

    context = replace(CUDA, environ={"XLA_FLAGS": "--xla_bad=1 --xla_gpu_autotune_level=3"})
    outcome = climb(Child(rule), context)
    assert outcome.exit_code is ExitCode.OK
    assert outcome.dropped_flags == ("xla_bad",)
    assert outcome.chosen is not None
    assert outcome.chosen.env == {"XLA_FLAGS": "--xla_gpu_autotune_level=3"}


def test_a_crash_after_the_drop_is_cured_on_top_of_it() -> None:
    def rule(variant: Variant) -> Failure | None:
        if "XLA_FLAGS" not in variant.env:
            return Failure(FailureKind.UNKNOWN_FLAG, "f", flags=("--xla_bad=1",))
        return None if "xla_gpu_autotune_level" in variant.xla_flags else failure

    failure = replace(CRASH, remedies=("no_autotune",))
    outcome = climb(Child(rule), replace(CUDA, environ={"XLA_FLAGS": "--xla_bad=1 --xla_ok=2"}))
    assert outcome.chosen is not None
    assert outcome.chosen.name == "drop_unknown_flags+no_autotune"
    assert outcome.chosen.env == {"XLA_FLAGS": "--xla_ok=2"}
    assert outcome.exit_code is ExitCode.FALLBACK


def test_a_variant_whose_own_flag_is_unknown_is_skipped() -> None:
    unknown = Failure(
        FailureKind.UNKNOWN_FLAG, "f", flags=("xla_gpu_autotune_level",), message="Unknown flags"
    )
    failure = replace(CRASH, remedies=("no_autotune", "unrolled_layers"))
    ends = {AS_CONFIGURED: failure, "no_autotune": unknown}
    outcome = climb(Child(lambda v: ends.get(v.name)))
    assert outcome.skipped["no_autotune"] == "Unknown flags"
    assert outcome.chosen is not None and outcome.chosen.name == "unrolled_layers"


def test_a_transient_failure_is_tried_once_more() -> None:
    ends = iter([replace(CRASH, transient=True), None])
    child = Child(lambda v: next(ends))
    assert climb(child).exit_code is ExitCode.OK
    assert child.names == [AS_CONFIGURED, AS_CONFIGURED]


def test_an_unknown_signal_death_is_repeated_with_breadcrumbs_and_its_last_pass_disabled() -> None:
    silent = Failure(FailureKind.COMPILE_CRASH, "SIGSEGV", phase="compile_begin")
    known = replace(silent, last_pass="priority-fusion")
    child = Child(lambda v: None)

    def rule(variant: Variant) -> Failure | None:
        if "priority-fusion" in variant.xla_flags.get("xla_disable_hlo_passes", ""):
            return None
        return known if child.breadcrumbs[-1] else silent

    child.rule, child.signal = rule, 11
    outcome = climb(child)
    assert child.breadcrumbs.count(True) == 1 and child.breadcrumbs[1]
    assert outcome.chosen is not None and outcome.chosen.name == "disable_last_pass"
    assert outcome.chosen.xla_flags == {"xla_disable_hlo_passes": "priority-fusion"}


def test_a_pass_that_programs_need_is_never_disabled() -> None:
    silent = Failure(FailureKind.COMPILE_CRASH, "SIGSEGV", last_pass="layout-assignment")
    child = Child(lambda v: silent, signal=11)
    outcome = climb(child, budget=Budget(attempts=30))
    assert outcome.exit_code is ExitCode.NO_VARIANT_COMPILES
    assert not any("disable_last_pass" in name for name in child.names)


def test_after_a_device_ran_out_of_memory_no_flag_is_tried() -> None:
    full = Failure(FailureKind.OUT_OF_MEMORY, "hbm", reason="device", phase="compiled")
    context = replace(CUDA, config={**CONFIG, "model": {"gradient_checkpointing": False}})
    child = Child(lambda v: full)
    outcome = climb(child, context, budget=Budget(attempts=20))
    assert child.names[1:4] == ["more_microbatches", "full_remat", "more_microbatches_4"]
    assert all("xla" not in str(done.variant.xla_flags) for done in outcome.attempts)
    assert outcome.exit_code is ExitCode.NONE_FITS


def test_memory_variants_that_do_not_suffice_alone_are_combined() -> None:
    full = Failure(FailureKind.OUT_OF_MEMORY, "hbm", reason="device", phase="compiled")
    context = replace(CUDA, config={**CONFIG, "model": {"gradient_checkpointing": False}})

    def rule(v: Variant) -> Failure | None:
        both = {"model.gradient_checkpointing", "trainer.per_device_parallelism"}
        return None if both <= v.overrides.keys() else full

    outcome = climb(Child(rule), context)
    assert outcome.chosen is not None
    assert outcome.chosen.name == "more_microbatches+full_remat"
    assert outcome.chosen.overrides["trainer.per_device_parallelism"] == 4


def test_the_host_out_of_memory_gets_the_variants_for_the_host() -> None:
    full = Failure(FailureKind.OUT_OF_MEMORY, "bad_alloc", reason="host", phase="compile_begin")
    child = Child(lambda v: full)
    climb(child, replace(CUDA, config={"model": {"scan_layers": False}}))
    assert child.names[1:3] == ["single_threaded_compile", "scanned_layers"]


def test_a_variant_that_moves_the_crash_is_stacked_only_with_the_new_signatures_remedies() -> None:
    other = replace(CRASH, signature="b.cc", name="b", remedies=("no_latency_hiding",))
    first = replace(CRASH, remedies=("no_dynamic_slice_fusion",))

    def rule(variant: Variant) -> Failure | None:
        if "xla_gpu_enable_dynamic_slice_fusion" not in variant.xla_flags:
            return first
        flag = "xla_gpu_enable_latency_hiding_scheduler"
        return None if flag in variant.xla_flags else other

    context = replace(CUDA, environ={"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true"})
    outcome = climb(Child(rule), context)
    roles = [(done.variant.name, done.role, done.moved) for done in outcome.attempts]
    assert roles == [
        (AS_CONFIGURED, "first", False),
        ("no_dynamic_slice_fusion", "remedy", True),
        ("no_dynamic_slice_fusion+no_latency_hiding", "stacked", False),
        ("no_latency_hiding", "minimise", False),
    ]
    assert outcome.chosen is not None
    assert outcome.chosen.name == "no_dynamic_slice_fusion+no_latency_hiding"


def test_a_part_that_is_not_needed_is_dropped() -> None:
    other = replace(CRASH, signature="b.cc", name="b", remedies=("unrolled_layers",))
    first = replace(CRASH, remedies=("autotune_cublas_only",))

    def rule(variant: Variant) -> Failure | None:
        if variant.overrides.get("model.scan_layers") is False:
            return None
        return other if variant.xla_flags else first

    outcome = climb(Child(rule))
    assert outcome.chosen is not None and outcome.chosen.name == "unrolled_layers"
    assert outcome.winner is outcome.attempts[-1]
    assert outcome.attempts[-1].role == "minimise"


def test_dead_flags_are_probed_once_and_their_variants_skipped() -> None:
    probes: list[int] = []

    def probe() -> Mapping[str, str]:
        probes.append(1)
        return {"xla_gpu_autotune_level": "unknown to this jaxlib"}

    failure = replace(CRASH, remedies=("no_autotune", "no_dynamic_slice_fusion"))
    child = Child(cured_by("xla_gpu_enable_dynamic_slice_fusion", failure=failure))
    outcome = climb(child, dead_flags=probe)
    assert child.names == [AS_CONFIGURED, "no_dynamic_slice_fusion"]
    assert outcome.skipped["no_autotune"] == "xla_gpu_autotune_level: unknown to this jaxlib"
    assert len(probes) == 1


def test_flags_are_not_probed_where_none_comes_up() -> None:
    def probe() -> Mapping[str, str]:
        raise AssertionError("no flag comes up")

    failure = replace(CRASH, remedies=("unrolled_layers",))
    child = Child(lambda v: None if v.overrides else failure)
    assert climb(child, dead_flags=probe).exit_code is ExitCode.FALLBACK


def test_attempts_are_bounded_and_retries_do_not_count() -> None:
    child = Child(lambda v: replace(CRASH, transient=v.name == AS_CONFIGURED))
    outcome = climb(child, budget=Budget(attempts=3))
    assert len(child.names) == 4
    assert (outcome.stopped_by, outcome.exit_code) == ("attempts", ExitCode.NO_VARIANT_COMPILES)


def test_time_is_bounded() -> None:
    now = iter(float(second) for second in range(0, 100000, 100))
    outcome = climb(Child(lambda v: CRASH), budget=Budget(seconds=500), clock=lambda: next(now))
    assert (outcome.stopped_by, outcome.exit_code) == ("seconds", ExitCode.TIME)
    assert 1 <= len(outcome.attempts) < 6


def test_the_variant_that_came_furthest_says_what_is_wrong() -> None:
    runs = Failure(FailureKind.RUNTIME_CRASH, "r", phase="budgeted")
    failure = replace(CRASH, remedies=("unrolled_layers",))
    outcome = climb(Child(lambda v: runs if v.overrides else failure), budget=Budget(attempts=4))
    assert (outcome.exit_code, outcome.failure) == (ExitCode.NONE_RUNS, runs)


def test_a_sick_machine_under_a_fallback_ends_the_search() -> None:
    sick = Failure(FailureKind.INFRASTRUCTURE, "Xid 79")
    failure = replace(CRASH, remedies=("no_autotune", "unrolled_layers"))
    child = Child(lambda v: sick if v.xla_flags else failure)
    outcome = climb(child)
    assert child.names == [AS_CONFIGURED, "no_autotune"]
    assert (outcome.exit_code, outcome.failure) == (ExitCode.ENVIRONMENT, sick)


def test_objective_variants_are_never_tried_by_themselves() -> None:
    variants = load_variants({"half": {"neutrality": "objective", "overrides": {"x.y": 1}}})
    failure = replace(CRASH, remedies=("half",))
    child = Child(lambda v: failure)
    outcome = run_ladder(START, child, variants=variants, context=CUDA, budget=Budget(attempts=3))
    assert "half" not in child.names
    assert "objective" in outcome.skipped["half"]


def test_no_variant_touches_batch_precision_data_or_optimizer() -> None:
    forbidden = ("trainer.train_batch_size", "trainer.mp", "trainer.seed", "data", "optimizer")
    context = replace(CUDA, config={**CONFIG, "model": {"scan_layers": False}})
    for name in VARIANTS.specs:
        variant = VARIANTS.resolve(name, context)
        for path in variant.overrides if variant else ():
            assert not path.startswith((*forbidden, "masking")), name


def test_what_the_user_asked_for_by_name_is_no_fallback() -> None:
    start = VARIANTS.resolve("unrolled_layers", CUDA)
    assert start is not None
    child = Child(lambda v: None)
    outcome = run_ladder(start, child, variants=VARIANTS, context=CUDA)
    assert outcome.exit_code is ExitCode.OK


def test_the_gravest_target_gives_the_exit_code() -> None:
    assert overall([]) == 0
    assert overall([0, 10]) == 10
    assert overall([10, 21, 20]) == 21
    assert overall([0, 10], strict=True) == 20
    assert overall([0, 0], strict=True) == 0
