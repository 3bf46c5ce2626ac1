"""The masking audit: what the first batches look like, and whether training may start on them.

It looks at finished batches, not at the code that made them, so it also sees what a loader, a
packer or a wrong key did. Pure numpy. The figures go to the tracker; ``check_audit`` refuses those
that cannot come from the configured masking.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from mlm_recipe.data.audit_counts import (
    UNIT_TOKENS,
    Coverage,
    Rows,
    duplicate_counts,
    expected_masked,
    rate_counts,
    slot_counts,
    text_counts,
)
from mlm_recipe.data.example import MlmExample
from mlm_recipe.data.masking_config import MaskingConfig

_SIGMAS = 5.0
_COVERAGE_SLACK = 0.02  # the per-document minimum draws masks towards short documents


class MaskingAuditError(RuntimeError):
    """The masks cannot be what the config asks for. ``violations`` has one line for each."""

    def __init__(self, violations: Iterable[str]):
        self.violations = tuple(violations)
        super().__init__("masking audit refused:\n  " + "\n  ".join(self.violations))


@dataclass(frozen=True)
class MaskingAudit:
    """Figures over the audited batches. Shares are in [0, 1]; without a base they are 0."""

    examples: int
    """Rows seen."""
    tokens: int
    """Positions seen, padding included."""
    padding_share: float
    """Padding, of all positions."""
    documents: int
    """Documents with a maskable token."""
    maskable_tokens: int
    """Tokens that are neither special nor padding."""
    masked_tokens: int
    """Slots that carry loss."""
    masked_rate: float
    """Masked, of the maskable tokens."""
    expected_masked_rate: float
    """What the config gives for these rows, the per-document minimum included."""
    rate_sigmas: float
    """Distance of the two over the rows that tell, in standard deviations."""
    rows_off_count: int
    """Exact selection of tokens: rows whose count is not their budget rounded down or up."""
    mask_share: float
    """Became the mask token, of the masked tokens."""
    random_share: float
    """Became a random token, of the masked tokens."""
    kept_share: float
    """Stayed, of the masked tokens."""
    expected_mask_share: float
    """What the config gives."""
    expected_random_share: float
    """What the config gives."""
    specials_selected: int
    """Slots whose label is a special token."""
    pads_selected: int
    """Slots on padding."""
    special_replacements: int
    """Random replacements that are special tokens."""
    outside_replacements: int
    """Random replacements that are not among the allowed ids, special or not."""
    inconsistent_slots: int
    """Slots that contradict the row: a MASK without the mask token, a KEPT token that changed,
    positions out of order, weights that are neither 0 nor 1."""
    inconsistent_positions: int
    """Padding that is not the pad token, or position ids that do not count up in a document."""
    position_coverage: float
    """Row positions selected at least once, of those that ever held a maskable token."""
    expected_position_coverage: float
    """The same if masks are independent between rows."""
    position_coverage_sigma: float
    """Standard deviation of that expectation."""
    duplicate_mask_share: float
    """Pairs of rows in a batch with the same masked positions, of the pairs for which chance makes
    that less likely than 2^-40."""
    documents_without_mask: int
    """Documents with a maskable token and no mask."""
    documents_below_minimum: int
    """Documents with fewer masks than ``min_per_document`` and tokens left."""
    rows_out_of_slots: int
    """Rows whose selection did not fit the ``masked`` axis."""


def audit_masks(
    batches: Iterable[MlmExample],
    config: MaskingConfig,
    *,
    special_ids: Iterable[int],
    mask_id: int,
    pad_id: int,
    random_ids: Iterable[int],
    first_step: int = 0,
) -> MaskingAudit:
    """Counts what the batches contain; judges nothing.

    Args:
        batches: examples with a leading batch axis, ``{batch, position}`` and ``{batch, masked}``;
            one per training step, rows of equal length. Consumed once.
        config: the masking they should show (``config.for_eval()`` for evaluation batches).
        special_ids: the tokenizer's special ids, padding and mask token among them.
        mask_id: id of the mask token.
        pad_id: id of the padding token; also the row of the position table that padding uses.
        random_ids: ids that a random replacement may have.
        first_step: training step of the first batch, for the schedule.
    """
    special, allowed = np.fromiter(special_ids, int), np.fromiter(random_ids, int)
    totals: Counter[str] = Counter()
    coverage = Coverage()
    for i, example in enumerate(batches):
        rates = config.rates_at(first_step + i)
        rows = Rows.of(example, special)
        expected = expected_masked(rows.maskable_in_document, float(np.asarray(rates.rate)), config)
        totals.update(text_counts(rows, pad_id, config))
        totals.update(slot_counts(rows, special, allowed, mask_id))
        totals.update(rate_counts(rows, expected, rates, config))
        totals.update(duplicate_counts(rows, config))
        coverage.add(rows, expected)
    return _figures(totals, coverage)


def _figures(totals: Counter[str], coverage: Coverage) -> MaskingAudit:
    def share(part: str, whole: str) -> float:
        return totals[part] / totals[whole] if totals[whole] else 0.0

    # The larger of what the rows show and what single tokens would: units come in clusters, and a
    # handful of rows may vary too little by chance.
    variance = max(totals["deviation_squared"], totals["binomial_variance"])
    covered, expected_covered, coverage_sigma = coverage.figures()
    mask_share, random_share = share("kind_mask", "masked"), share("kind_random", "masked")
    return MaskingAudit(
        examples=totals["examples"],
        tokens=totals["tokens"],
        padding_share=share("padding", "tokens"),
        documents=totals["documents"],
        maskable_tokens=totals["maskable"],
        masked_tokens=totals["masked"],
        masked_rate=share("masked", "maskable"),
        expected_masked_rate=share("expected", "maskable"),
        rate_sigmas=abs(totals["deviation"]) / variance**0.5 if variance else 0.0,
        rows_off_count=totals["rows_off_count"],
        mask_share=mask_share,
        random_share=random_share,
        kept_share=1 - mask_share - random_share if totals["masked"] else 0.0,
        expected_mask_share=share("expected_mask", "masked"),
        expected_random_share=share("expected_random", "masked"),
        specials_selected=totals["specials_selected"],
        pads_selected=totals["pads_selected"],
        special_replacements=totals["special_replacements"],
        outside_replacements=totals["outside_replacements"],
        inconsistent_slots=totals["inconsistent_slots"],
        inconsistent_positions=totals["inconsistent_positions"],
        position_coverage=covered,
        expected_position_coverage=expected_covered,
        position_coverage_sigma=coverage_sigma,
        duplicate_mask_share=share("duplicate_pairs", "pairs"),
        documents_without_mask=totals["documents_without_mask"],
        documents_below_minimum=totals["documents_below_minimum"],
        rows_out_of_slots=totals["rows_out_of_slots"],
    )


def check_audit(audit: MaskingAudit, config: MaskingConfig) -> None:
    """Raises ``MaskingAuditError`` unless the figures can come from ``config``.

    Counts that must be 0 are taken literally; shares may be 5 standard deviations off, exact
    counts not at all.
    """
    violations = [*_forbidden(audit), *_off_rate(audit, config), *_not_random(audit, config)]
    if violations:
        raise MaskingAuditError(violations)


def _forbidden(audit: MaskingAudit) -> Iterator[str]:
    of_masked = f"of {audit.masked_tokens} masked tokens"
    if audit.specials_selected:
        yield (
            f"specials_selected = {audit.specials_selected} {of_masked}: special tokens are never "
            "predicted; set maskable to False on every special id"
        )
    if audit.pads_selected:
        yield (
            f"pads_selected = {audit.pads_selected} {of_masked}: padding is never predicted; set "
            "maskable to False where segment_ids is -1"
        )
    if audit.outside_replacements or audit.special_replacements:
        yield (
            f"outside_replacements = {audit.outside_replacements}, special_replacements = "
            f"{audit.special_replacements}: random replacements must come from the non-special "
            "vocabulary; compare random_ids with the tokenizer in use"
        )
    if audit.inconsistent_slots:
        yield (
            f"inconsistent_slots = {audit.inconsistent_slots} {of_masked}: labels, kinds and "
            "input_ids of a row disagree; nothing may change them after mask_tokens"
        )
    if audit.inconsistent_positions:
        yield (
            f"inconsistent_positions = {audit.inconsistent_positions} of {audit.tokens} tokens: "
            "padding must be the pad token, and position_ids count up from pad + 1 in a document"
        )


def _off_rate(audit: MaskingAudit, config: MaskingConfig) -> Iterator[str]:
    if audit.rows_out_of_slots:
        yield (
            f"rows_out_of_slots = {audit.rows_out_of_slots} of {audit.examples} rows: the masked "
            "axis is too short for what was selected; raise masking.max_masked, or leave it out"
        )
    if audit.documents_below_minimum:
        yield (
            f"documents_below_minimum = {audit.documents_below_minimum} of {audit.documents} "
            f"documents have fewer than masking.min_per_document = {config.min_per_document} "
            "masks; check segment_ids, or raise masking.max_masked"
        )
    rate = f"masked_rate = {audit.masked_rate:.4f}, expected {audit.expected_masked_rate:.4f}"
    if config.selection == "exact" and config.unit == "token":
        if audit.rows_off_count:
            yield (
                f"rows_off_count = {audit.rows_off_count} of {audit.examples} rows ({rate}): the "
                "count is not the configured one; check masking.rate and what masks these rows"
            )
    elif audit.rate_sigmas > _SIGMAS:
        yield (
            f"{rate}: {audit.rate_sigmas:.1f} sigma apart; check masking.rate, and that words "
            "(masking.unit) are short against the row"
        )
    for kind in ("mask", "random"):
        share, expected = getattr(audit, f"{kind}_share"), getattr(audit, f"expected_{kind}_share")
        sigma = (expected * (1 - expected) / max(audit.masked_tokens, 1)) ** 0.5
        if abs(share - expected) > _SIGMAS * sigma + 1e-9 and audit.masked_tokens:
            yield (
                f"{kind}_share = {share:.4f} {expected=:.4f} over {audit.masked_tokens} masked "
                f"tokens: more than {_SIGMAS:g} sigma apart; the replacement must be drawn "
                "independently of the selection"
            )


def _not_random(audit: MaskingAudit, config: MaskingConfig) -> Iterator[str]:
    if audit.duplicate_mask_share:
        yield (
            f"duplicate_mask_share = {audit.duplicate_mask_share:.4f}: rows of a batch have the "
            "same masks; fold the global example index into the key"
        )
    sigma = audit.position_coverage_sigma * UNIT_TOKENS[config.unit] ** 0.5
    least = audit.expected_position_coverage - _SIGMAS * sigma - _COVERAGE_SLACK
    if audit.position_coverage < least:
        yield (
            f"position_coverage = {audit.position_coverage:.4f}, expected "
            f"{audit.expected_position_coverage:.4f}: some positions are never masked; the key "
            "must differ between examples"
        )
