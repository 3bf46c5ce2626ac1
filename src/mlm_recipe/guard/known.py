"""Looks a death up in the catalogue."""

import re
from collections.abc import Mapping

from mlm_recipe.guard.case import Case, signature_of
from mlm_recipe.guard.catalogue import Catalogue, Entry
from mlm_recipe.guard.record import signal_name
from mlm_recipe.guard.types import Failure, FailureKind


def look_up(case: Case, catalogue: Catalogue) -> Failure | None:
    """The failure that the first entry that holds tells of; None where none does."""
    decisive = case.evidence.decisive
    for entry in catalogue.entries:
        match = _holds(entry, case, decisive)
        if match is not None:
            return _failure_of(entry, match, case)
    return None


def _holds(entry: Entry, case: Case, decisive: str) -> Mapping[str, str] | None:
    """Named groups of the match; None where the entry does not hold."""
    timed_out = case.exit.timed_out
    if timed_out and entry.kind is not FailureKind.TIMEOUT and entry.timed_out is None:
        return None  # what it said before it hung did not kill it
    if entry.timed_out not in (None, timed_out):
        return None
    if entry.phases and case.phase not in entry.phases:
        return None
    if entry.signals and signal_name(case.signal) not in entry.signals:
        return None
    if entry.exit_codes and case.exit.returncode not in entry.exit_codes:
        return None
    if entry.passes and case.evidence.last_pass not in entry.passes:
        return None
    if entry.regex is None:
        return {}
    # A warning of a hang that passed is no timeout; only a hang makes the whole log telling.
    hung = timed_out or case.exit.returncode == 124
    whole = entry.scope == "log" and (hung or entry.kind is not FailureKind.TIMEOUT)
    found = entry.regex.search(case.evidence.text if whole else decisive)
    return found.groupdict(default="") if found else None


def _failure_of(entry: Entry, groups: Mapping[str, str], case: Case) -> Failure:
    facts = {"default": signature_of(case), "phase": case.phase or "", **groups}
    facts["pass"] = case.evidence.last_pass or ""
    signature = re.sub(r"\{(\w+)\}", lambda m: facts.get(m[1], m[0]), entry.signature)
    return Failure(
        entry.kind,
        signature,
        name=entry.name,
        reason=entry.reason,
        advice=entry.advice,
        remedies=entry.remedies,
        refs=entry.refs,
        flags=_flags(entry, case.evidence.text),
        transient=entry.transient,
        ladder=entry.ladder,
    )


def _flags(entry: Entry, text: str) -> tuple[str, ...]:
    """Names without dashes and values, each once."""
    if entry.flags is None:
        return ()
    found = re.findall(entry.flags, text, re.MULTILINE)
    words = [word for group in found for word in group.replace(",", " ").split()]
    if any(word.startswith("-") for word in words):
        words = [word for word in words if word.startswith("-")]  # not parts of quoted values
    names = (word.strip("'\"").lstrip("-").partition("=")[0] for word in words)
    return tuple(dict.fromkeys(name for name in names if name))
