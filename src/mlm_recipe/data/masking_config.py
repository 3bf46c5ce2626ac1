"""MaskingConfig: which tokens the model must predict, and what it sees in their place.

Owns the numbers and their validation; ``mask_tokens`` in ``masking.py`` acts on them. Importable
without jax.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from mlm_recipe.errors import ConfigError

Selection = Literal["exact", "bernoulli"]
Unit = Literal["token", "whole_word", "span"]
Interpolation = Literal["constant", "linear"]

_SLOT_MULTIPLE = 8
# Assumed of the tokens n in a word; what they leave no slot for is dropped and counted.
_WORD_ROOM = 16  # most n that may cross the budget
_WORD_SPREAD = 4.0  # E[n^2]/E[n]
_SPAN_WORD_TOKENS = 2  # mean n


class MaskingRates(NamedTuple):
    """What a schedule moves: floats, arrays over steps, or traced scalars. A pytree for jax."""

    rate: ArrayLike
    """Share of the maskable tokens that is selected."""
    mask_fraction: ArrayLike
    """Share of the selected tokens that becomes the mask token."""
    random_fraction: ArrayLike
    """Share of the selected tokens that becomes a random token; the rest is kept."""


@dataclass(frozen=True)
class RateStage:
    """One point of ``masking.rate_schedule``; what is left out stays as in the stage before."""

    step: int
    """Training step from which (``constant``) or at which (``linear``) the values hold."""
    rate: float | None = None
    """Share of maskable tokens selected, in (0, 1]."""
    mask_fraction: float | None = None
    """Share of the selected tokens replaced by the mask token, in [0, 1]."""
    random_fraction: float | None = None
    """Share of the selected tokens replaced by a random token, in [0, 1]."""


@dataclass(frozen=True)
class MaskingConfig:
    """The YAML block ``masking``. The defaults are BERT's and RoBERTa's.

    Devlin et al. 2019 (15 %, 80/10/10), Liu et al. 2019 (new masks each time a text is seen),
    Joshi et al. 2020 (spans). Raises ``ConfigError`` for values that cannot be meant.
    """

    rate: float = 0.15
    """Share of the maskable tokens (neither special nor padding) that is selected, in (0, 1]."""
    rate_schedule: tuple[RateStage, ...] = ()
    """Rate and fractions as a function of the training step; before the first stage, the values
    of this block hold from step 0. Evaluation does not follow it."""
    interpolation: Interpolation = "constant"
    """Between stages: ``constant`` holds a stage until the next, ``linear`` draws straight lines.
    After the last stage both hold it."""
    eval_rate: float = 0.15
    """Rate on evaluation data, fixed so that runs with different training rates compare."""
    mask_fraction: float = 0.8
    """Share of the selected tokens replaced by the mask token."""
    random_fraction: float = 0.1
    """Share of the selected tokens replaced by a uniform non-special token. The rest is kept as it
    is, and still carries loss."""
    selection: Selection = "exact"
    """``exact``: every example has ``rate`` times its maskable tokens selected, the fraction of a
    token rounded at random, so the rate is unbiased and microbatches weigh the same.
    ``bernoulli``: every unit independently; what finds no slot is dropped and counted."""
    unit: Unit = "token"
    """What is selected as a whole: ``token``; ``whole_word``, refused where the tokenizer does not
    tell where words start; ``span``, runs of words (of tokens where words are not known)."""
    span_geometric_p: float = 0.2
    """Span lengths follow a geometric distribution with this success probability, in (0, 1] ..."""
    span_max_length: int = 10
    """... restricted to lengths up to this one, in words: mean 3.8 at the defaults."""
    min_per_document: int = 1
    """Masks that every document of a packed row gets (all its tokens if it has fewer), even where
    that exceeds ``rate``. 0 leaves it to chance."""
    max_masked: int | None = None
    """Size of the static ``masked`` axis. ``None`` derives it from the highest scheduled rate and
    the row length: the exact count, or the mean plus 6 sigma, rounded up to a multiple of 8."""

    def __post_init__(self):
        for field in ("rate", "eval_rate", "span_geometric_p"):
            _check_share(f"masking.{field}", getattr(self, field), zero=False)
        _check_choice("masking.interpolation", self.interpolation, get_args(Interpolation))
        _check_choice("masking.selection", self.selection, get_args(Selection))
        _check_choice("masking.unit", self.unit, get_args(Unit))
        _check_at_least("masking.span_max_length", self.span_max_length, 1)
        _check_at_least("masking.min_per_document", self.min_per_document, 0)
        if self.max_masked is not None:
            _check_at_least("masking.max_masked", self.max_masked, 1)
        _check_fractions("masking", self.mask_fraction, self.random_fraction)
        self._check_schedule()

    def _check_schedule(self):
        steps, rates = self._knots()
        resolved = rates[len(steps) - len(self.rate_schedule) :]
        previous = -1
        for i, (stage, (rate, mask, random)) in enumerate(
            zip(self.rate_schedule, resolved, strict=True)
        ):
            field = f"masking.rate_schedule[{i}]"
            if stage.step <= previous:
                raise ConfigError(
                    f"{field}.step",
                    stage.step,
                    "steps must be at least 0 and increase from stage to stage",
                    f"use a step of {previous + 1} or more, or reorder the stages",
                )
            previous = stage.step
            _check_share(f"{field}.rate", float(rate), zero=False)
            _check_fractions(field, float(mask), float(random))

    def _knots(self) -> tuple[list[int], np.ndarray]:
        """Steps and, ``{step, 3}``, the rates there, with the block's own values at step 0."""
        values = (self.rate, self.mask_fraction, self.random_fraction)
        steps, table = [0], [values]
        for stage in self.rate_schedule:
            values = (
                values[0] if stage.rate is None else stage.rate,
                values[1] if stage.mask_fraction is None else stage.mask_fraction,
                values[2] if stage.random_fraction is None else stage.random_fraction,
            )
            if stage.step == 0:
                steps, table = [], []
            steps.append(stage.step)
            table.append(values)
        return steps, np.asarray(table, dtype=np.float64)

    def rates_at(self, step: ArrayLike) -> MaskingRates:
        """Rates at a training step: floats for a scalar, float64 arrays for an array of steps."""
        steps, rates = self._knots()
        step = np.asarray(step)
        if self.interpolation == "linear":
            columns = [np.interp(step, steps, column) for column in rates.T]
        else:
            stage = np.searchsorted(steps, step, side="right") - 1
            columns = [column[stage] for column in rates.T]
        if step.ndim == 0:
            columns = [float(column) for column in columns]
        return MaskingRates(*columns)

    def for_eval(self) -> "MaskingConfig":
        """Masks for evaluation: single tokens, exact count, 80/10/10 at ``eval_rate``.

        Training with another unit, fraction or schedule leaves them as they are, so evaluation
        losses of different recipes compare.
        """
        return MaskingConfig(rate=self.eval_rate, eval_rate=self.eval_rate)

    def span_length_probabilities(self) -> np.ndarray:
        """``{length}`` float64: probability of span lengths 1, 2, ... ``span_max_length``.

        The geometric distribution cut at the maximum and normalised (Joshi et al. 2020, 3.1).
        """
        tail = 1.0 - self.span_geometric_p
        weights = self.span_geometric_p * tail ** np.arange(self.span_max_length)
        return weights / weights.sum()

    def num_masked_slots(self, seq_len: int, max_documents: int = 1) -> int:
        """Size of the ``masked`` axis for rows of ``seq_len`` tokens.

        Args:
            seq_len: tokens in a row.
            max_documents: the most documents a row may hold, each owed ``min_per_document``.

        Raises ``ConfigError`` if ``max_masked`` cannot hold what exact selection will select.
        """
        rate = float(self._knots()[1][:, 0].max())
        mean = rate * seq_len
        needed = max(math.ceil(mean - 1e-6), min(self.min_per_document * max_documents, seq_len))
        if self.max_masked is not None:
            if self.selection == "exact" and self.max_masked < needed:
                raise ConfigError(
                    "masking.max_masked",
                    self.max_masked,
                    f"{needed} masks are needed at rate {rate:g} in rows of {seq_len} tokens "
                    f"and up to {max_documents} document(s)",
                    f"set it to {needed} or more, or leave it out",
                )
            return min(self.max_masked, seq_len)
        room, spread = self._unit_room_and_spread()
        if self.selection == "bernoulli":
            room = math.ceil(6 * math.sqrt(mean * (1 - rate) * spread))
        slots = max(math.ceil(mean - 1e-6) + room, needed)
        return min(-(-slots // _SLOT_MULTIPLE) * _SLOT_MULTIPLE, seq_len)

    def _unit_room_and_spread(self) -> tuple[int, float]:
        """Tokens one unit may add past the budget, and E[n^2]/E[n] of the tokens n in a unit."""
        if self.unit == "token":
            return 0, 1.0
        if self.unit == "whole_word":
            return _WORD_ROOM, _WORD_SPREAD
        lengths = np.arange(1, self.span_max_length + 1)
        probabilities = self.span_length_probabilities()
        spread = float((probabilities @ lengths**2) / (probabilities @ lengths))
        return _SPAN_WORD_TOKENS * self.span_max_length, _SPAN_WORD_TOKENS * spread


def _check_share(field: str, value: float, *, zero: bool) -> None:
    if not (0 < value <= 1 or (zero and value == 0)):
        interval = "[0, 1]" if zero else "(0, 1]"
        raise ConfigError(field, value, f"must be in {interval}", "use a share such as 0.15")


def _check_fractions(block: str, mask: float, random: float) -> None:
    _check_share(f"{block}.mask_fraction", mask, zero=True)
    _check_share(f"{block}.random_fraction", random, zero=True)
    if mask + random > 1 + 1e-6:
        raise ConfigError(
            f"{block}.mask_fraction",
            mask,
            f"together with random_fraction {random:g} it is above 1",
            f"lower one of them; with random_fraction {random:g} at most {1 - random:g}",
        )


def _check_at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(field, value, f"must be at least {least}", f"use {least} or more")


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(field, value, "no such choice", f"use one of {', '.join(choices)}")
