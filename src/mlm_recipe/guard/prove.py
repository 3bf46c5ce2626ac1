"""One target from question to report: memory, children, ladder, gate, reproducers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlm_recipe.guard.attempts import Budget, Outcome, Tried
from mlm_recipe.guard.bundle import write_bundle
from mlm_recipe.guard.catalogue import load_catalogue
from mlm_recipe.guard.children import Children, Job
from mlm_recipe.guard.classify import HostFacts
from mlm_recipe.guard.config import GuardConfig
from mlm_recipe.guard.flags import probe_flags
from mlm_recipe.guard.ladder import run_ladder
from mlm_recipe.guard.report import TargetReport, target_report
from mlm_recipe.guard.types import AS_CONFIGURED, Failure, FailureKind, Neutrality, Variant
from mlm_recipe.guard.variants import Context, Variants, apply_flags
from mlm_recipe.guard.verdicts import VerdictMemory

_DEATHS = frozenset(
    {
        FailureKind.COMPILE_CRASH,
        FailureKind.COMPILE_ERROR,
        FailureKind.RUNTIME_CRASH,
        FailureKind.TIMEOUT,
        FailureKind.OUT_OF_MEMORY,
        FailureKind.UNKNOWN,
    }
)
"""Kinds that a reproducer is worth writing for."""

Key = Callable[[Variant], str]


@dataclass
class Remembering:
    """Children's attempts, with a memory in front: a question is asked once.

    Args:
        children: what runs where nothing is remembered.
        memory: of verdicts.
        key: of the question that a variant is.
        say: one line for people.
        died: variants that passed and died in training all the same.
    """

    children: Children
    memory: VerdictMemory
    key: Key
    say: Callable[[str], None]
    died: Mapping[str, Failure] = field(default_factory=dict)
    _vouched: set[str] = field(default_factory=set)

    def __call__(self, variant: Variant, *, breadcrumbs: bool = False) -> Tried:
        """The ladder's ``attempt``."""
        key = self.key(variant)
        if variant.name in self.died:
            self.memory.forget(key)
            return Tried(self.died[variant.name], remembered=True)
        known = None if breadcrumbs else self.memory.find(key)
        if known is not None:
            if known.passed:
                self._vouched.add(variant.name)
            result = known.payload.get("result")
            return Tried(known.failure, None, result, remembered=True)
        self.say(f"{variant.name}: in a child{', with breadcrumbs' if breadcrumbs else ''}")
        tried = self.children(variant, breadcrumbs=breadcrumbs)
        if tried.failure is not None or not self._needs_gate(variant):
            self._remember(key, tried.failure, tried)
        return tried

    def gate(self, variant: Variant, tried: Tried) -> Failure | None:
        """The ladder's ``gate``; what passed it once is remembered with the variant."""
        if variant.name in self._vouched and tried.remembered:
            return None
        self.say(f"{variant.name}: its numbers against the reference")
        failure = self.children.gate(variant, tried)
        self._remember(self.key(variant), failure, tried)
        return failure

    def _needs_gate(self, variant: Variant) -> bool:
        return variant.neutrality is not Neutrality.SAME_PLAN

    def _remember(self, key: str, failure: Failure | None, tried: Tried) -> None:
        result = dict(tried.result or {})
        numerics = dict(result.get("numerics") or {})
        numerics.pop("sketch", None)
        self.memory.remember(key, failure, {"result": result | {"numerics": numerics or None}})


def prove(
    job: Job,
    *,
    config: GuardConfig,
    variants: Variants,
    context: Context,
    memory: VerdictMemory,
    key: Key,
    start: Variant | None = None,
    died: Mapping[str, Failure] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> TargetReport:
    """Find the first variant of a job that holds.

    Args:
        job: what is to be proved, for one target.
        config: bounds, audits and limits.
        variants: what there is to try.
        context: configuration, platform and devices of the target.
        memory: of verdicts.
        key: the question that a variant is; equal questions have equal keys.
        start: what to begin with; None is as configured.
        died: variants that died in training since they were proved.
        say: is told what happens, one line at a time.
    """
    catalogue = load_catalogue(Path(config.catalogue) if config.catalogue else None)
    children = Children(job, config, catalogue, HostFacts.now())
    remembering = Remembering(children, memory, key, say, died or {})
    outcome = run_ladder(
        start or Variant(AS_CONFIGURED, neutrality=Neutrality.SAME_PLAN),
        remembering,
        variants=variants,
        context=context,
        budget=Budget(config.max_attempts, config.max_seconds),
        gate=remembering.gate,
        dead_flags=lambda: probe_flags(_flags(variants), job.environ),
    )
    return target_report(outcome, target={"name": job.target}, bundles=_bundles(outcome, job))


def _flags(variants: Variants) -> dict[str, str]:
    """Every flag that a variant would set, once."""
    flags: dict[str, str] = {}
    for spec in variants.specs.values():
        flags |= spec.variant.xla_flags
    return flags


def _bundles(outcome: Outcome, job: Job) -> Mapping[str, str]:
    """A reproducer for each child that died."""
    written: dict[str, str] = {}
    ends = {done.variant.name: _end(done.failure) for done in outcome.attempts}
    for done in outcome.attempts:
        failure, child = done.tried.failure, done.tried.directory
        if failure is None or not child or failure.kind not in _DEATHS:
            continue
        directory = write_bundle(
            Path(child) / "reproducer",
            Path(child),
            failure=failure,
            exit=done.tried.exit,
            variant=done.variant,
            environ=apply_flags(done.variant, job.environ),
            tried={name: end for name, end in ends.items() if name != done.variant.name},
        )
        written[child] = str(directory)
    return written


def _end(failure: Failure | None) -> str:
    return "passed" if failure is None else f"{failure.kind}: {failure.signature}"
