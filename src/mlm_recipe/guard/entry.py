"""Proves any jax program, for people whose program is not this recipe."""

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlm_recipe.guard.children import Job
from mlm_recipe.guard.config import GuardConfig
from mlm_recipe.guard.hardware import attached_platform, hardware_identity
from mlm_recipe.guard.prove import prove
from mlm_recipe.guard.report import Report
from mlm_recipe.guard.table import print_report
from mlm_recipe.guard.targets import parse_target
from mlm_recipe.guard.types import Variant
from mlm_recipe.guard.variants import Context, Variants, load_variants
from mlm_recipe.guard.verdicts import VerdictMemory


def prove_entry(
    entry: str,
    *,
    target: str = "auto",
    directory: Path | None = None,
    report_file: Path | None = None,
    catalogue: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Prove an entry's programs for one target and print the report.

    Only flags and environment are varied: what a program is made of is not known here. Nothing is
    remembered, since a program's sources are not known either.

    Args:
        entry: ``pkg.mod:build`` or ``path/file.py:build``.
        target: attached devices, or a target that is not there.
        directory: where children leave their files; None is a new temporary directory.
        report_file: gets the report as JSON.
        catalogue: further signatures.
        environ: of the children; None is ours.

    Returns:
        The exit code of ``guard.exits``.

    Raises:
        ConfigError: the target is not known, the catalogue malformed.
    """
    spec = parse_target(target)
    environ = dict(os.environ if environ is None else environ)
    directory = directory or Path(tempfile.mkdtemp(prefix="mlm_recipe-guard-"))
    platform = attached_platform(environ) if target == "auto" else spec.platform
    config = replace(GuardConfig(), catalogue=str(catalogue) if catalogue else None)
    job = Job(entry, _no_arguments, target, environ, directory)
    report = prove(
        job,
        config=config,
        variants=flags_only(load_variants()),
        context=Context(platform=platform, devices=spec.count, environ=environ),
        memory=VerdictMemory(directory / "verdicts", force=True),
        key=lambda variant: variant.name,
        say=_say,
    )
    whole = Report(
        (report,),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=report.seconds,
        host=hardware_identity(environ),
    )
    if report_file is not None:
        whole.write(report_file)
    print_report(whole, sys.stderr)
    return int(whole.exit_code)


def _say(line: str) -> None:
    sys.stderr.write(f"preflight: {line}\n")
    sys.stderr.flush()


def _no_arguments(variant: Variant) -> Mapping[str, Any]:
    return {}


def flags_only(variants: Variants) -> Variants:
    """Those that change flags or environment, and no configuration."""
    known = {
        name: spec
        for name, spec in variants.specs.items()
        if variants.group(name) in ("flags", "environment")
    }
    order = {
        group: tuple(name for name in names if name in known)
        for group, names in variants.order.items()
    }
    return Variants(known, order)
