"""The import table is the architecture; a new edge is a design decision."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlm_recipe

PACKAGE = Path(mlm_recipe.__file__).parent

# unit -> the units it may import. Units are the package's folders and its top-level files.
EDGES = {
    "__init__": set(),
    "errors": set(),
    "guard": {"errors"},
    "preflight": {"guard"},
    "data": {"errors"},
    "model": {"errors"},
    "optim": set(),
    "provenance": set(),
    "fit": {"data", "errors"},
    "loss": {"data", "model"},
    "scores": {"data"},
    "unigram": {"data"},
    "summary": {"scores"},
    "synthetic": {"data"},
    "abstract": {"data"},
    "config": {"data", "errors", "guard", "model", "optim"},
    "recipe": {"config", "data", "errors", "fit", "loss", "model"},
    "step": {"abstract", "config", "data", "model", "preflight", "recipe", "stored", "synthetic"},
    "stored": {"config", "errors"},
    "progress": {"data", "summary"},
    "evaluate": {"data", "loss", "model", "recipe", "scores"},
    "track_preflight": {"guard"},
    "training": {
        "config", "data", "errors", "evaluate", "preflight", "progress", "provenance", "recipe",
        "summary", "track_preflight", "unigram",
    },
    "launch": {"data", "errors", "fit", "guard", "model"},
    "run": {"config", "data", "errors", "guard", "launch", "provenance", "summary", "training"},
    "train": {"errors", "guard", "launch"},
}  # fmt: skip


def unit_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(file: Path) -> set[str]:
    """Units that a file imports anywhere, in functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    own = {name.split(".")[1] for name in names if name.startswith("mlm_recipe.")}
    return own & EDGES.keys()


def test_every_import_is_an_edge_of_the_table():
    for file in PACKAGE.rglob("*.py"):
        unit = unit_of(file)
        extra = imports_of(file) - EDGES[unit] - {unit}
        assert not extra, f"{file.relative_to(PACKAGE)} imports {extra}"


def test_the_table_has_no_cycle():
    done: set[str] = set()
    while len(done) < len(EDGES):
        ready = {unit for unit, uses in EDGES.items() if unit not in done and uses <= done}
        assert ready, f"cycle among {EDGES.keys() - done}"
        done |= ready


# What the child may take of the guard: the phase file, its prologue, names of targets.
FOR_THE_CHILD = {"status", "prologue", "targets"}


def test_the_child_takes_only_data_and_status_of_the_guard():
    for file in (PACKAGE / "preflight").rglob("*.py"):
        taken = set(re.findall(r"mlm_recipe\.guard\.(\w+)", file.read_text()))
        assert taken <= FOR_THE_CHILD, file.name


@pytest.mark.parametrize(
    "module", ["mlm_recipe.train", "mlm_recipe.launch.checks", "mlm_recipe.guard.__main__"]
)
def test_the_launcher_imports_no_jax(module):
    code = (
        f"import sys, {module}; print({{'jax', 'haliax', 'levanter', 'torch'}} & {{*sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_files_are_small():
    sizes = {f.name: len(f.read_text().splitlines()) for f in PACKAGE.rglob("*.py")}
    assert {name: size for name, size in sizes.items() if size > 300} == {}
