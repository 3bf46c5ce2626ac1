"""The raw configuration mapping: YAML in, dotted overrides laid on, YAML out.

Precedence is file < command line (< variant). A dotted path replaces the value at that path; there
is no deep merge, so what is written is what runs.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mlm_recipe.errors import ConfigError

Config = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads ``6e-4`` as a number and refuses duplicate keys."""


# YAML 1.1 wants a dot and a signed exponent, so PyYAML reads 6e-4 as a string.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _mapping_without_duplicates(loader: _Loader, node: yaml.MappingNode) -> Config:
    keys = [loader.construct_object(key) for key, _ in node.value]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            line = node.value[index][0].start_mark.line + 1
            raise ConfigError(
                str(key),
                f"line {line}",
                "the key stands twice in one block; the second would silently win",
                "keep one of them",
            )
    loader.flatten_mapping(node)
    return {
        loader.construct_object(key): loader.construct_object(value, deep=True)
        for key, value in node.value
    }


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_without_duplicates)


def load_yaml(path: Path) -> Config:
    """Read one YAML file as a mapping.

    Raises:
        ConfigError: the file is missing, unreadable, not YAML, or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            "--config",
            str(path),
            reason,
            "give the path of a YAML file, e.g. config/roberta_tiny.yaml",
        ) from error
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ConfigError("--config", f"{path}{where}", problem, "correct that line") from error
    if not isinstance(value, dict):
        raise ConfigError(
            "--config", str(path), "the file holds no blocks", "start from config/roberta_tiny.yaml"
        )
    return value


def parse_value(text: str) -> Any:
    """A command-line value is YAML: ``3``, ``1e-4``, ``null``, ``[a, b]``, ``{type: noop}``."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def parse_overrides(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """``--section.field value`` and ``--section.field=value`` as (dotted path, text) pairs.

    Raises:
        ConfigError: a stray word, or an option without a value.
    """
    overrides = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) < 3:
            raise ConfigError(
                "command line", word, "expected an option", "write --section.field value"
            )
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or (rest[0].startswith("--") and len(rest[0]) > 2):
                raise ConfigError(
                    word, None, "the option has no value", f"write {word} VALUE (true or false too)"
                )
            text = rest.pop(0)
        overrides.append((name.replace("-", "_"), text))
    return overrides


def set_path(config: Config, path: str, value: Any) -> None:
    """Replace the value at a dotted path in place, making blocks on the way.

    Raises:
        ConfigError: the path leads through a value that is no block.
    """
    *blocks, key = path.split(".")
    here: Any = config
    for depth, block in enumerate(blocks):
        if here.get(block) is None:
            here[block] = {}
        here = here[block]
        if not isinstance(here, dict):
            raise ConfigError(
                f"--{path}",
                value,
                f"`{'.'.join(blocks[: depth + 1])}` is the value {here!r}, not a block",
                "replace the whole value instead",
            )
    here[key] = value


def get_path(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path, or ``default`` where any part of it is absent or null."""
    here: Any = config
    for key in path.split("."):
        if not isinstance(here, Mapping) or here.get(key) is None:
            return default
        here = here[key]
    return here


def write_yaml(config: Mapping[str, Any], path: Path) -> None:
    """Write atomically: a reader sees the old file or the whole new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    os.replace(partial, path)
