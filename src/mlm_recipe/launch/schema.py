"""What a configuration may hold, known without importing jax.

Levanter's config classes take 20 s to import; their fields, types, defaults and docstrings are
therefore written once into ``schema.json`` (``scripts/make_schema.py``; a test rebuilds it).
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mlm_recipe.errors import ConfigError
from mlm_recipe.launch.overlay import parse_value

_SCHEMA_FILE = Path(__file__).with_name("schema.json")


@dataclass(frozen=True)
class Schema:
    """The configuration tree.

    ``classes`` maps a class name to ``{"doc", "fields": {name: {"type", "default", "doc"}}}``. A
    type is ``{"kind": int|float|bool|str|any|null}``, ``enum`` with ``values``, ``list`` with
    ``items``, ``map`` with ``values``, ``union`` with ``options``, ``class`` with ``name``, or
    ``choice`` with ``default`` and ``choices`` (the ``type:`` key picks one).
    """

    root: str
    classes: Mapping[str, Any]

    def validate(self, config: Mapping[str, Any]) -> None:
        """Raises ConfigError at the first unknown key or wrong type, naming its dotted path."""
        self._class(self.root, config, "")

    def default(self, path: str) -> Any:
        """Default at a dotted path of plain (not ``choice``) blocks."""
        *blocks, key = path.split(".")
        name = self.root
        for block in blocks:
            kind = self.classes[name]["fields"][block]["type"]
            name = kind["choices"][kind["default"]] if kind["kind"] == "choice" else kind["name"]
        return self.classes[name]["fields"][key]["default"]

    def defaults(self, name: str) -> dict[str, Any]:
        """All defaults of one class, by field."""
        return {key: field["default"] for key, field in self.classes[name]["fields"].items()}

    def coerce(self, path: str, text: str, config: Mapping[str, Any]) -> Any:
        """A command-line value: YAML, but left as text where only text fits (a run id of 123)."""
        value = parse_value(text)
        kind = self._kind_at(path, config)
        if kind is not None and not _fits_shallow(kind, value) and _fits_shallow(kind, text):
            return text
        return value

    def _kind_at(self, path: str, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        kind: Mapping[str, Any] = {"kind": "class", "name": self.root}
        here: Any = config
        for key in path.split("."):
            if kind["kind"] == "choice":
                choice = here.get("type", kind["default"]) if isinstance(here, Mapping) else None
                if choice not in kind["choices"]:
                    return None
                kind = {"kind": "class", "name": kind["choices"][choice]}
            if kind["kind"] != "class" or key not in self.classes[kind["name"]]["fields"]:
                return None
            kind = self.classes[kind["name"]]["fields"][key]["type"]
            here = here.get(key) if isinstance(here, Mapping) else None
        return kind

    def _class(self, name: str, value: Any, path: str) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(
                path, value, f"expected a block ({name})", f"write keys indented under `{path}:`"
            )
        fields = self.classes[name]["fields"]
        for key, item in value.items():
            where = f"{path}.{key}" if path else str(key)
            if key not in fields:
                raise _unknown_key(where, path, item, str(key), fields)
            self._check(fields[key]["type"], item, where)

    def _check(self, kind: Mapping[str, Any], value: Any, path: str) -> None:
        match kind["kind"]:
            case "any":
                return
            case "class":
                self._class(kind["name"], value, path)
            case "choice":
                self._choice(kind, value, path)
            case "union":
                self._union(kind["options"], value, path)
            case "list" if isinstance(value, list):
                for index, item in enumerate(value):
                    self._check(kind["items"], item, f"{path}[{index}]")
            case "map" if isinstance(value, Mapping):
                for key, item in value.items():
                    self._check(kind["values"], item, f"{path}.{key}")
            case _:
                if not _fits(kind, value):
                    raise ConfigError(
                        path, value, f"expected {describe(kind)}", f"give {describe(kind)}"
                    )

    def _choice(self, kind: Mapping[str, Any], value: Any, path: str) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(path, value, "expected a block", f"write keys under `{path}:`")
        choice = value.get("type", kind["default"])
        if choice not in kind["choices"]:
            options = ", ".join(sorted(kind["choices"]))
            problem = kind.get("problem", "unknown type")
            raise ConfigError(f"{path}.type", choice, problem, f"use one of: {options}")
        rest = {key: item for key, item in value.items() if key != "type"}
        self._class(kind["choices"][choice], rest, path)

    def _union(self, options: list[Mapping[str, Any]], value: Any, path: str) -> None:
        """Accept any option; report the one whose outer shape fits, as that is what was meant."""
        shaped = [option for option in options if _fits_shallow(option, value)]
        errors = []
        for option in shaped:
            try:
                return self._check(option, value, path)
            except ConfigError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        wanted = " or ".join(describe(option) for option in options)
        raise ConfigError(path, value, f"expected {wanted}", f"give {wanted}")


def describe(kind: Mapping[str, Any]) -> str:
    """A type in words, for messages and ``--help``."""
    match kind["kind"]:
        case "enum":
            return "one of " + ", ".join(str(value) for value in kind["values"])
        case "list":
            return f"a list of {describe(kind['items'])}"
        case "map":
            return f"a mapping to {describe(kind['values'])}"
        case "union":
            return " or ".join(describe(option) for option in kind["options"])
        case "class":
            return f"a block ({kind['name']})"
        case "choice":
            return f"a block with type: {'|'.join(sorted(kind['choices']))}"
    words = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    return words.get(kind["kind"], {"str": "text", "null": "null"}.get(kind["kind"], "any value"))


def _fits(kind: Mapping[str, Any], value: Any) -> bool:
    match kind["kind"]:
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "bool":
            return isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "null":
            return value is None
        case "enum":
            return value in kind["values"]
    return False


def _fits_shallow(kind: Mapping[str, Any], value: Any) -> bool:
    match kind["kind"]:
        case "class" | "choice" | "map":
            return isinstance(value, Mapping)
        case "list":
            return isinstance(value, list)
        case "any":
            return True
        case "union":
            return any(_fits_shallow(option, value) for option in kind["options"])
    return _fits(kind, value)


def _unknown_key(
    where: str, path: str, value: Any, key: str, fields: Mapping[str, Any]
) -> ConfigError:
    block = f"block `{path}`" if path else "the configuration"
    close = difflib.get_close_matches(key, fields, n=1)
    fix = f"did you mean `{close[0]}`?" if close else f"remove it; {block} has: {', '.join(fields)}"
    return ConfigError(where, value, f"unknown key in {block}", fix)


@cache
def load_schema() -> Schema:
    """The schema of this version of the package."""
    content = json.loads(_SCHEMA_FILE.read_text(encoding="utf-8"))
    return Schema(root=content["root"], classes=content["classes"])
