"""``--help``: the options, and the fields of any block with their docstrings."""

import json
import textwrap
from typing import Any

from mlm_recipe.errors import ConfigError
from mlm_recipe.launch.schema import Schema, describe

_USAGE = """\
usage: python -m mlm_recipe.train --config PATH [options] [--section.field value ...]

Proves the train step of a RoBERTa-style masked language model in a child process, then trains it,
as the YAML file says.

options:
  --config PATH           the configuration, e.g. config/roberta_tiny.yaml
  --section.field value   replace any value of it; VALUE is YAML, e.g. {type: noop}
  --preflight-only        prove the train step, report, and stop
  --target KIND           with --preflight-only: prove it for devices that are not there, e.g.
                          h200:8, v5e:2x4, v5e-16 or a captured description; repeatable
  --list-targets          the kinds that --target knows
  --no-preflight          train without proving anything first
  --variant NAME          begin with this variant instead of as configured
  --strict                a fallback is a failure
  --force                 forget what is remembered of earlier preflights
  --audit-batches N       audit the masks of the first N batches (0: off)
  --help [block]          this text, or the fields of a block, e.g. --help guard

exit codes: 0 trained to the last step, or proved as configured; 10 proved by a fallback (only
preflight); 1 training failed; 2 the input must be corrected; 20 no variant compiles; 21 none fits
memory; 22 none runs; 23 the numbers are others; 24 an audit refused; 31 the machine or the
installation; 32 not decidable here; 40 out of time; 70 a bug of the guard; 130 interrupted; 128 + N
training died of signal N.
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
