"""Signatures: a death's words without what differs from run to run and version to version."""

import re

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_VALUES = re.compile(r"\s*\([^()]* vs\.? [^()]*\)\s*$|\s*\([^()]* vs\.? [^()]*\).*", re.DOTALL)
_RET_CHECK = re.compile(r"RET_CHECK failure \(([^():]+):\d+\) (.*)")
_PATH = re.compile(r"(?:/[\w.+@-]+)+/([\w.+@-]+)")
_NAMED = re.compile(r"\b([A-Za-z_]\w*?)[._-]?\d+(?:\.\d+)*\b")
_NUMBER = re.compile(r"\b\d[\d.,]*(?:[KMGTP]i?B?)?\b")
_LONGEST = 160


def check_signature(source: str, message: str) -> str:
    """``shape_tree.cc: result->children_start_id >= 0``.

    Args:
        source: base name of the file.
        message: of the fatal line. Of a CHECK its expression is kept, of a RET_CHECK in it file
            and expression too; of any other message the first line, with N for numbers.
    """
    first = message.splitlines()[0] if message else ""
    inner = _RET_CHECK.search(message)
    if "Check failed: " not in first:
        return f"{source}: {normalised(first)}".rstrip(": ")
    expression = first.partition("Check failed: ")[2]
    expression = _VALUES.sub("", expression)
    expression = re.split(r": | \((?=[A-Z_]+:)", expression)[0].strip()
    text = f"{source}: {_ADDRESS.sub('N', expression)}"[:_LONGEST]
    if inner is not None:
        checked = re.split(r' "| \(', inner[2])[0].strip()
        text += f"; {inner[1].rpartition('/')[2]}: {checked}"
    return text


def normalised(text: str) -> str:
    """One line without addresses, directories, numbers and the numbering of names."""
    text = " ".join(text.split())
    text = _PATH.sub(r"\1", _ADDRESS.sub("N", text))
    text = _NUMBER.sub("N", text)
    return text[:_LONGEST].rstrip()


def plain(text: str, longest: int = 400) -> str:
    """The first lines of a message as one, for people."""
    text = " ".join(text.split())
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
