"""The masking audit passes honest masks and refuses planted faults."""

import dataclasses
import functools

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import Axis

from mlm_recipe.data.audit import MaskingAudit, MaskingAuditError, audit_masks, check_audit
from mlm_recipe.data.audit_counts import expected_masked
from mlm_recipe.data.example import MaskKind, MlmExample
from mlm_recipe.data.masking import mask_tokens
from mlm_recipe.data.masking_config import MaskingConfig, MaskingRates, RateStage
from mlm_recipe.data.word_starts import Edge, WordStarts

BATCH, T, VOCAB_SIZE = 32, 128, 300
SPECIALS = np.arange(5)  # <s> <pad> </s> <unk> <mask>
PAD_ID, MASK_ID = 1, 4
RANDOM_IDS = np.arange(5, VOCAB_SIZE, dtype=np.int32)
Pos = Axis("position", T)
WORDS = WordStarts(
    first=np.where(np.arange(VOCAB_SIZE) % 2, Edge.BREAKS, Edge.JOINS).astype(np.int8),
    last=np.full(VOCAB_SIZE, Edge.JOINS, dtype=np.int8),
)


@functools.cache
def compiled(config: MaskingConfig, words: bool):
    def row(tokens, segments, maskable, key, rates):
        return mask_tokens(
            hax.named(tokens, Pos),
            hax.named(maskable, Pos),
            config,
            mask_id=MASK_ID,
            random_ids=hax.named(RANDOM_IDS, "random"),
            key=key,
            segment_ids=hax.named(segments, Pos),
            rates=MaskingRates(*rates),
            word_starts=WORDS if words else None,
        )

    # Optimised, each config takes 5 s to compile.
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(jax.vmap(row, in_axes=(0, 0, 0, 0, None)), compiler_options=options)


@jax.jit
def compiled_keys(index):
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), index)


def text(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, segments and position ids of three documents a row, then padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.choice(RANDOM_IDS, size=(BATCH, T))
    segments = np.full((BATCH, T), -1, dtype=np.int32)
    position_ids = np.full((BATCH, T), PAD_ID, dtype=np.int32)
    for i in range(BATCH):
        cuts = [0, *np.sort(rng.choice(np.arange(1, 31), 2, replace=False) * 4), T - i % 8]
        for document in range(3):
            start, end = cuts[document : document + 2]
            segments[i, start:end] = document
            position_ids[i, start:end] = PAD_ID + 1 + np.arange(end - start)
            tokens[i, start], tokens[i, end - 1] = 0, 2
    tokens[segments < 0] = PAD_ID
    return tokens, segments, position_ids


def batches(config, n=4, *, rates=None, same_key=False, specials=False, words=False, step=0):
    """``n`` honest batches; with ``rates``, ``same_key`` or ``specials`` not those of config."""
    for i in range(step, step + n):
        tokens, segments, position_ids = text(i)
        index = np.zeros(BATCH, int) if same_key else np.arange(BATCH) + i * BATCH
        keys = compiled_keys(index)
        allowed = np.ones_like(tokens, bool) if specials else ~np.isin(tokens, SPECIALS)
        drawn = [np.float32(rate) for rate in (rates or config.rates_at(i))]
        mask = compiled(dataclasses.replace(config, rate_schedule=()), words)
        masked = mask(tokens, segments, allowed & (segments >= 0), keys, drawn)
        Masked = Axis("masked", masked.masked_weights.array.shape[1])
        Batch = Axis("batch", BATCH)

        def slots(named, axes=(Batch, Masked)):
            return hax.named(np.asarray(named.array), axes)

        yield MlmExample(
            input_ids=slots(masked.input_ids, (Batch, Pos)),
            segment_ids=hax.named(segments, (Batch, Pos)),
            position_ids=hax.named(position_ids, (Batch, Pos)),
            masked_positions=slots(masked.masked_positions),
            masked_labels=slots(masked.masked_labels),
            masked_weights=slots(masked.masked_weights),
            masked_kinds=slots(masked.masked_kinds),
        )


def audit(examples, config, **kwargs) -> MaskingAudit:
    return audit_masks(
        examples,
        config,
        special_ids=SPECIALS,
        mask_id=MASK_ID,
        pad_id=PAD_ID,
        random_ids=RANDOM_IDS,
        **kwargs,
    )


def violations(examples, config: MaskingConfig | None = None) -> list[str]:
    """Names of the figures that the check refuses."""
    config = config or MaskingConfig()
    with pytest.raises(MaskingAuditError) as error:
        check_audit(audit(examples, config), config)
    return [line.split(" = ")[0] for line in error.value.violations]


def changed(example: MlmExample, **arrays: np.ndarray) -> MlmExample:
    named = {name: hax.named(a, getattr(example, name).axes) for name, a in arrays.items()}
    return dataclasses.replace(example, **named)


def array(example: MlmExample, name: str) -> np.ndarray:
    return np.array(getattr(example, name).array)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MaskingConfig(), False),
        (MaskingConfig(selection="bernoulli"), False),
        (MaskingConfig(unit="whole_word"), True),
        pytest.param(
            MaskingConfig(unit="span", selection="bernoulli"), True, marks=pytest.mark.slow
        ),
    ],
    ids=lambda c: f"{c.selection}-{c.unit}" if isinstance(c, MaskingConfig) else "",
)
def test_honest_masks_pass(config, words):
    figures = audit(batches(config, 4, words=words), config)
    check_audit(figures, config)
    assert figures.examples == 4 * BATCH
    assert figures.tokens == 4 * BATCH * T
    assert figures.padding_share == pytest.approx(3.5 / T)
    # Documents are short here: the span that each is owed exceeds the rate.
    assert 0.13 < figures.masked_rate < (0.3 if config.unit == "span" else 0.17)
    assert (
        config.unit == "span" or abs(figures.masked_rate / figures.expected_masked_rate - 1) < 0.1
    )
    assert figures.mask_share + figures.random_share + figures.kept_share == pytest.approx(1)
    assert figures.mask_share == pytest.approx(0.8, abs=0.04)
    assert figures.documents_below_minimum == figures.documents_without_mask == 0
    assert figures.position_coverage == 1.0


def test_figures_of_one_batch_counted_by_hand():
    config = MaskingConfig()
    (example,) = batches(config, 1)
    tokens, segments, _ = text(0)
    maskable = (~np.isin(tokens, SPECIALS)) & (segments >= 0)
    weights, kinds = array(example, "masked_weights"), array(example, "masked_kinds")
    figures = audit([example], config)
    assert figures.maskable_tokens == maskable.sum()
    assert figures.masked_tokens == weights.sum()
    assert figures.random_share == (kinds[weights > 0] == MaskKind.RANDOM).mean()
    assert figures.documents == sum(
        len(np.unique(row[ok])) for row, ok in zip(segments, maskable, strict=True)
    )


def test_same_mask_for_every_example_is_refused():
    found = violations(batches(MaskingConfig(), same_key=True))
    assert "duplicate_mask_share" in found
    rows = {tuple(row) for row in text(0)[1]}
    assert len(rows) == BATCH  # although the documents differ


def test_same_mask_on_equal_rows_leaves_positions_uncovered():
    config = MaskingConfig()
    (example,) = batches(config, 1)
    first = {
        field.name: np.repeat(array(example, field.name)[:1], BATCH, 0)
        for field in dataclasses.fields(example)
        if getattr(example, field.name) is not None
    }
    found = violations([changed(example, **first)] * 4)
    assert {"duplicate_mask_share", "position_coverage"} <= set(found)


def test_only_mask_tokens_is_refused():
    found = violations(batches(MaskingConfig(), rates=(0.15, 1.0, 0.0)))
    assert found == ["mask_share", "random_share"]


def test_selected_specials_are_refused():
    assert "specials_selected" in violations(batches(MaskingConfig(), specials=True))


def test_kept_tokens_without_loss_are_refused():
    def drop_kept(example):
        weights = array(example, "masked_weights")
        weights[array(example, "masked_kinds") == MaskKind.KEPT] = 0
        return changed(example, masked_weights=weights)

    found = violations([drop_kept(example) for example in batches(MaskingConfig())])
    assert {"rows_off_count", "mask_share"} <= set(found)
    assert "rows_out_of_slots" not in found


@pytest.mark.parametrize("selection", ["exact", "bernoulli"])
def test_wrong_rate_is_refused(selection):
    config = MaskingConfig(selection=selection)
    found = violations(batches(config, rates=(0.12, 0.8, 0.1)), config)
    expected = "rows_off_count" if selection == "exact" else "masked_rate"
    assert expected in found
    assert not {"mask_share", "random_share"} & set(found)


def test_bernoulli_overflow_is_refused():
    config = MaskingConfig(selection="bernoulli")
    assert "rows_out_of_slots" in violations(batches(config, rates=(0.9, 0.8, 0.1)), config)


def test_schedule_is_followed_from_the_first_step():
    config = MaskingConfig(rate_schedule=(RateStage(2, rate=0.1, mask_fraction=0.5),))
    check_audit(audit(batches(config, 4), config), config)
    with pytest.raises(MaskingAuditError, match="rows_off_count"):
        check_audit(audit(batches(config, 2, step=2), config), config)
    check_audit(audit(batches(config, 2, step=2), config, first_step=2), config)


def slot_of(example: MlmExample, kind: MaskKind) -> tuple[int, int, int]:
    """Row, slot and position of some used slot of a kind."""
    used = array(example, "masked_weights") == 1
    row, slot = np.argwhere(used & (array(example, "masked_kinds") == kind))[0]
    return int(row), int(slot), int(array(example, "masked_positions")[row, slot])


@pytest.mark.parametrize(
    ("kind", "token", "figure"),
    [
        (MaskKind.RANDOM, 2, "outside_replacements"),
        (MaskKind.RANDOM, VOCAB_SIZE, "outside_replacements"),
        (MaskKind.MASK, 7, "inconsistent_slots"),
        (MaskKind.KEPT, MASK_ID, "inconsistent_slots"),
    ],
)
def test_one_wrong_token_is_refused(kind, token, figure):
    (example,) = batches(MaskingConfig(), 1)
    row, _, position = slot_of(example, kind)
    input_ids = array(example, "input_ids")
    input_ids[row, position] = token
    assert violations([changed(example, input_ids=input_ids)]) == [figure]


def test_slots_out_of_order_or_on_padding_are_refused():
    (example,) = batches(MaskingConfig(), 1)
    positions = array(example, "masked_positions")
    swapped = positions.copy()
    swapped[3, [0, 1]] = swapped[3, [1, 0]]
    assert "inconsistent_slots" in violations([changed(example, masked_positions=swapped)])
    used = int(array(example, "masked_weights")[7].sum())
    positions[7, used - 1] = T - 1  # row 7 ends in seven pads
    assert "pads_selected" in violations([changed(example, masked_positions=positions)])


@pytest.mark.parametrize("name", ["input_ids", "position_ids"])
def test_wrong_padding_and_position_ids_are_refused(name):
    (example,) = batches(MaskingConfig(), 1)
    values = array(example, name)
    values[7, -1] = 0  # the old default: pads with id 0
    assert violations([changed(example, **{name: values})]) == ["inconsistent_positions"]


def test_document_without_a_mask_is_refused():
    (example,) = batches(MaskingConfig(), 1)
    weights, positions = array(example, "masked_weights"), array(example, "masked_positions")
    segments = array(example, "segment_ids")
    weights[5, segments[5, positions[5]] == 0] = 0  # AnswerDotAI/ModernBERT#242
    example = changed(example, masked_weights=weights)
    assert audit([example], MaskingConfig()).documents_without_mask == 1
    assert "documents_below_minimum" in violations([example])


def test_expected_count_of_topped_up_binomials():
    rng = np.random.default_rng(0)
    config = MaskingConfig(selection="bernoulli", min_per_document=2)
    documents = np.array([[1, 5, 40]])
    draws = rng.binomial(documents, 0.15, size=(200_000, 3))
    simulated = np.maximum(draws, np.minimum(documents, 2)).sum(1)
    expected = expected_masked(documents, 0.15, config)
    assert abs(simulated.mean() - expected[0]) < 4 * simulated.std() / np.sqrt(200_000)
    exact = MaskingConfig(min_per_document=2)
    assert expected_masked(documents, 0.15, exact) == pytest.approx([0.15 * 46])
    assert expected_masked(documents, 0.05, exact) == pytest.approx([5])


def test_an_empty_audit_divides_by_nothing():
    figures = audit([], MaskingConfig())
    assert figures.masked_rate == figures.position_coverage == 0.0
    check_audit(figures, MaskingConfig())
