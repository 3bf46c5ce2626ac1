"""The catalogue of known deaths: data, read from ``catalogue.yaml`` and from users' files.

An entry, with its defaults:

    name: required, unique in its file      id: ""           a row number, for people
    kind: required, a FailureKind           reason: ""       finer than the kind
    patterns: []      any of these regular expressions, case kept, `.` stops at line ends
    scope: decisive   what they are searched in: `decisive` is the fatal line, the exception with
                      its causes, and the frames of both; `log` is everything that was kept
    phases: []  signals: []  exit_codes: []  passes: []  timed_out: null
                      each that is given must hold too; signals are names, passes HLO passes
    signature: "{default}"   {default} is the normalised line; {pass}, {phase} and named groups
    flags: null       a regular expression over the log, whose group 1 lists flags, blank-separated
    advice: required  remedies: []  refs: []  price: ""  transient: false  ladder: true
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from mlm_recipe.errors import ConfigError
from mlm_recipe.guard.types import FailureKind

_SHIPPED = Path(__file__).with_name("catalogue.yaml")
_TEXTS = ("name", "id", "reason", "scope", "signature", "advice", "price", "flags")
_LISTS = ("patterns", "phases", "signals", "exit_codes", "passes", "remedies", "refs")
_SWITCHES = ("timed_out", "transient", "ladder")
_FIELDS = frozenset({"kind", *_TEXTS, *_LISTS, *_SWITCHES})


@dataclass(frozen=True)
class Entry:
    """One known death."""

    name: str
    kind: FailureKind
    advice: str
    id: str = ""
    reason: str = ""
    patterns: tuple[str, ...] = ()
    scope: str = "decisive"
    phases: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    exit_codes: tuple[int, ...] = ()
    passes: tuple[str, ...] = ()
    timed_out: bool | None = None
    signature: str = "{default}"
    flags: str | None = None
    remedies: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()
    price: str = ""
    transient: bool = False
    ladder: bool = True

    @cached_property
    def regex(self) -> re.Pattern[str] | None:
        """All patterns as one; None without any."""
        if not self.patterns:
            return None
        return re.compile("|".join(f"(?:{p})" for p in self.patterns), re.MULTILINE)


@dataclass(frozen=True)
class Catalogue:
    """Entries in the order in which they are tried."""

    entries: tuple[Entry, ...]

    def names(self) -> tuple[str, ...]:
        """Of all entries, in order."""
        return tuple(entry.name for entry in self.entries)


def load_catalogue(extra: Path | None = None) -> Catalogue:
    """The shipped catalogue, behind a user's own entries, which win.

    Raises:
        ConfigError: a file that cannot be read, or an entry that is none; names both.
    """
    shipped = _read(_SHIPPED)
    return Catalogue((*_read(extra), *shipped) if extra is not None else shipped)


def _read(path: Path) -> tuple[Entry, ...]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError("guard.catalogue", str(path), problem, "give a readable file") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        problem = f"is not YAML: {' '.join(str(error).split())}"
        raise ConfigError("guard.catalogue", str(path), problem, "correct the file") from error
    entries = raw.get("entries") if isinstance(raw, dict) else None
    if not isinstance(entries, list):
        fix = "start it with `entries:`, and a list of entries below"
        raise ConfigError("guard.catalogue", str(path), "has no list of entries", fix)
    parsed = tuple(_parse(item, f"{path.name}, entry {i + 1}") for i, item in enumerate(entries))
    names = [entry.name for entry in parsed]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError("guard.catalogue", twice[0], "stands twice", f"rename one in {path.name}")
    return parsed


def _parse(raw: Any, where: str) -> Entry:
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"catalogue ({where})", raw, "is no mapping", "write `name: ...` and so on"
        )
    unknown = sorted(set(map(str, raw)) - _FIELDS)
    if unknown:
        fix = f"known are {', '.join(sorted(_FIELDS))}"
        raise ConfigError(f"catalogue ({where})", unknown[0], "is no field of an entry", fix)
    values: dict[str, Any] = dict(raw)
    for field in ("name", "kind", "advice"):
        if not values.get(field):
            raise ConfigError(f"catalogue ({where}).{field}", None, "is missing", f"give a {field}")
    try:
        values["kind"] = FailureKind(values["kind"])
    except ValueError as error:
        fix = f"one of {', '.join(FailureKind)}"
        raise ConfigError(f"catalogue ({where}).kind", raw["kind"], "is no kind", fix) from error
    _check_types(values, where)
    _check_patterns((*values.get("patterns", ()), values.get("flags") or ""), where)
    return Entry(**values)


def _check_types(values: dict[str, Any], where: str) -> None:
    """Types; makes tuples of lists."""
    for field in _TEXTS:
        value = values.get(field)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"catalogue ({where}).{field}", value, "is no text", "quote it")
    for field in _SWITCHES:
        if field in values and not isinstance(values[field], bool):
            problem = "is neither true nor false"
            raise ConfigError(f"catalogue ({where}).{field}", values[field], problem, "write one")
    for field in _LISTS:
        value = values.get(field, [])
        wanted = int if field == "exit_codes" else str
        if not isinstance(value, list) or not all(isinstance(item, wanted) for item in value):
            problem = f"is no list of {'numbers' if wanted is int else 'texts'}"
            raise ConfigError(f"catalogue ({where}).{field}", value, problem, "write [a, b]")
        values[field] = tuple(value)
    if values.get("scope", "decisive") not in ("decisive", "log"):
        field = f"catalogue ({where}).scope"
        raise ConfigError(field, values["scope"], "is no scope", "decisive or log")


def _check_patterns(patterns: Sequence[str], where: str) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            problem = f"is no regular expression: {error}"
            field = f"catalogue ({where}).patterns"
            raise ConfigError(field, pattern, problem, "correct it") from error
