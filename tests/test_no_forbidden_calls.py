"""What must not be in the package: it hangs batch jobs, bypasses logs or runs foreign code."""

import re
from pathlib import Path

import pytest

import mlm_recipe

SOURCES = sorted(Path(mlm_recipe.__path__[0]).rglob("*.py"))


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?<![\w.])print\(",
        r"debug\.(breakpoint|print)\(",
        r"(?<![\w.])breakpoint\(",
        r"trust_remote_code\s*=\s*True",
        r"type: ignore(?!\[)",
    ],
)
def test_not_in_the_package(pattern: str):
    assert len(SOURCES) > 5
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(pattern, line)
    ]
    assert not found
