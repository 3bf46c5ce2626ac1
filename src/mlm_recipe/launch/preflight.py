"""From an effective configuration to the guard's question, and back to how the run starts."""

import copy
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import mlm_recipe
from mlm_recipe.guard.children import Job
from mlm_recipe.guard.config import GuardConfig
from mlm_recipe.guard.hardware import attached_platform, hardware_identity
from mlm_recipe.guard.prove import prove
from mlm_recipe.guard.report import Report, TargetReport
from mlm_recipe.guard.targets import parse_target
from mlm_recipe.guard.types import AS_CONFIGURED, Failure, Neutrality, Variant
from mlm_recipe.guard.variants import Context, Variants, apply_flags, load_variants
from mlm_recipe.guard.verdicts import VerdictMemory, verdict_key, versions
from mlm_recipe.launch.overlay import Config, get_path, set_path

ENTRY = "mlm_recipe.step:build"

# What decides neither the program nor whether it fits: two runs that differ in it ask one question.
_NO_MATTER = (
    "output_dir",
    "audit_batches",
    "data.components",
    "data.cache_dir",
    "trainer.id",
    "trainer.tracker",
    "trainer.log_dir",
    "trainer.checkpointer",
    "trainer.profiler",
    "trainer.steps_per_eval",
    "trainer.max_eval_batches",
    "trainer.jax_compilation_cache_dir",
    "guard.cache_dir",
    "guard.remember_days",
    "guard.restarts",
    "guard.variant",
    "guard.max_attempts",
    "guard.max_seconds",
)

# The reference of the numeric gate: one CPU device, plain attention, no microbatches.
_ON_ONE_CPU = {
    "trainer.mesh": {},
    "trainer.use_explicit_mesh_axes": False,
    "trainer.per_device_parallelism": -1,
    "model.attn_backend": "vanilla",
}


@dataclass(frozen=True)
class Preflight:
    """The guard's questions about one run.

    Args:
        config: the effective configuration, raw.
        guard: its ``guard`` block.
        environ: what the training program would start with.
        run_dir: children leave their files below it.
    """

    config: Config
    guard: GuardConfig
    environ: Mapping[str, str]
    run_dir: Path
    strict: bool = False
    force: bool = False
    say: Callable[[str], None] = field(default=lambda line: None)

    @cached_property
    def variants(self) -> Variants:
        """The package's, and the run's own."""
        return load_variants(get_path(self.config, "guard.variants", {}))

    def prove_all(
        self,
        targets: list[str],
        *,
        start: str = AS_CONFIGURED,
        died: Mapping[str, Failure] | None = None,
    ) -> Report:
        """Prove the train step for each target, one after the other.

        Args:
            targets: ``auto``, or names of targets that are not there.
            start: the variant to begin with.
            died: variants that died in training since, and of what.

        Raises:
            ConfigError: a target or variant is not known.
        """
        began = time.monotonic()
        reports = tuple(self._prove(target, start, died or {}) for target in targets)
        return Report(
            targets=reports,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=time.monotonic() - began,
            strict=self.strict,
            host=hardware_identity(self.environ),
        )

    def _prove(self, target: str, start: str, died: Mapping[str, Failure]) -> TargetReport:
        context = self._context(target)
        job = Job(
            entry=ENTRY,
            arguments=lambda variant: {"config": with_overrides(self.config, variant)},
            target=target,
            environ=self.environ,
            directory=self._directory(target),
            reference_arguments=self._reference_arguments,
        )
        return prove(
            job,
            config=self.guard,
            variants=self.variants,
            context=context,
            memory=self._memory,
            key=lambda variant: self._key(variant, target),
            died=died,
            start=self.first_variant(start, target),
            say=lambda line: self.say(f"preflight {target}: {line}"),
        )

    def first_variant(self, name: str, target: str = "auto") -> Variant:
        """The variant of that name, or as configured where it would change nothing here."""
        found = self.variants.resolve(name, self._context(target))
        return found or Variant(AS_CONFIGURED, neutrality=Neutrality.SAME_PLAN)

    def _reference_arguments(self, rows: int) -> Mapping[str, Any]:
        reference = Variant("reference", overrides=_ON_ONE_CPU)
        return {"config": with_overrides(self.config, reference), "gradient_rows": rows}

    def _directory(self, target: str) -> Path:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        name = "".join(c if c.isalnum() else "-" for c in target)
        return self.run_dir / "guard" / f"{stamp}-{os.getpid()}-{name}"

    def _context(self, target: str) -> Context:
        spec = parse_target(target)
        platform = attached_platform(self.environ) if target == "auto" else spec.platform
        return Context(
            config=self.config, platform=platform, devices=spec.count, environ=self.environ
        )

    @cached_property
    def _memory(self) -> VerdictMemory:
        directory = Path(self.guard.cache_dir) / "verdicts"
        return VerdictMemory(directory, remember_days=self.guard.remember_days, force=self.force)

    def _key(self, variant: Variant, target: str) -> str:
        attached = target == "auto"
        return verdict_key(
            program=self._program_digest,
            versions=self._versions,
            target=hardware_identity(self.environ) if attached else _described(target),
            environ=apply_flags(variant, self.environ),
            variant=variant,
            mode=f"execute:{self.guard.execute_steps}" if attached else "compile",
        )

    @cached_property
    def _versions(self) -> Mapping[str, str]:
        return versions(Path(self.guard.cache_dir) / "libraries.json")

    @cached_property
    def _program_digest(self) -> str:
        """Of the configuration and the code that make the program, and of the tokenizer."""
        config = copy.deepcopy(self.config)
        for path in _NO_MATTER:
            *blocks, key = path.split(".")
            block = get_path(config, ".".join(blocks)) if blocks else config
            if isinstance(block, dict):
                block.pop(key, None)
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        package = Path(mlm_recipe.__file__).parent
        tokenizer = Path(str(get_path(config, "data.tokenizer", ""))) / "tokenizer.json"
        files = sorted(package.rglob("*.py"))
        for file in [*files, *([tokenizer] if tokenizer.is_file() else [])]:
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
        return digest.hexdigest()


def _described(target: str) -> str:
    path = Path(target)
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else target


def with_overrides(config: Config, variant: Variant) -> Config:
    """The configuration under a variant: file < command line < variant."""
    changed = copy.deepcopy(config)
    for path, value in variant.overrides.items():
        set_path(changed, path, value)
    return changed


def say_on_stderr(line: str) -> None:
    """One line, at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
