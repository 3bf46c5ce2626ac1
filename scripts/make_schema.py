"""Write ``src/mlm_recipe/launch/schema.json`` from the config classes.

    uv run python scripts/make_schema.py

Run it after any change to a config class or to the pinned Levanter; a test compares.
"""

import dataclasses
import enum
import json
import re
import types
import typing
from datetime import timedelta
from pathlib import Path
from typing import Any

import jmp
from draccus.utils import is_choice_type
from draccus.wrappers.docstring import get_attribute_docstring, get_preferred_help_text
from haliax import ScanCheckpointPolicy
from levanter.data.text.datasets import (
    HfDatasetSourceConfig,
    LmDatasetSourceConfigBase,
    UrlDatasetSourceConfig,
)
from levanter.models.lm_model import LmConfig

from mlm_recipe.config import TrainMlmConfig
from mlm_recipe.data.config import WITHOUT_MEANING

SCHEMA_FILE = Path(__file__).parents[1] / "src/mlm_recipe/launch/schema.json"

# Registries that know more than this recipe can train on.
ALLOWED: dict[type, tuple[str, tuple[str, ...]]] = {
    LmConfig: ("the model has no masked-LM head", ("roberta",)),
    LmDatasetSourceConfigBase: ("the source cannot be read", ("url", "hf")),
}

# Fields that are refused by the classes themselves, and so need not be offered.
HIDDEN = {
    ("MlmTrainerConfig", "wandb"),
    *(("MlmDataConfig", name) for name in WITHOUT_MEANING),
    *(
        (source.__name__, field.name)
        for source in (UrlDatasetSourceConfig, HfDatasetSourceConfig)
        for field in dataclasses.fields(LmDatasetSourceConfigBase)
    ),
}

_STRINGLY = (jmp.Policy, timedelta, Path)
_PRIMITIVES = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null"}


class SchemaBuilder:
    """Walks the dataclasses from a root."""

    def __init__(self) -> None:
        self.classes: dict[str, Any] = {}

    def add_class(self, cls: Any) -> str:
        """Describe a dataclass (or an instance of a generic one) once; returns its name."""
        origin = typing.get_origin(cls) or cls
        arguments = dict(
            zip(getattr(origin, "__parameters__", ()), typing.get_args(cls), strict=False)
        )
        name = origin.__name__
        if name in self.classes:
            return name
        self.classes[name] = {"doc": _first_line(origin.__doc__), "fields": {}}
        hints = typing.get_type_hints(origin)
        for field in dataclasses.fields(origin):
            if not field.init or (name, field.name) in HIDDEN:
                continue
            hint = arguments.get(hints[field.name], hints[field.name])
            self.classes[name]["fields"][field.name] = {
                "type": self.kind(hint),
                "default": _default(field),
                "doc": _doc(origin, field.name),
            }
        return name

    def kind(self, hint: Any) -> dict[str, Any]:
        """The type language of ``mlm_recipe.launch.schema.Schema``."""
        origin = typing.get_origin(hint)
        arguments = typing.get_args(hint)
        if hint in _PRIMITIVES:
            return {"kind": _PRIMITIVES[hint]}
        if origin in (typing.Union, types.UnionType):
            return {"kind": "union", "options": _distinct(self.kind(a) for a in arguments)}
        if origin is typing.Literal:
            return {"kind": "enum", "values": list(arguments)}
        if origin in (list, tuple, set, typing.get_origin(typing.Sequence[int])):
            items = [self.kind(a) for a in arguments if a is not ...]
            return {"kind": "list", "items": _one_of(items)}
        if origin in (dict, typing.get_origin(typing.Mapping[str, int])):
            return {"kind": "map", "values": self.kind(arguments[1])}
        return self.class_kind(hint)

    def class_kind(self, hint: Any) -> dict[str, Any]:
        """A class: enumeration, registry, dataclass, or something written as text."""
        origin = typing.get_origin(hint) or hint
        if not isinstance(origin, type):
            return {"kind": "any"}
        if issubclass(origin, enum.Enum):
            return {"kind": "enum", "values": [m.value for m in origin] + _names(origin)}
        if issubclass(origin, _STRINGLY):
            return {"kind": "union", "options": [{"kind": "str"}, {"kind": "float"}]}
        if origin is ScanCheckpointPolicy:
            return {"kind": "any"}
        if is_choice_type(origin):  # a base, not one of its registered subclasses
            return self.choice_kind(origin)
        if dataclasses.is_dataclass(origin):
            return {"kind": "class", "name": self.add_class(hint)}
        return {"kind": "any"}

    def choice_kind(self, registry: Any) -> dict[str, Any]:
        """A registry whose subclasses the ``type:`` key picks from."""
        problem, allowed = ALLOWED.get(registry, ("there is no such type", None))
        known = registry.get_known_choices()
        names = sorted(known) if allowed is None else allowed
        default = registry.default_choice_name()
        return {
            "kind": "choice",
            "default": default if default in names else names[0],
            "problem": problem,
            "choices": {name: self.add_class(known[name]) for name in names},
        }


def _names(cls: type[enum.Enum]) -> list[str]:
    values = {member.value for member in cls}
    return [member.name for member in cls if member.name not in values]


def _distinct(kinds: typing.Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    flat = [o for kind in kinds for o in (kind["options"] if kind["kind"] == "union" else [kind])]
    return [kind for index, kind in enumerate(flat) if kind not in flat[:index]]


def _one_of(kinds: list[dict[str, Any]]) -> dict[str, Any]:
    options = _distinct(kinds)
    return options[0] if len(options) == 1 else {"kind": "union", "options": options}


def _default(field: dataclasses.Field) -> Any:
    """The default where JSON can say it; blocks and absent ones are null."""
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    value = getattr(value, "value", value) if isinstance(value, enum.Enum) else value
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return None


def _doc(cls: type, name: str) -> str:
    text = get_preferred_help_text(get_attribute_docstring(cls, name), "below") or ""
    return re.sub(r"\s+", " ", text).strip()


def _first_line(doc: str | None) -> str:
    return (doc or "").strip().split("\n")[0]


def build_schema() -> dict[str, Any]:
    """The whole content of ``schema.json``."""
    builder = SchemaBuilder()
    root = builder.add_class(TrainMlmConfig)
    return {"root": root, "classes": dict(sorted(builder.classes.items()))}


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(build_schema(), indent=1, ensure_ascii=True) + "\n")
