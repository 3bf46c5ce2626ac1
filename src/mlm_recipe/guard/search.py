"""The search behind ``run_ladder``: one instance, one search."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from mlm_recipe.guard.attempts import STOP, STOP_ANYWHERE, Attempt, Attempted, Budget, Gate, Tried
from mlm_recipe.guard.flags import parse_flags
from mlm_recipe.guard.ranking import content, family, out_of_device, promise
from mlm_recipe.guard.types import AS_CONFIGURED, Failure, FailureKind, Neutrality, Variant
from mlm_recipe.guard.variants import Context, Variants, combine, members

_RETRIES = frozenset({"retry", "breadcrumbs", "flags dropped"})
_MOST_DROPS = 3
_UNAFFECTED = 2
"""So many unrelated flag variants that die in the same way: flags do not reach this."""


class OutOfBudgetError(Exception):
    """A bound is reached."""


class Search:
    """Tries variants until one holds or nothing is left."""

    def __init__(
        self,
        *,
        attempt: Attempt,
        variants: Variants,
        context: Context,
        budget: Budget,
        gate: Gate | None,
        probe: Callable[[], Mapping[str, str]],
        clock: Callable[[], float],
    ):
        self._attempt, self._variants, self._context = attempt, variants, context
        self._budget, self._gate, self._probe, self._clock = budget, gate, probe, clock
        self._started = clock()
        self._dead: Mapping[str, str] | None = None
        self._base = Variant(AS_CONFIGURED, neutrality=Neutrality.SAME_PLAN)
        self._seen: set[str] = set()
        self._crumbed: set[str] = set()
        self.done: list[Attempted] = []
        self.skipped: dict[str, str] = {}
        self.dropped: list[str] = []
        self.stopped_on: Failure | None = None
        self.stopped_by = ""

    def elapsed(self) -> float:
        """Seconds since the search began."""
        return self._clock() - self._started

    def run(self, start: Variant) -> Attempted | None:
        """The attempt that holds and needs the least, or None."""
        self._base = start
        try:
            first = self._settle(start, "first")
            if first is None or first.failure is None:
                return first
            if first.failure.kind in STOP or not first.failure.ladder:
                self.stopped_on = first.failure
                return None
            winner = self._climb(first, first.failure)
        except OutOfBudgetError:
            return None
        return self._minimise(winner) if winner else None

    def _settle(self, variant: Variant, role: str) -> Attempted | None:
        """Try a variant, and again where that may help; None where nothing of it is alive."""
        self._seen.add(content(variant))
        done = self._once(variant, role)
        for _ in range(_MOST_DROPS):
            if done.failure is None or done.failure.kind is not FailureKind.UNKNOWN_FLAG:
                break
            cleaned = self._without_unknown(done.variant, done.failure)
            if cleaned is None or content(cleaned) == content(done.variant):
                break
            if role != "first" and content(cleaned) == content(self._base):
                self.skipped[variant.name] = done.failure.message or "its flags are unknown"
                return None
            if role == "first":
                self._base = cleaned
            done = self._once(cleaned, "flags dropped")
        if done.failure is not None and done.failure.transient:
            done = self._once(done.variant, "retry")
        if self._wants_breadcrumbs(done):
            assert done.failure is not None
            self._crumbed.add(done.failure.signature)
            done = self._once(done.variant, "breadcrumbs")
        return done

    def _once(self, variant: Variant, role: str) -> Attempted:
        counted = sum(done.role not in _RETRIES for done in self.done)
        if self.elapsed() >= self._budget.seconds and self.done:
            self._out_of("seconds")
        if counted >= self._budget.attempts and role not in _RETRIES:
            self._out_of("attempts")
        begun = self._clock()
        tried = self._attempt(variant, breadcrumbs=role == "breadcrumbs")
        failure = tried.failure
        if failure is None:
            failure = self._gated(variant, tried)
        before = next((done.failure for done in self.done if done.failure is not None), None)
        moved = bool(failure and before and failure.signature != before.signature)
        done = Attempted(variant, role, tried, failure, self._clock() - begun, moved)
        self.done.append(done)
        return done

    def _out_of(self, bound: str) -> None:
        self.stopped_by = bound
        raise OutOfBudgetError

    def _gated(self, variant: Variant, tried: Tried) -> Failure | None:
        """What was asked for passes; a fallback passes if it changes no numbers."""
        if variant.neutrality is Neutrality.SAME_PLAN or content(variant) == content(self._base):
            return None
        if self._gate is None:
            return Failure(
                FailureKind.NUMERIC_MISMATCH,
                "numeric gate: missing",
                message="nothing here can vouch for the numbers of a fallback",
                advice="run where devices are attached",
            )
        return self._gate(variant, tried)

    def _without_unknown(self, variant: Variant, failure: Failure) -> Variant | None:
        """The variant without the flags the failure names: its own, then the user's."""
        unknown = {name.lstrip("-").partition("=")[0] for name in failure.flags}
        kept = {name: v for name, v in variant.xla_flags.items() if name not in unknown}
        cleaned = replace(variant, xla_flags=kept)
        environ = {**self._context.environ, **variant.env}
        context = replace(self._context, failure=failure, environ=environ)
        drop = self._variants.resolve("drop_unknown_flags", context)
        if drop is not None:
            for variable in drop.env:
                gone = set(parse_flags(environ.get(variable, ""))) & unknown
                self.dropped += sorted(gone - set(self.dropped))
            cleaned = combine(cleaned, drop)
        return cleaned

    def _wants_breadcrumbs(self, done: Attempted) -> bool:
        failure, ended = done.failure, done.tried.exit
        if failure is None or failure.name or failure.last_pass or ended is None:
            return False
        if failure.signature in self._crumbed or not failure.ladder:
            return False
        crashed = failure.kind in (FailureKind.COMPILE_CRASH, FailureKind.UNKNOWN)
        return crashed and ended.signal is not None and not ended.timed_out

    def _climb(self, first: Attempted, failure: Failure) -> Attempted | None:
        unaffected: set[str] = set()
        bases: list[Attempted] = []
        for name, role in self._singles(failure):
            generic_flag = role == "generic" and self._variants.group(name) == "flags"
            if generic_flag and len(unaffected) >= _UNAFFECTED:
                self.skipped.setdefault(name, "two unrelated flags changed nothing")
                continue
            done = self._rung(name, role, self._base, failure)
            if done is None:
                continue
            if done.failure is None:
                return done
            if self._ends(done.failure):
                return None
            if not done.moved:
                bases.append(done)
                if self._variants.group(name) == "flags":
                    unaffected.add(family(done.variant))
                continue
            stacked = self._stack(done, done.failure)
            if stacked is not None:
                return stacked
        return self._pairs(bases)

    def _singles(self, failure: Failure) -> Iterator[tuple[str, str]]:
        """Names in order, with their role."""
        yield from ((name, "remedy") for name in failure.remedies)
        if failure.last_pass is not None and "disable_last_pass" not in failure.remedies:
            yield "disable_last_pass", "generic"
        groups = ["flags", "program", "sharding"]
        if failure.kind is FailureKind.OUT_OF_MEMORY:  # another program may compile in less
            groups = ["host_memory", *groups] if failure.reason == "host" else ["memory"]
        given = {*failure.remedies, "disable_last_pass"}
        for group in groups:
            for name in self._variants.generic(group, failure.kind):
                if name not in given:
                    given.add(name)
                    yield name, "generic"

    def _rung(self, name: str, role: str, base: Variant, failure: Failure) -> Attempted | None:
        """Resolve a name over a base and try it; None where there is nothing to try."""
        if name not in self._variants.specs:
            self.skipped[name] = "there is no such variant"
            return None
        environ = {**self._context.environ, **base.env}
        context = replace(self._context, failure=failure, environ=environ)
        variant = self._variants.resolve(name, context)
        if variant is None:
            if role != "generic":  # of those that somebody hoped for
                self.skipped.setdefault(name, "it changes nothing here")
            return None
        if variant.neutrality is Neutrality.OBJECTIVE:
            self.skipped[name] = "it changes the objective; ask for it by name"
            return None
        alive = self._alive(variant)
        if alive is None:
            return None
        combined = combine(base, alive)
        if content(combined) in self._seen or content(combined) == content(base):
            return None
        return self._settle(combined, role)

    def _alive(self, variant: Variant) -> Variant | None:
        """The variant without dead flags; None where nothing else is in it."""
        if not variant.xla_flags:
            return variant
        if self._dead is None:
            self._dead = self._probe()
        dead = {name: self._dead[name] for name in variant.xla_flags if name in self._dead}
        kept = {name: v for name, v in variant.xla_flags.items() if name not in dead}
        if dead and not kept and not variant.env and not variant.overrides:
            reasons = "; ".join(f"{name}: {why}" for name, why in dead.items())
            self.skipped[variant.name] = reasons
            return None
        return replace(variant, xla_flags=kept)

    def _stack(self, done: Attempted, failure: Failure) -> Attempted | None:
        """A variant moved the crash: try the new signature's own remedies on top of it."""
        kinds = (FailureKind.NUMERIC_MISMATCH, FailureKind.CONFIG_ERROR, FailureKind.AUDIT_FAILED)
        if failure.kind in kinds or not failure.ladder:
            return None
        for name in failure.remedies:
            if name in members(done.variant):
                continue
            above = self._rung(name, "stacked", done.variant, failure)
            if above is not None and above.failure is None:
                return above
        return None

    def _pairs(self, bases: list[Attempted]) -> Attempted | None:
        """The most promising two together; after running out of memory, then all of them."""
        ranked = sorted(bases, key=promise)
        groups = list(combinations(ranked[:3], 2))[:1]
        memory = bool(ranked) and out_of_device(ranked[0].failure)
        if memory and len(ranked) > 2:
            groups += [tuple(ranked[:3])]
        for group in groups:
            combined = self._base
            for done in group:
                combined = combine(combined, done.variant)
            if content(combined) in self._seen:
                continue
            done = self._settle(combined, "pair")
            if done is not None and done.failure is None:
                return done
            if done is not None and done.failure and self._ends(done.failure):
                return None
        return None

    def _ends(self, failure: Failure) -> bool:
        ends = failure.kind in STOP_ANYWHERE and not failure.transient
        if ends:
            self.stopped_on = failure
        return ends

    def _minimise(self, winner: Attempted) -> Attempted:
        """Leave out each part that is not needed, as far as the budget goes."""
        fixed = set(members(self._base))
        try:
            for name in members(winner.variant):
                rest = [n for n in members(winner.variant) if n != name]
                if name in fixed or not set(rest) - fixed:
                    continue
                smaller = self._rebuild(rest)
                if smaller is None or content(smaller) in self._seen:
                    continue
                done = self._settle(smaller, "minimise")
                if done is not None and done.failure is None:
                    winner = done
        except OutOfBudgetError:
            pass
        return winner

    def _rebuild(self, names: list[str]) -> Variant | None:
        """The combination of these parts, taken from attempts that had each part alone."""
        combined = self._base
        failure = self.done[0].failure
        context = replace(self._context, failure=failure)
        for name in names:
            if name in members(self._base):
                continue
            part = self._variants.resolve(name, context)
            if part is None:
                return None
            alive = self._alive(part)
            combined = combine(combined, alive) if alive else combined
        return combined
