"""A directory that reproduces a child's death without this package, ready to be filed."""

import json
import os
import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from mlm_recipe.guard.types import ChildExit, Failure, Variant

VARIABLES = ("XLA_", "JAX_", "LIBTPU_", "TPU_", "CUDA_", "NCCL_", "TF_CPP_")
"""Prefixes of the variables that may stand in a bundle; others may hold secrets."""
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY")
_AFTER_COMPILE = ("compiled", "budgeted", "executed", "done")


def write_bundle(
    directory: Path,
    child: Path,
    *,
    failure: Failure,
    exit: ChildExit | None,
    variant: Variant,
    environ: Mapping[str, str],
    tried: Mapping[str, str] | None = None,
) -> Path:
    """Copy and write what reproduces a death; parts the child did not come to are left out.

    Writes, where known: ``NAME.stablehlo.mlir`` and ``NAME.jaxpr.txt`` per program,
    ``options.json``, the target's description, ``environment.json``, ``versions.json``,
    ``spec.json``, ``log.txt``, ``reproduce.py``, ``repro.sh`` and ``report.md``.

    Args:
        directory: made; an existing one is written over.
        child: the directory of the child that died.
        failure: what was made of it.
        exit: how it ended.
        variant: what it ran as.
        environ: what it was started with.
        tried: variant -> what became of it, for the report.

    Returns:
        ``directory``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.stablehlo.mlir", "*.jaxpr.txt", "*versions.json", "*spec.json"):
        for path in child.glob(pattern):
            shutil.copyfile(path, directory / path.name)
    _copy_log(child / "log.txt", directory / "log.txt")
    environment = safe_environment(environ)
    _write_json(directory / "environment.json", environment)
    modules = sorted(path.name for path in directory.glob("*.stablehlo.mlir"))
    options = _options(child, directory, modules, _died_at(child))
    if options:
        _write_json(directory / "options.json", options)
        text = resources.files("mlm_recipe.guard").joinpath("reproduce.py.txt").read_text("utf-8")
        (directory / "reproduce.py").write_text(text, encoding="utf-8")
        execute = failure.phase in _AFTER_COMPILE and not options.get("absent")
        _write_script(directory / "repro.sh", environment, execute=execute)
    report = report_text(directory, failure, exit, variant, environment, tried or {})
    (directory / "report.md").write_text(report, encoding="utf-8")
    return directory


def safe_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that jax, XLA and the drivers read."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(VARIABLES) and not any(word in name.upper() for word in _SECRET)
    }


def _copy_log(source: Path, target: Path, most: int = 1 << 20) -> None:
    """The whole log, or its first and last half MiB."""
    if not source.exists():
        return
    size = source.stat().st_size
    with source.open("rb") as file:
        text = file.read(most // 2 if size > most else size)
        if size > most:
            file.seek(size - most // 2)
            text += b"\n... %d bytes left out ...\n" % (size - most) + file.read()
    target.write_bytes(text)


def _died_at(child: Path) -> str | None:
    """Name of the program that was being compiled, if the phase file says so."""
    try:
        content = json.loads((child / "phase.json").read_text(encoding="utf-8"))
        return content.get("program")
    except (OSError, ValueError):
        return None


def _options(
    child: Path, directory: Path, modules: list[str], program: str | None
) -> dict[str, Any] | None:
    """The child's options with the module to compile and a target description beside it."""
    wanted = f"{program}.stablehlo.mlir"
    module = wanted if wanted in modules else next(iter(modules), None)
    if module is None:
        return None
    own = child / module.replace(".stablehlo.mlir", ".options.json")
    try:
        source = own if own.exists() else child / "options.json"
        options = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        options = {}
    described = options.get("target_config_file")
    if described:
        path = Path(described) if os.path.isabs(described) else child / described
        if path.exists():
            shutil.copyfile(path, directory / path.name)
        options["target_config_file"] = path.name
    return {**options, "module": module}


def _write_script(path: Path, environment: Mapping[str, str], *, execute: bool) -> None:
    exports = [
        f"export {name}={_shell(value)}"
        for name, value in environment.items()
        if not name.startswith(("JAX_COMPILATION_CACHE", "JAX_ENABLE_COMPILATION_CACHE"))
    ]
    lines = [
        "#!/bin/sh",
        "# Needs python with jax; versions.json says which. PYTHON=... picks another one.",
        'cd "$(dirname "$0")" || exit 1',
        "ulimit -c 0",
        *exports,
        f'exec "${{PYTHON:-python}}" reproduce.py{" --execute" if execute else ""} </dev/null',
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o755)


def _shell(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"


def report_text(
    directory: Path,
    failure: Failure,
    exit: ChildExit | None,
    variant: Variant,
    environment: Mapping[str, str],
    tried: Mapping[str, str],
) -> str:
    """Markdown for an issue tracker: what, with what, how, and what helped."""
    versions = _read_json(directory / "versions.json")
    names = sorted(path.name for path in directory.iterdir() if path.name != "report.md")
    steps = ["    sh repro.sh"] if "repro.sh" in names else [_no_steps(failure)]
    sections = {
        f"# {failure.signature or failure.kind.value}": [_how(failure, exit)],
        "## Versions": [f"- {name} {value}" for name, value in versions.items()],
        "## To reproduce": [*steps, "", f"Files: {', '.join(f'`{name}`' for name in names)}"],
        "## Environment": [f"- `{name}={value}`" for name, value in environment.items()],
        "## What was run": _what(variant),
        "## Tried": [f"- `{name}`: {end}" for name, end in tried.items()] or ["- nothing else"],
        "## Known": [
            f"- {failure.advice or 'no workaround is known'}",
            *(f"- {ref}" for ref in failure.refs),
        ],
        "## End of the log": ["```", *_tail(exit), "```"],
    }
    return (
        "\n\n".join(f"{title}\n\n" + "\n".join(lines) for title, lines in sections.items()) + "\n"
    )


def _how(failure: Failure, exit: ChildExit | None) -> str:
    ended = "was remembered"
    if exit is not None:
        ended = f"exit code {exit.returncode}"
        if exit.signal is not None:
            ended = f"signal {exit.signal}"
        if exit.timed_out:
            ended = "ended by its deadline"
        ended += f" after {exit.seconds:.1f} s"
    phase = failure.phase or (exit.phase if exit else None) or "unknown"
    text = f"{failure.kind.value} in phase `{phase}`, {ended}."
    if failure.last_pass:
        text += f" Last HLO pass: `{failure.last_pass}`."
    return f"{text}\n\n    {failure.message}" if failure.message else text


def _what(variant: Variant) -> list[str]:
    lines = [f"- variant `{variant.name}`"]
    lines += [f"- `--{name}={value}`" for name, value in variant.xla_flags.items()]
    lines += [f"- `{name}={value}`" for name, value in variant.env.items()]
    return lines + [f"- `{path}: {value}`" for path, value in variant.overrides.items()]


def _no_steps(failure: Failure) -> str:
    return (
        f"It died in phase `{failure.phase or 'start'}`, before there was a program to compile; "
        "start the child again with `spec.json`."
    )


def _tail(exit: ChildExit | None, lines: int = 40) -> list[str]:
    return exit.log_tail.splitlines()[-lines:] if exit else []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
