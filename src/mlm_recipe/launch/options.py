"""The launcher's own words on the command line; everything else is an override."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlm_recipe.errors import ConfigError
from mlm_recipe.guard.targets import parse_target
from mlm_recipe.guard.types import AS_CONFIGURED
from mlm_recipe.guard.variants import load_variants


@dataclass
class Options:
    """What was asked for."""

    config: Path | None = None
    help: str | None = None
    list_targets: bool = False
    preflight: bool | None = None
    """None leaves it to ``guard.preflight``."""
    preflight_only: bool = False
    targets: list[str] = field(default_factory=list)
    """Empty is the attached devices."""
    variant: str = AS_CONFIGURED
    strict: bool = False
    force: bool = False
    overrides: list[str] = field(default_factory=list)


_SWITCHES = {
    "--preflight-only": ("preflight_only", True),
    "--no-preflight": ("preflight", False),
    "--list-targets": ("list_targets", True),
    "--strict": ("strict", True),
    "--force": ("force", True),
}


def parse_options(arguments: Sequence[str]) -> Options:
    """Split the command line.

    Raises:
        ConfigError: an option that needs a value has none, or two contradict each other.
    """
    options = Options()
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--config", "--config_path", "--target", "--variant"):
            _take(options, name, value if equals else _next(name, rest))
        elif word in ("-h", "--help"):
            options.help = rest.pop(0) if rest and not rest[0].startswith("-") else ""
        elif word in _SWITCHES:
            setattr(options, *_SWITCHES[word])
        else:
            options.overrides.append(word)
    _check(options)
    return options


def _next(name: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        example = {"--target": "h200:8", "--variant": "scanned_layers"}.get(name, "a YAML file")
        raise ConfigError(name, None, "the option has no value", f"give {example}")
    return rest.pop(0)


def _take(options: Options, name: str, value: str) -> None:
    if name == "--target":
        options.targets.append(value)
    elif name == "--variant":
        options.variant = value
    else:
        options.config = Path(value)


def _check(options: Options) -> None:
    if options.preflight is False and options.preflight_only:
        raise ConfigError(
            "--preflight-only", None, "it contradicts --no-preflight", "leave one of them out"
        )
    absent = [target for target in options.targets if target != "auto"]
    if absent and not options.preflight_only:
        raise ConfigError(
            "--target",
            absent[0],
            "training runs on the attached devices only",
            "add --preflight-only to prove the step for it, or leave it out",
        )


def check_options(options: Options, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a target or variant that is not known."""
    for target in options.targets:
        parse_target(target)
    known = load_variants((config.get("guard") or {}).get("variants")).specs
    if options.variant not in (AS_CONFIGURED, *known):
        raise ConfigError(
            "--variant",
            options.variant,
            "there is no such variant",
            f"use one of: {AS_CONFIGURED}, {', '.join(sorted(known))}",
        )
