"""One launch: prove, then train, in one place."""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import draccus

from mlm_recipe.guard.catalogue import load_catalogue
from mlm_recipe.guard.config import GuardConfig
from mlm_recipe.guard.exits import ExitCode
from mlm_recipe.guard.report import Report
from mlm_recipe.guard.table import print_report
from mlm_recipe.guard.types import AS_CONFIGURED, Failure, Variant
from mlm_recipe.guard.variants import apply_flags
from mlm_recipe.launch.environment import training_environment
from mlm_recipe.launch.options import Options
from mlm_recipe.launch.overlay import Config, set_path, write_yaml
from mlm_recipe.launch.preflight import Preflight, say_on_stderr, with_overrides
from mlm_recipe.launch.trainer import Trainer
from mlm_recipe.launch.training import Plan, train_to_the_end

_MAY_TRAIN = frozenset({ExitCode.OK, ExitCode.FALLBACK})


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _chosen(report: Report) -> Variant:
    """What the report found to hold on the attached devices."""
    raw: Mapping[str, Any] = report.targets[0].variant or {"name": AS_CONFIGURED}
    return Variant(
        raw["name"],
        xla_flags=raw.get("xla_flags") or {},
        env=raw.get("env") or {},
        overrides=raw.get("overrides") or {},
    )


@dataclass
class Launch:
    """A run that is about to start.

    Args:
        config: the effective configuration, as in ``config_file``.
        config_file: in the run directory.
        options: of the command line.
    """

    config: Config
    config_file: Path
    options: Options

    @property
    def run_dir(self) -> Path:
        """Where the run writes."""
        return self.config_file.parent

    @cached_property
    def guard(self) -> GuardConfig:
        """The ``guard`` block."""
        return draccus.decode(GuardConfig, self.config.get("guard") or {})

    @cached_property
    def environ(self) -> dict[str, str]:
        """What training starts with, as configured."""
        return training_environment(self.config, self.run_dir.resolve(), os.environ)

    @cached_property
    def preflight(self) -> Preflight:
        """The guard's questions about this run."""
        return Preflight(
            self.config,
            self.guard,
            self.environ,
            self.run_dir,
            strict=self.options.strict,
            force=self.options.force,
            say=say_on_stderr,
        )

    def run(self) -> int:
        """Prove, and train unless that was all; returns the exit code.

        Raises:
            KeyboardInterrupt: we were asked to end while proving; no child is left.
        """
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)
        (self.run_dir / "preflight.json").unlink(missing_ok=True)
        if self.options.preflight_only:
            return int(self._prove(self.options.targets or ["auto"]).exit_code)
        if self.options.preflight is False or not self.guard.preflight:
            return self._train(self._plan(self.preflight.first_variant(self.options.variant)), None)
        trainer = self._start_trainer_early()
        try:
            report = self._prove(["auto"])
        except BaseException:
            trainer.dismiss()
            raise
        if report.exit_code not in _MAY_TRAIN:
            trainer.dismiss()
            return int(report.exit_code)
        return self._train(self._plan(_chosen(report)), trainer)

    def _start_trainer_early(self) -> Trainer:
        """It imports while the preflight works; it touches no device until it is told to."""
        return Trainer(self.environ, self.run_dir / "logs" / "console.log")

    def _prove(self, targets: list[str]) -> Report:
        report = self.preflight.prove_all(targets, start=self.options.variant)
        report.write(self.run_dir / "preflight.json")
        print_report(report, sys.stderr)
        return report

    def _plan(self, variant: Variant) -> Plan:
        """Write the variant into the configuration of the run."""
        config = with_overrides(self.config, variant)
        set_path(config, "guard.variant", variant.name)
        write_yaml(config, self.config_file)
        environ = apply_flags(variant, self.environ)
        report = self.run_dir / "preflight.json"
        if report.exists():
            environ["MLM_RECIPE_PREFLIGHT"] = str(report.resolve())
        return Plan(variant.name, self.config_file, environ)

    def _train(self, plan: Plan, trainer: Trainer | None) -> int:
        extra = Path(self.guard.catalogue) if self.guard.catalogue else None
        return train_to_the_end(
            plan,
            trainer,
            restarts=self.guard.restarts,
            catalogue=load_catalogue(extra),
            next_plan=self._next_plan,
            say=say_on_stderr,
        )

    def _next_plan(self, failure: Failure, failed: frozenset[str]) -> Plan | None:
        """What holds, given that these variants died in training."""
        report = self.preflight.prove_all(
            ["auto"], start=self.options.variant, died=dict.fromkeys(failed, failure)
        )
        report.write(self.run_dir / "preflight.json")
        print_report(report, sys.stderr)
        return self._plan(_chosen(report)) if report.targets[0].variant is not None else None
