"""What the masking audit counts in a batch: plain sums that add up over batches.

Counted from the finished batch alone; what is wrong with the sums is said in ``audit.py``.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from haliax import NamedArray

from mlm_recipe.data.example import MaskKind, MlmExample
from mlm_recipe.data.masking_config import MaskingConfig, MaskingRates

UNIT_TOKENS = {"token": 1, "whole_word": 8, "span": 16}
"""Generous tokens per unit: tokens of one unit are selected together, so they count once."""
_DUPLICATE_BITS = 40


@dataclass(frozen=True)
class Rows:
    """A batch as numpy arrays, with the text as it was before masking."""

    input_ids: np.ndarray  # {batch, position}
    segment_ids: np.ndarray
    position_ids: np.ndarray
    maskable: np.ndarray
    selected: np.ndarray
    positions: np.ndarray  # {batch, masked}
    labels: np.ndarray
    weights: np.ndarray
    kinds: np.ndarray
    maskable_in_document: np.ndarray  # {batch, document}
    masked_in_document: np.ndarray

    @property
    def used(self) -> np.ndarray:
        return self.weights > 0

    @property
    def seen(self) -> np.ndarray:
        """``{batch, masked}`` the input token at each slot."""
        return np.take_along_axis(self.input_ids, self.positions, axis=1)

    @staticmethod
    def of(example: MlmExample, special: np.ndarray) -> "Rows":
        input_ids, segment_ids = _numpy(example.input_ids), _numpy(example.segment_ids)
        positions, labels = _numpy(example.masked_positions), _numpy(example.masked_labels)
        weights = _numpy(example.masked_weights)
        row, slot = np.nonzero(weights > 0)
        original = input_ids.copy()
        original[row, positions[row, slot]] = labels[row, slot]
        selected = np.zeros(input_ids.shape, dtype=bool)
        selected[row, positions[row, slot]] = True
        maskable = (segment_ids >= 0) & ~np.isin(original, special)
        return Rows(
            input_ids=input_ids,
            segment_ids=segment_ids,
            position_ids=_numpy(example.position_ids),
            maskable=maskable,
            selected=selected,
            positions=positions,
            labels=labels,
            weights=weights,
            kinds=_numpy(example.masked_kinds),
            maskable_in_document=_per_document(maskable, segment_ids),
            masked_in_document=_per_document(maskable & selected, segment_ids),
        )


def _numpy(named: NamedArray) -> np.ndarray:
    return np.asarray(named.array)


def _per_document(flags: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """``{batch, document}`` how many flags are set in each document of each row."""
    width = max(int(segment_ids.max(initial=0)) + 1, 1)
    row, position = np.nonzero(flags & (segment_ids >= 0))
    cell = row * width + segment_ids[row, position]
    return np.bincount(cell, minlength=len(flags) * width).reshape(len(flags), width)


def expected_masked(maskable: np.ndarray, rate: float, config: MaskingConfig) -> np.ndarray:
    """``{batch}`` expected masks per row, given maskable tokens ``{batch, document}``.

    Exact selection spends ``rate`` times the row, or what documents are owed if that is more.
    Independent draws are topped up document by document: E[max(X, m)] of a binomial X.
    """
    owed = np.minimum(maskable, config.min_per_document)
    if config.selection == "exact":
        return np.maximum(rate * maskable.sum(1), owed.sum(1))
    rate = min(rate, 1 - 1e-12)
    expected, probability = rate * maskable, (1 - rate) ** maskable
    for x in range(config.min_per_document):
        expected = expected + np.maximum(owed - x, 0) * probability
        probability = probability * np.maximum(maskable - x, 0) / (x + 1) * rate / (1 - rate)
    return expected.sum(1)


def text_counts(rows: Rows, pad_id: int, config: MaskingConfig) -> dict[str, int]:
    padding = rows.segment_ids < 0
    wrong = padding & ((rows.input_ids != pad_id) | (rows.position_ids != pad_id))
    wrong |= ~padding & (rows.position_ids <= pad_id)
    same = (rows.segment_ids[:, 1:] == rows.segment_ids[:, :-1]) & ~padding[:, 1:]
    wrong[:, 1:] |= same & (np.diff(rows.position_ids, axis=1) != 1)
    documents = rows.maskable_in_document > 0
    owed = np.minimum(rows.maskable_in_document, config.min_per_document)
    return {
        "examples": len(padding),
        "tokens": padding.size,
        "padding": int(padding.sum()),
        "maskable": int(rows.maskable.sum()),
        "documents": int(documents.sum()),
        "documents_without_mask": int((documents & (rows.masked_in_document == 0)).sum()),
        "documents_below_minimum": int((rows.masked_in_document < owed).sum()),
        "inconsistent_positions": int(wrong.sum()),
    }


def slot_counts(
    rows: Rows, special: np.ndarray, allowed: np.ndarray, mask_id: int
) -> dict[str, int]:
    used, seen = rows.used, rows.seen
    random = used & (rows.kinds == MaskKind.RANDOM)
    wrong = used & (rows.kinds == MaskKind.MASK) & (seen != mask_id)
    wrong |= used & (rows.kinds == MaskKind.KEPT) & (seen != rows.labels)
    wrong |= used & ~np.isin(rows.kinds, list(MaskKind))
    wrong |= (rows.weights != 0) & (rows.weights != 1)
    wrong[:, 1:] |= used[:, 1:] & ~(used[:, :-1] & (np.diff(rows.positions, axis=1) > 0))
    on_padding = np.take_along_axis(rows.segment_ids, rows.positions, axis=1) < 0
    return {
        "masked": int(used.sum()),
        "kind_mask": int((used & (rows.kinds == MaskKind.MASK)).sum()),
        "kind_random": int(random.sum()),
        "specials_selected": int((used & ~on_padding & np.isin(rows.labels, special)).sum()),
        "pads_selected": int((used & on_padding).sum()),
        "special_replacements": int((random & np.isin(seen, special)).sum()),
        "outside_replacements": int((random & ~np.isin(seen, allowed)).sum()),
        "inconsistent_slots": int(wrong.sum()),
    }


def rate_counts(
    rows: Rows, expected: np.ndarray, rates: MaskingRates, config: MaskingConfig
) -> dict[str, float]:
    count, slots = rows.used.sum(1), rows.used.shape[1]
    maskable = rows.maskable.sum(1)
    rate, mask_fraction, random_fraction = (float(np.asarray(x)) for x in rates)
    off_count = np.abs(count - expected) > 1 - 1e-6
    if config.selection == "bernoulli":
        out_of_slots = (count == slots) & (slots < maskable)
    elif config.unit == "token":
        out_of_slots = (count == slots) & (slots < np.floor(expected + 1e-6))
    else:
        out_of_slots = expected > slots
    # Where a few units satisfy the documents' minimum alone, the count says nothing on the rate.
    owed = np.minimum(rows.maskable_in_document, config.min_per_document).sum(1)
    tells = (config.unit == "token") | (rate * maskable >= owed * UNIT_TOKENS[config.unit])
    deviation = (count - expected)[tells]
    return {
        "expected": float(expected.sum()),
        "rows_off_count": int(off_count.sum()),
        "rows_out_of_slots": int(out_of_slots.sum()),
        "deviation": float(deviation.sum()),
        "deviation_squared": float((deviation**2).sum()),
        "binomial_variance": float((maskable[tells] * rate * (1 - rate)).sum()),
        "expected_mask": float(count.sum() * mask_fraction),
        "expected_random": float(count.sum() * random_fraction),
    }


def duplicate_counts(rows: Rows, config: MaskingConfig) -> dict[str, int]:
    """Pairs with equal masks, among rows where chance would need more than 40 bits of luck.

    Given its number of masks k, a document of n units has C(n, k) equally likely masks.
    """
    n, k = rows.maskable_in_document, rows.masked_in_document
    log2_factorial = np.concatenate([[0.0], np.log2(np.arange(1, n.max(initial=0) + 1)).cumsum()])
    bits = (log2_factorial[n] - log2_factorial[k] - log2_factorial[n - k]).sum(1)
    comparable = rows.selected[bits > _DUPLICATE_BITS * UNIT_TOKENS[config.unit]]
    same = Counter(np.packbits(mask).tobytes() for mask in comparable)
    return {
        "pairs": len(comparable) * (len(comparable) - 1) // 2,
        "duplicate_pairs": sum(count * (count - 1) // 2 for count in same.values()),
    }


class Coverage:
    """Which row positions were ever selected, and how likely that was."""

    def __init__(self):
        self.selected = self.maskable = self.log_unselected = np.zeros(0)

    def add(self, rows: Rows, expected: np.ndarray) -> None:
        if not self.selected.size:
            self.selected, self.maskable, self.log_unselected = np.zeros(
                (3, rows.maskable.shape[1])
            )
        share = np.minimum(expected / np.maximum(rows.maskable.sum(1), 1), 1 - 1e-12)
        self.selected = self.selected + (rows.selected & rows.maskable).sum(0)
        self.maskable = self.maskable + rows.maskable.sum(0)
        self.log_unselected = self.log_unselected + np.log1p(-share) @ rows.maskable

    def figures(self) -> tuple[float, float, float]:
        """Share covered, its expectation and standard deviation."""
        unselected = np.exp(self.log_unselected[self.maskable > 0])
        size = max(unselected.size, 1)
        deviation = np.sqrt((unselected * (1 - unselected)).sum()) / size
        covered = (self.selected > 0).sum() / size
        return float(covered), float((1 - unselected).sum() / size), float(deviation)
