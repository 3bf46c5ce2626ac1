"""mask_tokens: statistics, invariants on odd rows, determinism (conformance C06-C10, C20, C21)."""

import dataclasses
import functools
import itertools

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mlm_recipe.data.example import MaskKind
from mlm_recipe.data.masking import MaskedTokens, _span_starts, mask_tokens
from mlm_recipe.data.masking_config import MaskingConfig, MaskingRates
from mlm_recipe.data.word_starts import Edge, WordStarts
from mlm_recipe.errors import ConfigError

NUM_SPECIALS = 5  # <s> 0, <pad> 1, </s> 2, <unk> 3 and, far from them, <mask>
MASK_ID = 100
VOCAB_SIZE = 203  # ids above the mask token are added tokens
RANDOM_IDS = np.array([i for i in range(4, VOCAB_SIZE) if i != MASK_ID], dtype=np.int32)
SPECIALS = np.array([0, 1, 2, 3, MASK_ID])
# Every third id goes on with the word before it, as a WordPiece "##" token does.
CONTINUES = np.arange(VOCAB_SIZE) % 3 == 0
WORDS = WordStarts(
    first=np.where(CONTINUES, Edge.JOINS, Edge.BREAKS).astype(np.int8),
    last=np.full(VOCAB_SIZE, Edge.JOINS, dtype=np.int8),
)
T = 128
# Halves the 5 s that XLA takes for one config; the masks are the same (see the batch test).
FAST_TO_COMPILE = {"xla_backend_optimization_level": 0}


def mask_row(tokens, segments, key, rates, *, config, words=None) -> MaskedTokens:
    Pos = Axis("position", tokens.size)
    maskable = ~jnp.isin(tokens, SPECIALS) & (segments >= 0)
    return mask_tokens(
        hax.named(tokens, Pos),
        hax.named(maskable, Pos),
        config,
        mask_id=MASK_ID,
        random_ids=hax.named(RANDOM_IDS, "random"),
        key=key,
        segment_ids=hax.named(segments, Pos),
        rates=None if rates is None else MaskingRates(*rates),
        word_starts=words,
    )


@functools.cache
def compiled(config: MaskingConfig, words: bool = False):
    row = functools.partial(mask_row, config=config, words=WORDS if words else None)
    return jax.jit(jax.vmap(row, in_axes=(0, 0, 0, None)), compiler_options=FAST_TO_COMPILE)


def masked(config, tokens, segments, keys, rates=None, words=False) -> dict[str, np.ndarray]:
    """Masks any number of rows in batches of ``CHUNK``, so that a config is compiled once."""
    rates = config.rates_at(0) if rates is None else rates
    rates = tuple(np.float32(rate) for rate in rates)
    n = len(tokens)
    index = np.arange(-(-n // CHUNK) * CHUNK).reshape(-1, CHUNK) % n
    chunks = [compiled(config, words)(tokens[i], segments[i], keys[i], rates) for i in index]
    return {
        name: np.concatenate([np.asarray(getattr(chunk, name).array) for chunk in chunks])[:n]
        for name in FIELDS
    }


FIELDS = [field.name for field in dataclasses.fields(MaskedTokens)]
CHUNK = 64


def rows(n: int, size: int = T, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of two documents ``<s> ... </s>``, padded by a random amount."""
    rng = np.random.default_rng(seed)
    tokens = rng.choice(RANDOM_IDS, size=(n, size))
    segments = np.zeros((n, size), dtype=np.int32)
    for row, segment in zip(tokens, segments, strict=True):
        end = size - rng.integers(0, size // 8)
        cut = rng.integers(4, end - 4)
        row[[0, cut]], row[[cut - 1, end - 1]] = 0, 2
        segment[cut:] = 1
        row[end:], segment[end:] = 1, -1
    return tokens, segments


def keys_of(n: int, seed: int = 0) -> np.ndarray:
    """Keys of examples 0, 1, ... n - 1; raw, because numpy slices them without compiling."""
    return np.asarray(compiled_keys(seed))[:n]


@jax.jit
def compiled_keys(seed):
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.PRNGKey(seed), jnp.arange(2048))


def check_invariants(config, tokens, segments, out, rates, words=False) -> None:
    """What holds for every row, however odd."""
    maskable = ~np.isin(tokens, SPECIALS) & (segments >= 0)
    for i, (row, segment) in enumerate(zip(tokens, segments, strict=True)):
        used = out["masked_weights"][i] == 1
        count = used.sum()
        assert np.array_equal(out["masked_weights"][i], np.arange(used.size) < count)
        for name in ("masked_positions", "masked_labels", "masked_kinds"):
            assert (out[name][i][count:] == 0).all()
        positions = out["masked_positions"][i][:count]
        labels, kinds = out["masked_labels"][i][:count], out["masked_kinds"][i][:count]
        assert (np.diff(positions) > 0).all()
        assert maskable[i][positions].all()
        assert np.array_equal(labels, row[positions])
        seen = out["input_ids"][i][positions]
        assert (seen[kinds == MaskKind.MASK] == MASK_ID).all()
        assert np.array_equal(seen[kinds == MaskKind.KEPT], labels[kinds == MaskKind.KEPT])
        assert np.isin(seen[kinds == MaskKind.RANDOM], RANDOM_IDS).all()
        selected = np.isin(np.arange(row.size), positions)
        assert np.array_equal(out["input_ids"][i][~selected], row[~selected])

        owed = 0
        for document in np.unique(segment[maskable[i]]):
            inside = maskable[i] & (segment == document)
            least = min(config.min_per_document, inside.sum())
            owed += least
            assert out["overflow"][i] > 0 or selected[inside].sum() >= least
        if config.selection == "exact" and config.unit == "token":
            budget = max(float(rates[0]) * maskable[i].sum(), owed)
            assert abs(count + out["overflow"][i] - budget) < 1
        if config.unit == "whole_word":
            for word in words_of(row, segment, maskable[i]):
                assert selected[word].all() or not selected[word].any()


def words_of(row, segment, maskable) -> list[list[int]]:
    """Positions of each word, by walking the row."""
    found: list[list[int]] = []
    for i in np.nonzero(maskable)[0]:
        goes_on = i > 0 and maskable[i - 1] and segment[i - 1] == segment[i] and CONTINUES[row[i]]
        if goes_on:
            found[-1].append(int(i))
        else:
            found.append([int(i)])
    return found


def within(observed: float, expected: float, n: float, sigmas: float = 4.0) -> bool:
    return abs(observed - expected) <= sigmas * np.sqrt(expected * (1 - expected) / n)


def independence_pvalue(table: np.ndarray) -> float:
    """Pearson's chi-square of a contingency table."""
    expected = table.sum(0) * table.sum(1)[:, None] / table.sum()
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return float(stats.chi2.sf(((table - expected) ** 2 / expected).sum(), freedom))


@functools.cache
def exact_sample() -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    tokens, segments = rows(1024)
    return tokens, segments, masked(MaskingConfig(), tokens, segments, keys_of(1024))


def used_kinds(out) -> np.ndarray:
    return out["masked_kinds"][out["masked_weights"] == 1]


@pytest.mark.parametrize("selection", ["exact", "bernoulli"])
def test_rate_and_kinds_over_130_000_tokens(selection):
    config = MaskingConfig(selection=selection)
    tokens, segments = rows(1024)
    out = masked(config, tokens, segments, keys_of(1024))
    assert tokens.size >= 1e5
    assert out["overflow"].sum() == 0
    maskable = ~np.isin(tokens, SPECIALS) & (segments >= 0)
    kinds = used_kinds(out)
    if selection == "exact":  # the mean of a rounding at random: at most half a token off per row
        deviation = out["masked_weights"].sum(1) - 0.15 * maskable.sum(1)
        assert abs(deviation.mean()) <= 4 * 0.5 / np.sqrt(1024)
    else:
        assert within(kinds.size / maskable.sum(), 0.15, float(maskable.sum()))
    for kind, share in zip(MaskKind, (0.8, 0.1, 0.1), strict=True):
        assert within((kinds == kind).mean(), share, kinds.size)


def test_invariants_on_ordinary_rows():
    tokens, segments, out = exact_sample()
    check_invariants(MaskingConfig(), tokens, segments, out, (0.15, 0.8, 0.1))


def test_kind_is_independent_of_position_and_neighbour():
    _, _, out = exact_sample()
    used, kinds, positions = (
        out["masked_weights"] == 1,
        out["masked_kinds"],
        out["masked_positions"],
    )
    table = np.zeros((T // 8, 3))
    np.add.at(table, (positions[used] // 8, kinds[used]), 1)
    assert independence_pvalue(table) > 1e-3
    neighbours = np.zeros((3, 3))
    adjacent = used[:, 1:] & (np.diff(positions, axis=1) == 1)
    np.add.at(neighbours, (kinds[:, :-1][adjacent], kinds[:, 1:][adjacent]), 1)
    assert neighbours.sum() > 1000
    assert independence_pvalue(neighbours) > 1e-3


def test_replacement_is_independent_of_kind_and_uniform_to_the_top_of_the_vocabulary():
    _, _, out = exact_sample()
    random = (out["masked_kinds"] == MaskKind.RANDOM) & (out["masked_weights"] == 1)
    seen = np.take_along_axis(out["input_ids"], out["masked_positions"], axis=1)[random]
    assert not np.isin(seen, SPECIALS).any()
    assert seen.max() == RANDOM_IDS[-1]
    assert seen.min() == RANDOM_IDS[0]
    counts = np.bincount(seen, minlength=VOCAB_SIZE)[RANDOM_IDS]
    assert stats.chisquare(counts).pvalue > 1e-3


def test_kept_tokens_and_replacements_that_equal_the_original_carry_loss():
    tokens, _, out = exact_sample()
    seen = np.take_along_axis(out["input_ids"], out["masked_positions"], axis=1)
    unchanged = (seen == out["masked_labels"]) & (out["masked_weights"] == 1)
    assert (unchanged & (out["masked_kinds"] == MaskKind.KEPT)).sum() > 1000
    assert (unchanged & (out["masked_kinds"] == MaskKind.RANDOM)).sum() > 0
    assert unchanged.sum() + (tokens != out["input_ids"]).sum() == out["masked_weights"].sum()


def test_every_maskable_position_is_selected_equally_often():
    tokens, segments = rows(1)
    n = 2048
    # One document: its minimum favours nothing.
    tokens, segments = tokens.repeat(n, 0), np.minimum(segments, 0).repeat(n, 0)
    out = masked(MaskingConfig(), tokens, segments, keys_of(n))
    positions = out["masked_positions"][out["masked_weights"] == 1]
    maskable = ~np.isin(tokens[0], SPECIALS) & (segments[0] >= 0)
    counts = np.bincount(positions, minlength=T)
    assert (counts[~maskable] == 0).all()
    assert (counts[maskable] > 0).all()
    # Draws without replacement vary less than the chi-square supposes: 1 - rate of it.
    statistic = stats.chisquare(counts[maskable]).statistic / (1 - 0.15)
    assert 1e-3 < stats.chi2.sf(statistic, maskable.sum() - 1) < 1 - 1e-3


def test_same_key_same_mask_and_no_other():
    tokens, segments = rows(1)
    tokens, segments = tokens.repeat(64, 0), segments.repeat(64, 0)
    config = MaskingConfig()
    first = masked(config, tokens, segments, keys_of(64))
    again = masked(config, tokens, segments, keys_of(64))
    other = masked(config, tokens, segments, keys_of(64, seed=1))
    for name, value in first.items():
        assert np.array_equal(value, again[name])
    masks = [tuple(row) for row in (*first["masked_positions"], *other["masked_positions"])]
    assert len(set(masks)) == 128


def test_masks_do_not_depend_on_the_batch():
    tokens, segments = rows(4)
    config = MaskingConfig()
    whole = masked(config, tokens, segments, keys_of(4))
    Batch = Axis("batch", 4)

    @hax.named_jit
    def by_name(tokens, keys, segments):
        def one(tokens, key, segments):
            return mask_row(tokens.array, segments.array, key, None, config=config)

        return hax.vmap(one, Batch)(tokens, keys, segments)

    named = by_name(
        hax.named(jnp.asarray(tokens), (Batch, "position")),
        jax.random.wrap_key_data(jnp.asarray(keys_of(4))),
        hax.named(jnp.asarray(segments), (Batch, "position")),
    )
    alone = jax.jit(functools.partial(mask_row, config=config))(
        tokens[2], segments[2], keys_of(4)[2], None
    )
    for name in FIELDS:
        assert np.array_equal(getattr(named, name).array, whole[name])
        assert np.array_equal(getattr(alone, name).array, whole[name][2])


def test_masks_are_the_same_in_every_release():
    """Evaluation masks are fixed data: this test failing means that old losses do not compare."""
    tokens = np.arange(10, 10 + T, dtype=np.int32)[None]
    out = masked(
        MaskingConfig(), tokens, np.zeros_like(tokens), np.asarray(jax.random.PRNGKey(0))[None]
    )
    used = out["masked_weights"][0] == 1
    assert out["masked_positions"][0][used].tolist() == GOLDEN_POSITIONS
    assert out["masked_kinds"][0][used].tolist() == GOLDEN_KINDS
    assert out["input_ids"][0][86] == GOLDEN_REPLACEMENT


GOLDEN_POSITIONS = [0, 1, 8, 12, 19, 31, 34, 36, 37, 39, 40, 41, 53, 55, 80, 86, 99, 111, 120]
GOLDEN_KINDS = [2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 2]
GOLDEN_REPLACEMENT = 12  # of position 86


def test_no_array_is_larger_than_a_few_rows():
    size = 512
    row = functools.partial(mask_row, config=MaskingConfig(unit="span"), words=WORDS)
    tokens = jnp.full(size, 7)
    jaxpr = jax.make_jaxpr(row)(tokens, jnp.zeros_like(tokens), jax.random.key(0), None)
    assert max(largest_outputs(jaxpr.jaxpr)) <= 8 * size


def largest_outputs(jaxpr):
    for equation in jaxpr.eqns:
        yield from (int(np.prod(var.aval.shape)) for var in equation.outvars)
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from largest_outputs(inner)


def test_bernoulli_overflow_is_counted_and_documents_keep_their_minimum():
    config = MaskingConfig(selection="bernoulli")
    tokens, segments = rows(64)
    rates = (0.9, 0.8, 0.1)
    out = masked(config, tokens, segments, keys_of(64), rates)
    slots = out["masked_weights"].shape[1]
    maskable = ~np.isin(tokens, SPECIALS) & (segments >= 0)
    assert slots == config.num_masked_slots(T) < 0.8 * maskable.sum(1).min()
    assert (out["masked_weights"].sum(1) == slots).all()
    total = out["masked_weights"].sum() + out["overflow"].sum()
    assert within(total / maskable.sum(), 0.9, float(maskable.sum()))
    for i in range(64):
        chosen = segments[i][out["masked_positions"][i]]
        assert set(chosen) == set(segments[i][maskable[i]])


def test_whole_words_are_whole_at_the_configured_rate():
    config = MaskingConfig(unit="whole_word")
    tokens, segments = rows(512)
    out = masked(config, tokens, segments, keys_of(512), words=True)
    check_invariants(config, tokens, segments, out, (0.15, 0.8, 0.1))
    maskable = ~np.isin(tokens, SPECIALS) & (segments >= 0)
    deviation = out["masked_weights"].sum(1) - 0.15 * maskable.sum(1)
    assert abs(deviation.mean()) <= 4 * deviation.std() / np.sqrt(512)
    assert np.abs(deviation).max() < 10
    kinds = used_kinds(out)
    for kind, share in zip(MaskKind, (0.8, 0.1, 0.1), strict=True):
        assert within((kinds == kind).mean(), share, kinds.size)


def test_whole_words_need_a_table():
    tokens, segments = rows(1)
    with pytest.raises(ConfigError, match=r"masking.unit = 'whole_word'"):
        mask_row(
            jnp.asarray(tokens[0]),
            jnp.asarray(segments[0]),
            jax.random.key(0),
            None,
            config=MaskingConfig(unit="whole_word"),
        )


def test_span_mode_keeps_rate_and_kinds():
    config = MaskingConfig(unit="span")
    tokens, segments = rows(512)
    out = masked(config, tokens, segments, keys_of(512), words=True)
    check_invariants(config, tokens, segments, out, (0.15, 0.8, 0.1))
    maskable = ~np.isin(tokens, SPECIALS) & (segments >= 0)
    deviation = out["masked_weights"].sum(1) + out["overflow"] - 0.15 * maskable.sum(1)
    assert abs(deviation.mean()) <= 4 * deviation.std() / np.sqrt(512)
    assert out["overflow"].sum() < 0.001 * out["masked_weights"].sum()
    used = out["masked_weights"][:, 1:] == 1
    adjacent = (np.diff(out["masked_positions"], axis=1) == 1)[used].mean()
    assert adjacent > 0.7  # 0.15 for single tokens
    kinds = used_kinds(out)
    for kind, share in zip(MaskKind, (0.8, 0.1, 0.1), strict=True):
        assert within((kinds == kind).mean(), share, kinds.size)


def test_span_lengths_are_geometric_and_end_with_their_run():
    config = MaskingConfig(unit="span")
    probabilities = config.span_length_probabilities()
    lengths = np.arange(1, 11)
    assert probabilities @ lengths == pytest.approx(3.797, abs=1e-3)
    size, n = 512, 64
    words = np.arange(size) % 2 == 0  # words of two tokens
    runs = np.isin(np.arange(size), [0, 256, 300])
    starts = jax.jit(
        jax.vmap(lambda key: _span_starts(jnp.asarray(words), jnp.asarray(runs), config, key))
    )(keys_of(n))
    starts = np.asarray(starts)
    assert starts[:, runs].all()
    assert not starts[:, ~words].any()
    counts = np.zeros(11)
    for row in starts:
        spans = np.diff(np.nonzero(row[:256])[0]) // 2
        # Ends that come late in the run are cut more often if long: look at early spans only.
        np.add.at(counts, spans[:20], 1)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:], probabilities * counts.sum()).pvalue > 1e-3


ODD_SIZE = 8
ODD_CONFIGS = [
    MaskingConfig(rate=1.0),
    MaskingConfig(rate=1.0, selection="bernoulli", min_per_document=2),
    MaskingConfig(rate=1.0, unit="whole_word"),
    MaskingConfig(rate=1.0, unit="span", min_per_document=0),
]


@st.composite
def odd_rows(draw) -> tuple[np.ndarray, np.ndarray]:
    """Four rows of documents of any length, with or without specials, then padding."""
    tokens = np.full((4, ODD_SIZE), 1, dtype=np.int32)
    segments = np.full((4, ODD_SIZE), -1, dtype=np.int32)
    anything = st.one_of(st.sampled_from(RANDOM_IDS.tolist()), st.sampled_from(SPECIALS.tolist()))
    for row, segment in zip(tokens, segments, strict=True):
        lengths = draw(st.lists(st.integers(1, ODD_SIZE), max_size=ODD_SIZE))
        ends = [min(end, ODD_SIZE) for end in itertools.accumulate(lengths, initial=0)]
        for document, (start, end) in enumerate(itertools.pairwise(ends)):
            segment[start:end] = document
            row[start:end] = draw(st.lists(anything, min_size=end - start, max_size=end - start))
    return tokens, segments


@pytest.mark.parametrize("config", ODD_CONFIGS, ids=lambda c: f"{c.selection}-{c.unit}")
@given(
    batch=odd_rows(),
    rate=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    fractions=st.sampled_from([(0.8, 0.1), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.5, 0.5)]),
    seed=st.integers(0, 2**31 - 1),
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_invariants_on_odd_rows(config, batch, rate, fractions, seed):
    tokens, segments = batch
    rates = (rate, *fractions)
    words = config.unit != "token"
    out = masked(config, tokens, segments, keys_of(4, seed), rates, words=words)
    check_invariants(config, tokens, segments, out, rates)
    assert out["overflow"].sum() == 0  # rate 1.0 has a slot for every token
    if rate == 1.0 and config.selection == "exact":
        maskable = ~np.isin(tokens, SPECIALS) & (segments >= 0)
        assert np.array_equal(out["masked_weights"].sum(1), maskable.sum(1))
    for fraction, kind in zip(fractions, (MaskKind.MASK, MaskKind.RANDOM), strict=True):
        if fraction in (0.0, 1.0):
            assert (used_kinds(out) == kind).all() == (fraction == 1.0 or not used_kinds(out).size)


def test_rows_without_anything_maskable_have_no_weight():
    tokens = np.array([[0, 2, 1, 1, 1, 1, 1, 1], [0, 2, 0, 2, 0, 2, 0, 2], [1] * 8], dtype=np.int32)
    segments = np.array([[0, 0] + [-1] * 6, [0, 0, 1, 1, 2, 2, 3, 3], [-1] * 8], dtype=np.int32)
    out = masked(ODD_CONFIGS[0], tokens, segments, keys_of(3))
    assert out["masked_weights"].shape == (3, 8)
    assert out["masked_weights"].sum() == out["overflow"].sum() == 0
    assert np.array_equal(out["input_ids"], tokens)


def test_scheduled_rates_reach_the_masks():
    tokens, segments = rows(64)
    maskable = (~np.isin(tokens, SPECIALS) & (segments >= 0)).sum(1)
    out = masked(MaskingConfig(), tokens, segments, keys_of(64), (0.05, 0.0, 1.0))
    # Two documents a row are owed a mask each.
    budget = np.maximum(0.05 * maskable, 2)
    assert (np.abs(out["masked_weights"].sum(1) - budget) < 1).all()
    assert (used_kinds(out) == MaskKind.RANDOM).all()
