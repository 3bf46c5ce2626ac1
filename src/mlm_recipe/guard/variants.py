"""Named variants: read from data, resolved against a configuration, laid over an environment."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import yaml

from mlm_recipe.errors import ConfigError
from mlm_recipe.guard.flags import format_flags, merge_flags, parse_flags
from mlm_recipe.guard.types import AS_CONFIGURED, Failure, FailureKind, Neutrality, Variant

ENVIRONMENT_RUNGS = frozenset(
    {"drop_unknown_flags", "fresh_cache", "lower_gpu_memory_fraction", "single_threaded_compile"}
)
"""Variants that change how the machine is used and not what is run: no fallbacks."""
PLATFORMS = ("cuda", "tpu", "cpu")
_SEVERITY = [Neutrality.SAME_PLAN, Neutrality.REASSOCIATION, Neutrality.OBJECTIVE]
_FIELDS = frozenset(
    "xla_flags env overrides defaults computed platforms after neutrality cost".split()
)


@dataclass(frozen=True)
class Context:
    """What a variant is resolved against."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """The effective configuration, raw: what it leaves out is at its default."""
    platform: str = "cpu"
    """``cuda``, ``tpu`` or ``cpu``."""
    devices: int | None = None
    """Of the target; None where it is not known."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """What the child would start with."""
    failure: Failure | None = None
    """The failure that a remedy is sought for."""
    fresh_cache_dir: str | None = None
    """An empty directory for ``fresh_cache``; None goes without a cache."""


@dataclass(frozen=True)
class VariantSpec:
    """A variant before it is resolved."""

    variant: Variant
    platforms: frozenset[str] = frozenset(PLATFORMS)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    computed: str = ""


@dataclass(frozen=True)
class Variants:
    """All known variants, and the generic order by group."""

    specs: Mapping[str, VariantSpec]
    order: Mapping[str, tuple[str, ...]]

    def resolve(self, name: str, context: Context) -> Variant | None:
        """The variant for this configuration, or None where it would change nothing.

        Raises:
            ConfigError: there is no variant of that name.
        """
        if name == AS_CONFIGURED:
            return Variant(AS_CONFIGURED, neutrality=Neutrality.SAME_PLAN)
        if name not in self.specs:
            known = ", ".join(sorted(self.specs))
            raise ConfigError("--variant", name, "there is no such variant", f"use one of: {known}")
        spec = self.specs[name]
        if context.platform not in spec.platforms:
            return None
        variant = spec.variant
        if spec.computed:
            from mlm_recipe.guard.rules import RULES

            made = RULES[spec.computed](context)
            if made is None:
                return None
            variant = replace(variant, **made)
        return variant if _changes_something(variant, spec, context) else None

    def generic(self, group: str, kind: FailureKind) -> tuple[str, ...]:
        """Names in one group of the generic order that may follow a failure of ``kind``."""
        names = self.order.get(group, ())
        after = {name: self.specs[name].variant.after for name in names}
        return tuple(name for name in names if not after[name] or kind in after[name])

    def group(self, name: str) -> str:
        """``flags``, ``program``, ``sharding``, ``memory``, or ``environment``."""
        for group, names in self.order.items():
            if name in names and group != "host_memory":
                return group
        if name in ENVIRONMENT_RUNGS:
            return "environment"
        spec = self.specs.get(name)
        return "program" if spec is None or spec.variant.overrides else "flags"


def _changes_something(variant: Variant, spec: VariantSpec, context: Context) -> bool:
    flags = parse_flags(context.environ.get("XLA_FLAGS", ""))
    if merge_flags(flags, variant.xla_flags) != flags:
        return True
    if any(context.environ.get(name) != value for name, value in variant.env.items()):
        return True
    return any(
        config_value(context.config, path, spec.defaults.get(path)) != value
        for path, value in variant.overrides.items()
    )


def config_value(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path; ``default`` where it is absent or null."""
    here: Any = config
    for key in path.split("."):
        if not isinstance(here, Mapping) or here.get(key) is None:
            return default
        here = here[key]
    return here


def load_variants(users: Mapping[str, Any] | None = None) -> Variants:
    """The package's variants, and the user's over them (``guard.variants``, raw).

    Raises:
        ConfigError: a user's variant has an unknown key or value.
    """
    text = resources.files("mlm_recipe.guard").joinpath("variants.yaml").read_text("utf-8")
    raw = yaml.safe_load(text)
    specs = {name: make_spec(name, entry) for name, entry in raw["variants"].items()}
    for name, entry in (users or {}).items():
        specs[name] = make_spec(name, entry)
    order = {group: tuple(names) for group, names in raw["order"].items()}
    return Variants(specs, order)


def make_spec(name: str, entry: Mapping[str, Any]) -> VariantSpec:
    """One entry of ``variants.yaml`` or of ``guard.variants``.

    Raises:
        ConfigError: naming ``guard.variants.NAME.KEY``.
    """
    where = f"guard.variants.{name}"
    if name == AS_CONFIGURED or not name.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(where, name, "it cannot be named so", "use letters, digits, - and _")
    for key in entry:
        if key not in _FIELDS:
            fix = f"use one of: {', '.join(sorted(_FIELDS))}"
            raise ConfigError(f"{where}.{key}", entry[key], "there is no such key", fix)
    for flag in entry.get("xla_flags") or {}:
        if flag.startswith("-") or flag == "xla_disable_all_hlo_passes":
            problem = "it makes wrong programs" if "all_hlo" in flag else "a name has no dashes"
            raise ConfigError(f"{where}.xla_flags", flag, problem, "correct or remove it")
    after = _words(f"{where}.after", entry.get("after"), [kind.value for kind in FailureKind])
    platforms = _words(f"{where}.platforms", entry.get("platforms"), PLATFORMS)
    neutrality = entry.get("neutrality") or Neutrality.REASSOCIATION.value
    _words(f"{where}.neutrality", [neutrality], [value.value for value in Neutrality])
    variant = Variant(
        name=name,
        xla_flags={key: as_text(value) for key, value in (entry.get("xla_flags") or {}).items()},
        env={key: as_text(value) for key, value in (entry.get("env") or {}).items()},
        overrides=dict(entry.get("overrides") or {}),
        after=frozenset(FailureKind(word) for word in after),
        neutrality=Neutrality(neutrality),
        cost=entry.get("cost") or "",
    )
    platform_set = frozenset(platforms or PLATFORMS)
    defaults = entry.get("defaults") or {}
    return VariantSpec(variant, platform_set, defaults, entry.get("computed") or "")


def _words(where: str, given: Iterable[str] | None, allowed: Iterable[str]) -> list[str]:
    words, known = list(given or ()), list(allowed)
    for word in words:
        if word not in known:
            fix = f"use one of: {', '.join(known)}"
            raise ConfigError(where, word, "there is no such value", fix)
    return words


def as_text(value: Any) -> str:
    """As XLA and shells spell it: YAML's ``false`` is ``false``."""
    return str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)


def members(variant: Variant) -> tuple[str, ...]:
    """Names of what a variant is combined from; nothing for ``as_configured``."""
    return tuple(name for name in variant.name.split("+") if name != AS_CONFIGURED)


def is_fallback(variant: Variant) -> bool:
    """Whether anything but the environment differs from what was configured."""
    return any(name not in ENVIRONMENT_RUNGS for name in members(variant))


def combine(first: Variant, second: Variant) -> Variant:
    """Both at once; where they disagree the second wins. As little neutral as the less neutral."""
    names = dict.fromkeys([*members(first), *members(second)])
    return Variant(
        name="+".join(names) or AS_CONFIGURED,
        xla_flags=merge_flags(first.xla_flags, second.xla_flags),
        env={**first.env, **second.env},
        overrides={**first.overrides, **second.overrides},
        after=frozenset(),
        neutrality=max(_neutrality(first), _neutrality(second), key=_SEVERITY.index),
        cost="; ".join(dict.fromkeys(cost for cost in (first.cost, second.cost) if cost)),
    )


def _neutrality(variant: Variant) -> Neutrality:
    return variant.neutrality if members(variant) else Neutrality.SAME_PLAN


def apply_flags(variant: Variant, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with the variant's ``env`` and flags in it.

    ``XLA_FLAGS`` is written in one way whatever the variant, since JAX's compilation cache keys on
    its text: no flag twice, the user's in their order, then the variant's. A variant may replace
    the user's ``XLA_FLAGS`` through ``env``; its flags are laid on that.
    """
    result = {**environ, **variant.env}
    flags = merge_flags(parse_flags(result.get("XLA_FLAGS", "")), variant.xla_flags)
    if flags:
        result["XLA_FLAGS"] = format_flags(flags)
    else:
        result.pop("XLA_FLAGS", None)
    return result
