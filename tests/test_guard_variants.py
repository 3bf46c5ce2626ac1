"""Named variants: resolved against a configuration, combined, laid over an environment."""

from typing import Any

import pytest

from mlm_recipe.errors import ConfigError
from mlm_recipe.guard.config import GuardConfig, check_guard
from mlm_recipe.guard.rules import OPTIMISATION_PASSES, RULES
from mlm_recipe.guard.types import AS_CONFIGURED, Failure, FailureKind, Neutrality, Variant
from mlm_recipe.guard.variants import (
    Context,
    apply_flags,
    combine,
    is_fallback,
    load_variants,
    members,
)

VARIANTS = load_variants()


def resolve(name: str, config: dict[str, Any] | None = None, **context: Any) -> Variant | None:
    context.setdefault("platform", "cuda")
    context.setdefault("devices", 8)
    return VARIANTS.resolve(name, Context(config=config or {}, **context))


def overrides(name: str, config: dict[str, Any] | None = None, **context: Any) -> Any:
    variant = resolve(name, config, **context)
    return variant and dict(variant.overrides)


def test_every_name_in_an_order_and_every_rule_exists() -> None:
    names = {name for group in VARIANTS.order.values() for name in group}
    assert names <= VARIANTS.specs.keys()
    rules = {spec.computed for spec in VARIANTS.specs.values() if spec.computed}
    assert rules == RULES.keys()
    assert all(spec.variant.cost for spec in VARIANTS.specs.values())


def test_what_changes_nothing_is_no_variant() -> None:
    assert resolve("scanned_layers") is None
    assert overrides("scanned_layers", {"model": {"scan_layers": False}}) == {
        "model.scan_layers": True
    }
    assert overrides("unrolled_layers") == {"model.scan_layers": False}
    assert resolve("auto_mesh_axes") is None
    flags = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    assert resolve("no_autotune", environ=flags) is None
    assert resolve("no_autotune", environ={"XLA_FLAGS": "--xla_gpu_autotune_level=4"})


def test_platforms() -> None:
    assert resolve("no_triton_gemm", platform="tpu") is None
    assert resolve("no_fusion", platform="cuda") is None
    assert resolve("no_fusion", platform="cpu") is not None


@pytest.mark.parametrize(
    ("model", "platform", "expected"),
    [
        ({"attention_dropout": 0.0}, "cuda", {"model.attn_backend": "vanilla"}),
        ({"attention_dropout": 0.0}, "cpu", None),
        ({"attention_dropout": 0.0, "attn_backend": "jax_flash"}, "cpu", "vanilla"),
        ({"attention_dropout": 0.0, "attn_backend": "VANILLA"}, "cuda", None),
        ({}, "cuda", None),  # dropout is 0.1 by default, and then attention is plain already
    ],
)
def test_plain_attention_only_where_training_uses_another(
    model: dict[str, Any], platform: str, expected: Any
) -> None:
    found = overrides("attention_plain", {"model": model}, platform=platform)
    if expected == "vanilla":
        expected = {"model.attn_backend": "vanilla"}
    assert found == expected


@pytest.mark.parametrize(
    ("trainer", "devices", "name", "expected"),
    [
        ({"train_batch_size": 64}, 8, "more_microbatches", 4),
        ({"train_batch_size": 64}, 8, "more_microbatches_4", 2),
        ({"train_batch_size": 64}, 8, "more_microbatches_16", None),
        ({"train_batch_size": 96}, 8, "more_microbatches_4", 3),
        ({"train_batch_size": 88}, 8, "more_microbatches", 1),
        ({"train_batch_size": 64, "per_device_parallelism": 4}, 8, "more_microbatches", 2),
        ({"train_batch_size": 64, "per_device_parallelism": 1}, 8, "more_microbatches", None),
        ({"train_batch_size": 64, "mesh": {"axes": {"model": 2}}}, 8, "more_microbatches", 8),
        ({"train_batch_size": 63}, 8, "more_microbatches", None),
        ({"train_batch_size": 64}, None, "more_microbatches", None),
        ({"train_batch_size": [[0, 64]]}, 8, "more_microbatches", None),
    ],
)
def test_microbatches_divide_the_rows_of_a_device(
    trainer: dict[str, Any], devices: int | None, name: str, expected: int | None
) -> None:
    found = overrides(name, {"trainer": trainer}, devices=devices)
    assert found == (expected and {"trainer.per_device_parallelism": expected})


def test_meshes() -> None:
    plain = {"data": -1, "replica": 1, "model": 1}
    assert overrides("pure_data_parallel") == {"trainer.mesh": {"axes": plain, "param_mapping": {}}}
    assert overrides("fsdp") is None
    replicated = {"trainer": {"mesh": {"param_mapping": {}, "axes": {"model": 1}}}}
    assert overrides("pure_data_parallel", replicated) is None
    assert overrides("fsdp", replicated) == {
        "trainer.mesh": {"param_mapping": {"embed": "data"}, "axes": {"model": 1}}
    }
    assert overrides("fsdp_other_axis") == {
        "trainer.mesh": {"param_mapping": {"mlp": "data", "vocab": "data"}}
    }
    for name in ("fsdp", "fsdp_other_axis", "pure_data_parallel"):
        assert overrides(name, replicated, devices=1) is None


def test_meshes_are_ones_that_levanter_takes() -> None:
    from levanter.utils.mesh import MeshConfig

    for name, config in (("pure_data_parallel", {}), ("fsdp_other_axis", {})):
        mesh = MeshConfig(**overrides(name, config)["trainer.mesh"])
        assert mesh.axis_shapes(8, 1)[0]["data"] == 8
    assert "embed" not in mesh.resolved_param_mapping
    assert mesh.resolved_param_mapping["vocab"] == "data"


def test_unknown_flags_are_dropped_and_the_others_stay() -> None:
    failure = Failure(FailureKind.UNKNOWN_FLAG, "s", flags=("--xla_bad=1", "xla_worse"))
    environ = {"XLA_FLAGS": "--xla_b=2 --xla_bad=1 --xla_a=3", "LIBTPU_INIT_ARGS": "--xla_worse=1"}
    variant = resolve("drop_unknown_flags", failure=failure, environ=environ)
    assert variant is not None and not is_fallback(variant)
    assert variant.env == {"XLA_FLAGS": "--xla_b=2 --xla_a=3", "LIBTPU_INIT_ARGS": ""}
    assert resolve("drop_unknown_flags", failure=failure) is None


def test_the_last_pass_is_disabled_only_if_it_optimises() -> None:
    def last(name: str | None) -> Variant | None:
        failure = Failure(FailureKind.COMPILE_CRASH, "s", last_pass=name)
        return resolve("disable_last_pass", failure=failure, platform="cpu")

    variant = last("algsimp")
    assert variant is not None
    assert variant.xla_flags == {"xla_disable_hlo_passes": "algsimp"}
    for name in ("layout-assignment", "spmd-partitioning", "copy-insertion", "no-such", None):
        assert last(name) is None
    assert not {"layout-assignment", "shardy-xla", "call-inliner"} & OPTIMISATION_PASSES


def test_a_lower_memory_fraction_never_rises() -> None:
    def fraction(now: str) -> str | None:
        name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
        variant = resolve("lower_gpu_memory_fraction", environ={name: now})
        return variant and variant.env[name]

    assert (fraction("0.93"), fraction("0.75"), fraction("0.5")) == ("0.75", "0.6", None)


def test_combining() -> None:
    first = Variant("a", {"xla_disable_hlo_passes": "cse,dce", "x": "1"}, {"E": "1"})
    second = Variant("b", {"xla_disable_hlo_passes": "fusion,cse", "x": "2"}, cost="slow")
    both = combine(first, second)
    assert both.name == "a+b" and members(both) == ("a", "b")
    assert both.xla_flags == {"xla_disable_hlo_passes": "cse,dce,fusion", "x": "2"}
    assert (both.env, both.cost) == ({"E": "1"}, "slow")
    same = Variant("c", neutrality=Neutrality.SAME_PLAN)
    assert combine(Variant(AS_CONFIGURED), same).neutrality is Neutrality.SAME_PLAN
    assert combine(Variant(AS_CONFIGURED), same).name == "c"
    assert combine(same, first).neutrality is Neutrality.REASSOCIATION


def test_flags_are_laid_over_the_users_in_one_spelling() -> None:
    variant = Variant("v", {"xla_disable_hlo_passes": "fusion", "xla_a": "2"})
    environ = {"XLA_FLAGS": "--xla_z=1  --xla_a=1 --xla_disable_hlo_passes=cse --xla_z=3", "P": "q"}
    result = apply_flags(variant, environ)
    assert result["XLA_FLAGS"] == "--xla_a=2 --xla_disable_hlo_passes=cse,fusion --xla_z=3"
    assert result["P"] == "q" and environ["XLA_FLAGS"].startswith("--xla_z=1  ")
    again = apply_flags(Variant(AS_CONFIGURED), result)
    assert again == result
    assert "XLA_FLAGS" not in apply_flags(Variant(AS_CONFIGURED), {"XLA_FLAGS": " "})
    emptied = Variant("d", {"xla_a": "1"}, env={"XLA_FLAGS": "--xla_k=1"})
    assert apply_flags(emptied, environ)["XLA_FLAGS"] == "--xla_k=1 --xla_a=1"


def test_a_users_variant() -> None:
    entry = {"xla_flags": {"xla_x": False, "xla_n": 3}, "after": ["timeout"], "platforms": ["cpu"]}
    variants = load_variants({"mine": entry})
    variant = variants.resolve("mine", Context(platform="cpu"))
    assert variant is not None
    assert variant.xla_flags == {"xla_x": "false", "xla_n": "3"}
    assert variant.after == {FailureKind.TIMEOUT}
    assert GuardConfig().variants == {}
    with pytest.raises(ConfigError, match="there is no such variant"):
        variants.resolve("yours", Context())


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ({"flags": {}}, "guard.variants.mine.flags"),
        ({"after": ["sometimes"]}, "guard.variants.mine.after"),
        ({"platforms": ["gpu"]}, "guard.variants.mine.platforms"),
        ({"neutrality": "none"}, "guard.variants.mine.neutrality"),
        ({"xla_flags": {"--xla_a": 1}}, "guard.variants.mine.xla_flags"),
        ({"xla_flags": {"xla_disable_all_hlo_passes": True}}, "guard.variants.mine.xla_flags"),
    ],
)
def test_a_users_variant_that_cannot_be_meant(entry: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_guard({"variants": {"mine": entry}})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"memory_warn": 0.97}, "guard.memory_warn"),
        ({"memory_refuse": 1.2}, "guard.memory_refuse"),
        ({"gpu_memory_fraction": 0.0}, "guard.gpu_memory_fraction"),
        ({"max_attempts": 0}, "guard.max_attempts"),
        ({"max_seconds": 0}, "guard.max_seconds"),
        ({"execute_seconds": 0}, "guard.execute_seconds"),
        ({"host_memory_gib": 0}, "guard.host_memory_gib"),
        ({"execute_steps": -1}, "guard.execute_steps"),
        ({"audits": {"donation": "maybe"}}, "guard.audits.donation"),
        ({"audits": {"donation": False}}, "guard.audits.donation"),
        ({"audits": {"captured_constants_mib": -1}}, "guard.audits.captured_constants_mib"),
    ],
)
def test_guard_values_that_cannot_be_meant(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_guard(values)
    assert caught.value.field == field and caught.value.fix


def test_the_class_checks_itself_and_its_defaults_are_fine() -> None:
    check_guard({})
    assert GuardConfig().audit_severities()["ordered_effects"] == "refuse"
    assert "captured_constants_mib" not in GuardConfig().audit_severities()
    assert GuardConfig().limits() == {
        "memory_warn": 0.85,
        "memory_refuse": 0.95,
        "gpu_memory_fraction": 0.75,
        "gpu_reserve_gib": 1.5,
        "captured_constants_mib": 1.0,
    }
    with pytest.raises(ConfigError, match=r"guard\.memory_warn"):
        GuardConfig(memory_warn=0.99)
