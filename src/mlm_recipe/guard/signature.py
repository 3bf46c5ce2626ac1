"""Signatures: what stays the same of a death over machines, runs and versions."""

import re

# `F0000 00:00:00.0 123 file.cc:12] text`, `F1130 ...` and the older `...: F external/x/file.cc:12] `
_FATAL = re.compile(r"(?:^F\d{4} |: F )[^\n]*?([\w\-]+\.(?:cc|h|cpp)):\d+\] ([^\n]*)", re.M)
_CHECK = re.compile(r"Check failed: ([^\n]*)")
_ABORTS = (
    re.compile(r"^LLVM ERROR: ([^\n]*)", re.M),
    re.compile(r"terminate called after throwing an instance of '([^']*)'"),
    re.compile(r"^(?:\S+: )?(\S+\.(?:cc|cpp|h|c)):\d+:[^\n]*[Aa]ssertion [^\n]*failed", re.M),
    re.compile(r"^(free\(\): [^\n]*|malloc\(\): [^\n]*|double free[^\n]*|corrupted [^\n]*)", re.M),
)
_STATUS = re.compile(r"(?:Jax|Xla)RuntimeError: ([A-Z_]{4,}): ([^\n]*)")
_PYTHON = re.compile(
    r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning))(?::\s*([^\n]*))?$",
    re.M,
)
_PASS = re.compile(r"HLO pass:? ([\w\-]+)")


def fatal_line(log: str) -> tuple[str, str] | None:
    """``(file, text)`` of the first fatal line of C++ logging; None without one."""
    found = _FATAL.search(log)
    return (found.group(1), found.group(2).strip()) if found else None


def abort_text(log: str) -> str | None:
    """What the process said when it aborted without a fatal line."""
    for pattern in _ABORTS:
        found = pattern.search(log)
        if found:
            return found.group(0).strip()
    return None


def status_error(log: str) -> tuple[str, str] | None:
    """``(status word, text)`` of the last error that XLA raised into Python."""
    found = _STATUS.findall(log)
    return found[-1] if found else None


def python_error(log: str) -> tuple[str, str] | None:
    """``(type, message)`` that the last traceback ends in; the type without its module."""
    start = log.rfind("Traceback (most recent call last)")
    found = _PYTHON.findall(log[start:]) if start >= 0 else []
    if not found:
        return None
    name, message = found[-1]
    return name.rpartition(".")[2], message


def last_pass(log: str) -> str | None:
    """The HLO pass that was logged last, where breadcrumbs were on."""
    found = _PASS.findall(log)
    return found[-1] if found else None


def normalise(text: str) -> str:
    """Without numbers, addresses, paths and names that a compiler made up."""
    check = _CHECK.search(text)
    text = check.group(1) if check else text
    text = re.sub(r"\(\S*/[^\s)]*\)", "", text)
    text = re.sub(r"(?:/[\w.\-]+){2,}/", "", text)
    text = re.sub(r"0x[0-9a-fA-F]+", "0x", text)
    text = re.sub(r"\b(\w+?)[._]\d+(?:[._]\d+)*\b", r"\1", text)
    text = re.sub(r"\(\d[^)]*vs\. [^)]*\)", "", text)
    text = re.sub(r"(?<![A-Za-z])\d+(?:\.\d+)?", "N", text)
    return re.sub(r"\s+", " ", text).strip()[:160]


def fatal_signature(file: str, text: str) -> str:
    """``file.cc: CHECK expression``."""
    return f"{file}: {normalise(text)}"
