"""What an evaluation says of a model: exact means over masked tokens, in all and by kind."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mlm_recipe.data.example import MaskKind


@dataclass(frozen=True)
class Score:
    """Over a set of masked tokens."""

    loss: float
    """Mean negative log likelihood, nats."""
    masked_accuracy: float
    """Fraction whose most likely token is the original."""
    num_masked: int

    @property
    def perplexity(self) -> float:
        """exp(loss); inf where that overflows."""
        return math.inf if self.loss >= 700 else math.exp(self.loss)


@dataclass(frozen=True)
class EvalResult:
    """Of one validation set, or of several together."""

    all: Score
    by_kind: Mapping[str, Score]
    """``mask``, ``random`` and ``kept``."""

    @staticmethod
    def from_totals(totals: np.ndarray) -> "EvalResult":
        """From ``{kind, 3}`` float64 sums of (nats, correct, count)."""
        by_kind = {kind.name.lower(): _score(totals[kind]) for kind in MaskKind}
        return EvalResult(_score(totals.sum(axis=0)), by_kind)

    def metrics(self) -> dict[str, float]:
        """Flat, for a tracker."""
        flat = {**_flat(self.all), "perplexity": self.all.perplexity}
        for kind, score in self.by_kind.items():
            flat |= {f"{kind}/{key}": value for key, value in _flat(score).items()}
        return flat

    def __str__(self) -> str:
        kinds = ", ".join(f"{k} {s.masked_accuracy:.1%}" for k, s in self.by_kind.items())
        return (
            f"loss {self.all.loss:.4f} nats, perplexity {self.all.perplexity:.2f}, "
            f"masked accuracy {self.all.masked_accuracy:.1%} ({kinds}) "
            f"over {self.all.num_masked} tokens"
        )


def _score(sums: np.ndarray) -> Score:
    nats, correct, count = (float(x) for x in sums)
    if count == 0:
        return Score(math.nan, math.nan, 0)  # not 0, which would look perfect
    return Score(nats / count, correct / count, round(count))


def _flat(score: Score) -> dict[str, float]:
    return {
        "loss": score.loss,
        "masked_accuracy": score.masked_accuracy,
        "num_masked": float(score.num_masked),
    }
