"""``--help``: the options, and the fields of any block with their docstrings."""

import json
import textwrap
from typing import Any

from mlm_recipe.errors import ConfigError
from mlm_recipe.launch.schema import Schema, describe

_USAGE = """\
usage: python -m mlm_recipe.train --config PATH [options] [--section.field value ...]

Pretrains a RoBERTa-style masked language model as the YAML file says.

options:
  --config PATH           the configuration, e.g. config/roberta_tiny.yaml
  --section.field value   replace any value of it; VALUE is YAML, e.g. {type: noop}
  --no-preflight          train without compiling the step in a child first (now the only mode)
  --audit-batches N       audit the masks of the first N batches (0: off)
  --help [block]          this text, or the fields of a block, e.g. --help trainer.checkpointer

exit codes: 0 trained to the last step; 1 training failed; 2 the input must be corrected.
"""


def help_text(schema: Schema, block: str = "") -> str:
    """Usage and the fields of one block.

    Args:
        schema: The configuration tree.
        block: Dotted path; empty for the top.

    Raises:
        ConfigError: there is no such block.
    """
    names = _classes_at(schema, block)
    head = _USAGE if not block else ""
    return head + "".join(_describe_class(schema, name, block) for name in names)


def _classes_at(schema: Schema, block: str) -> list[str]:
    names = [schema.root]
    for key in block.split(".") if block else []:
        fields = [
            schema.classes[n]["fields"][key] for n in names if key in schema.classes[n]["fields"]
        ]
        names = [name for field in fields for name in _class_names(field["type"])]
        if not names:
            raise ConfigError("--help", block, "there is no such block", "try --help trainer")
    return names


def _class_names(kind: dict[str, Any]) -> list[str]:
    match kind["kind"]:
        case "class":
            return [kind["name"]]
        case "choice":
            return list(dict.fromkeys(kind["choices"].values()))
        case "union":
            return [name for option in kind["options"] for name in _class_names(option)]
        case "list":
            return _class_names(kind["items"])
        case "map":
            return _class_names(kind["values"])
    return []


def _describe_class(schema: Schema, name: str, block: str) -> str:
    prefix = f"{block}." if block else ""
    lines = [f"\n{name}{f' ({block})' if block else ''}\n"]
    for key, field in schema.classes[name]["fields"].items():
        default = "" if field["default"] is None else f" [{json.dumps(field['default'])}]"
        lines.append(f"  --{prefix}{key}: {describe(field['type'])}{default}\n")
        if field["doc"]:
            lines.append(textwrap.indent(textwrap.fill(field["doc"], 88), " " * 6) + "\n")
    return "".join(lines)
