"""XLA flags: parsed as XLA parses them, written in one way, and probed for whether they live.

Why probe: a flag that XLA does not know kills the process, some known flags no longer do
anything, and which is which changes with every release.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_BLANKS = " \t\r\n"
_NAME = re.compile(r"-+[A-Za-z0-9_-]*")
_LISTS = frozenset({"xla_disable_hlo_passes"})
"""Flags whose values add up when two variants set them."""

WITHOUT_EFFECT = "this jaxlib has no such option: the flag is unknown, or does nothing any more"
UNKNOWN = "unknown to this jaxlib as a flag"
UNREADABLE = "this jaxlib cannot read its value"


def parse_flags(text: str) -> dict[str, str]:
    """``XLA_FLAGS`` as name without dashes -> value, in the user's order; the last one wins.

    Follows ``ParseArgvFromString`` in XLA's ``parse_flags_from_env.cc``: values may be quoted, and
    reading stops at the first word without a dash. A flag without a value is ``true``. Text that
    does not start with a dash names a file that holds the flags.
    """
    text = text.strip(_BLANKS)
    if text and not text.startswith("-"):
        try:
            text = Path(text).read_text(encoding="utf-8").strip(_BLANKS)
        except OSError:
            return {}
    flags: dict[str, str] = {}
    while text.startswith("-"):
        match = _NAME.match(text)
        assert match is not None
        name, rest = match.group().lstrip("-"), text[match.end() :]
        value, text = _take_value(rest)
        if name:
            flags.pop(name, None)  # so that order follows the flag that counts
            flags[name] = "true" if value is None else value
        text = text.lstrip(_BLANKS)
    return flags


def _take_value(rest: str) -> tuple[str | None, str]:
    """The value at the start of what follows a name, and what follows the value."""
    if rest[:1] != "=":
        word = re.match(r"\S*", rest)
        assert word is not None
        return None, rest[word.end() :]
    rest = rest[1:]
    quote = rest[:1]
    if quote not in ("'", '"') or not quote:
        word = re.match(r"\S*", rest)
        assert word is not None
        return word.group(), rest[word.end() :]
    value, at = [], 1
    while at < len(rest) and rest[at] != quote:
        if quote == '"' and rest[at] == "\\" and at + 1 < len(rest):
            at += 1
        value.append(rest[at])
        at += 1
    return "".join(value), rest[at + 1 :]


def format_flags(flags: Mapping[str, str]) -> str:
    """One text for one set of flags: it is part of the key of JAX's compilation cache."""
    return " ".join(f"--{name}={_quoted(value)}" for name, value in flags.items())


def _quoted(value: str) -> str:
    if not re.search(r"[\s'\"]", value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def merge_flags(under: Mapping[str, str], over: Mapping[str, str]) -> dict[str, str]:
    """``over`` laid on ``under``; lists of passes are united, everything else is replaced."""
    merged = dict(under)
    for name, value in over.items():
        if name in _LISTS and merged.get(name):
            items = [*merged[name].split(","), *value.split(",")]
            value = ",".join(dict.fromkeys(item for item in items if item))
        merged[name] = value
    return merged


def probe_flags(
    flags: Mapping[str, str],
    environ: Mapping[str, str] | None = None,
    python: str = sys.executable,
    *,
    timeout: float = 120.0,
) -> dict[str, str]:
    """Which of these flags are dead, and why.

    Starts two children as a rule: one sets each flag as a compiler option of a one-operation CPU
    program, which neither an unknown nor a retired flag survives; one meets what is left in
    ``XLA_FLAGS``. One more for each complaint, and a few to find a value that cannot be read.

    Args:
        flags: name without dashes -> value.
        environ: for the children; without its ``XLA_FLAGS``.
        python: an interpreter that has jax.
        timeout: seconds for each child. Where it passes, or a child dies for another reason, the
            flags are given the benefit of the doubt.
    """
    environ = dict(os.environ if environ is None else environ)
    environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if not flags:
        return {}
    environ["XLA_FLAGS"] = ""
    _, output = _child(python, _OPTIONS, [json.dumps(dict(flags))], environ, timeout)
    ignored = set(re.findall(r"^IGNORED (\S+)$", output, re.M))
    dead = {name: WITHOUT_EFFECT for name in flags if name in ignored}
    alive = {name: value for name, value in flags.items() if name not in dead}
    dead |= _refused(alive, environ, python, timeout)
    return dead


def _refused(
    flags: Mapping[str, str], environ: Mapping[str, str], python: str, timeout: float
) -> dict[str, str]:
    """Flags with which XLA's parser ends the process."""
    if not flags:
        return {}
    environ = {**environ, "XLA_FLAGS": format_flags(flags)}
    code, output = _child(python, _START, [], environ, timeout)
    found = {} if code == 0 else _complaints(output, flags)
    if found:
        rest = {name: value for name, value in flags.items() if name not in found}
        return found | _refused(rest, environ, python, timeout)
    if code == 0 or "Flag parsing failed" not in output:
        return {}
    if len(flags) == 1:
        return dict.fromkeys(flags, UNREADABLE)
    # 0.4.x does not say which value it cannot read.
    names = list(flags)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    parts = [{name: flags[name] for name in half} for half in halves]
    return {k: v for part in parts for k, v in _refused(part, environ, python, timeout).items()}


def _complaints(output: str, flags: Mapping[str, str]) -> dict[str, str]:
    """Flags that XLA's flag parser names, in its own words of 0.4.x to 0.11.x."""
    found = {}
    for line in output.splitlines():
        _, marker, listed = line.partition("Unknown flags in XLA_FLAGS: ")
        names = re.findall(r"--?([A-Za-z0-9_]+)", listed) if marker else []
        # Of those that 0.4.x lists only the first is unknown for sure: known ones follow it.
        old = "external/xla" in line.partition(marker)[0] if marker else False
        found |= dict.fromkeys(names[:1] if old else names, UNKNOWN)
    for name in re.findall(r"Couldn't interpret value .*? for flag (\w+)", output):
        found[name] = UNREADABLE
    return {name: why for name, why in found.items() if name in flags}


def _child(
    python: str, program: str, arguments: list[str], environ: Mapping[str, str], timeout: float
) -> tuple[int, str]:
    command = [python, "-c", _NO_CORE + program, *arguments]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return -1, ""
    return done.returncode, done.stdout.decode(errors="replace")


_NO_CORE = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"

_START = "import jax; jax.devices()"

# Booleans are given as such: the text `false` is refused as an option, though fine as a flag.
_OPTIONS = """
import json, sys, jax, jax.numpy as jnp
lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((2,), jnp.float32))
for name, value in json.loads(sys.argv[1]).items():
    try:
        lowered.compile(compiler_options={name: {"true": True, "false": False}.get(value, value)})
    except Exception as error:
        if "No such compile option" in str(error):
            sys.stdout.write("IGNORED " + name + chr(10))
"""
