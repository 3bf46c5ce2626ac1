"""mask_tokens: one row of tokens to one masked example, as a pure function of (key, inputs).

Everything is drawn from named streams folded from the example's key (``MaskStream``), so what is
selected, what it becomes and by what it is replaced are independent of each other, of the batch
it is in and of the device that computes it. Shapes are static; no array is larger than the row.

Tokens, words and spans are one thing here, *units*: they are put in random order, those that
documents are owed first, and taken while the budget lasts. The unit that crosses the budget is
taken with the probability of its part inside, which makes the number of masked tokens unbiased:
for single tokens that is the random rounding of ``rate * maskable``.
"""

from enum import IntEnum

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from mlm_recipe.data.example import MaskKind
from mlm_recipe.data.masking_config import MaskingConfig, MaskingRates
from mlm_recipe.data.word_starts import Edge, WordStarts
from mlm_recipe.errors import ConfigError


class MaskStream(IntEnum):
    """Constants folded into an example's key. Changing one changes every mask ever drawn."""

    SELECT = 1
    """Which units."""
    KIND = 2
    """Whether a selected token becomes the mask token, a random token, or is kept."""
    REPLACEMENT = 3
    """Which random token."""
    SPAN = 4
    """Where spans end."""


class MaskedTokens(eqx.Module):
    """A masked row. Unused slots are 0 in every field."""

    input_ids: NamedArray
    """``{position}`` int32: the tokens after replacement."""
    masked_positions: NamedArray
    """``{masked}`` int32: the selected positions, ascending."""
    masked_labels: NamedArray
    """``{masked}`` int32: the original tokens there."""
    masked_weights: NamedArray
    """``{masked}`` float32: 1 where the slot is used, else 0."""
    masked_kinds: NamedArray
    """``{masked}`` int32: a ``MaskKind`` per slot."""
    overflow: NamedArray
    """Scalar int32: tokens selected but left alone for want of a slot."""


def mask_tokens(
    tokens: NamedArray,
    maskable: NamedArray,
    config: MaskingConfig,
    *,
    mask_id: int,
    random_ids: NamedArray,
    key: PRNGKeyArray,
    segment_ids: NamedArray,
    rates: MaskingRates | None = None,
    word_starts: WordStarts | None = None,
    Masked: Axis | None = None,
) -> MaskedTokens:
    """Selects tokens to predict and replaces them (Devlin et al. 2019, section 3.1).

    A selected token that is kept, or whose random replacement happens to equal it, carries loss
    like any other. In whole-word and span mode the replacement is drawn for each token by itself,
    as in BERT's whole-word masking.

    Args:
        tokens: ``{position}`` int32, one row.
        maskable: ``{position}`` bool, False on special tokens and padding: never selected.
        config: the unit, the selection and the per-document minimum.
        mask_id: id of the mask token.
        random_ids: ``{random}`` int32, the ids a random replacement is drawn from, uniformly up
            to ``random / 2^32``: the vocabulary without special tokens.
        key: this example's key, and no other's.
        segment_ids: ``{position}`` int32, which document a token belongs to. Neither words nor
            spans cross documents, and each document gets ``config.min_per_document`` masks.
        rates: scalars, traced or not; the config's at step 0 if None.
        word_starts: from ``word_start_table``; needed for whole words, and used for spans.
        Masked: the axis of slots; ``masked`` of ``config.num_masked_slots`` if None.

    Raises ``ConfigError`` for whole words without ``word_starts``.
    """
    (Pos,) = tokens.axes
    Masked = Masked or Axis("masked", config.num_masked_slots(Pos.size))
    rates = config.rates_at(0) if rates is None else rates
    # float32 at once: Python floats would add in float64, and traced rates draw other masks.
    rate, mask_fraction, random_fraction = (jnp.asarray(x, dtype=jnp.float32) for x in rates)
    select_key, kind_key, replacement_key, span_key = _stream_keys(key)

    ids, allowed, segments = tokens.array, maskable.array, segment_ids.array
    starts = _unit_starts(ids, allowed, segments, config, word_starts, span_key)
    selected, overflow = _select_units(
        starts, allowed, segments, config, rate, Masked.size, select_key
    )
    positions, used = _slots(selected, Masked.size)
    kinds = _kinds(used, mask_fraction, random_fraction, kind_key)
    labels = jnp.where(used, ids[positions], 0)
    seen = _seen(labels, kinds, mask_id, random_ids.array, replacement_key)
    input_ids = ids.at[jnp.where(used, positions, Pos.size)].set(seen, mode="drop")
    return MaskedTokens(
        input_ids=hax.named(input_ids, Pos),
        masked_positions=hax.named(positions, Masked),
        masked_labels=hax.named(labels, Masked),
        masked_weights=hax.named(used.astype(jnp.float32), Masked),
        masked_kinds=hax.named(kinds, Masked),
        overflow=hax.named(overflow, ()),
    )


def _stream_keys(key: PRNGKeyArray) -> PRNGKeyArray:
    """One for each ``MaskStream``, by one fold: on the CPU each takes half a second to compile."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return fold(key, jnp.asarray(list(MaskStream)))


def _seen(
    labels: jax.Array, kinds: jax.Array, mask_id: int, random_ids: jax.Array, key: PRNGKeyArray
) -> jax.Array:
    """What stands in each slot instead of its label."""
    # The remainder favours no id by more than size / 2^32; randint compiles for longer.
    choice = jax.random.bits(key, labels.shape, dtype=jnp.uint32) % random_ids.size
    seen = jnp.where(kinds == MaskKind.RANDOM, random_ids[choice], labels)
    return jnp.where(kinds == MaskKind.MASK, mask_id, seen)


def _kinds(
    used: jax.Array, mask_fraction: jax.Array, random_fraction: jax.Array, key: PRNGKeyArray
) -> jax.Array:
    """``{masked}`` int32: a ``MaskKind`` for each used slot, 0 elsewhere."""
    draw = jax.random.uniform(key, used.shape)
    not_masked = jnp.where(draw < mask_fraction + random_fraction, MaskKind.RANDOM, MaskKind.KEPT)
    kinds = jnp.where(used & (draw >= mask_fraction), not_masked, MaskKind.MASK)
    return kinds.astype(jnp.int32)


def _unit_starts(
    ids: jax.Array,
    maskable: jax.Array,
    segments: jax.Array,
    config: MaskingConfig,
    word_starts: WordStarts | None,
    key: PRNGKeyArray,
) -> jax.Array:
    """``{position}`` bool: where a unit starts. It ends before the next, or what is unmaskable."""
    if config.unit == "token":
        return maskable
    # A run is what no word or span may leave: maskable tokens of one document without a gap.
    first = jnp.arange(ids.size) == 0
    run_starts = maskable & (first | ~jnp.roll(maskable, 1) | (segments != jnp.roll(segments, 1)))
    if word_starts is not None:
        after = jnp.asarray(word_starts.first)[ids]
        before = jnp.asarray(word_starts.last)[jnp.roll(ids, 1)]
        breaks = (after == Edge.BREAKS) | (before == Edge.BREAKS)
        differ = (after != before) & (after != Edge.JOINS) & (before != Edge.JOINS)
        starts = run_starts | (maskable & (breaks | differ))
    elif config.unit == "whole_word":
        raise ConfigError(
            "masking.unit",
            config.unit,
            "no table of word starts was given",
            "derive it with word_start_table from the tokenizer, or set masking.unit to token",
        )
    else:
        starts = maskable
    if config.unit == "span":
        return _span_starts(starts, run_starts, config, key)
    return starts


def _span_starts(
    word_starts: jax.Array, run_starts: jax.Array, config: MaskingConfig, key: PRNGKeyArray
) -> jax.Array:
    """Tiles each run with spans of random length; ``{position}`` bool.

    Choosing among tiles, rather than drawing starts until the budget is spent as SpanBERT does,
    needs no rejection and masks the first and last word of a document as often as any other. The
    last span of a run ends with it.
    """
    size = word_starts.size
    cumulative = config.span_length_probabilities().cumsum()[:-1]
    draw = jax.random.uniform(key, (size,))
    length = 1 + jnp.searchsorted(jnp.asarray(cumulative, dtype=jnp.float32), draw, side="right")

    word = jnp.cumsum(word_starts) - 1
    by_word = jnp.where(word_starts, word, size)
    run = jnp.full(size, -1).at[by_word].set(jnp.cumsum(run_starts), mode="drop")
    begins = jnp.zeros(size, dtype=bool).at[by_word].set(run_starts, mode="drop")

    target = jnp.arange(size) + length
    inside = run == run.at[target].get(mode="fill", fill_value=-1)
    begins = _reachable(begins, jnp.where(inside, target, size))
    return word_starts & begins[word]


def _reachable(begins: jax.Array, target: jax.Array) -> jax.Array:
    """All i reached from ``begins`` by i -> target[i], where ``size`` leads nowhere.

    Each round doubles the distance covered, so log2(size) rounds are enough.
    """
    size = begins.size
    for _ in range(size.bit_length()):
        begins = begins.at[target].max(begins, mode="drop")
        target = target.at[target].get(mode="fill", fill_value=size)
    return begins


def _select_units(
    starts: jax.Array,
    maskable: jax.Array,
    segments: jax.Array,
    config: MaskingConfig,
    rate: jax.Array,
    num_slots: int,
    key: PRNGKeyArray,
) -> tuple[jax.Array, jax.Array]:
    """``{position}`` bool, the selected tokens that have a slot; and how many have none."""
    size = maskable.size
    unit = jnp.where(maskable, jnp.cumsum(starts) - 1, size)
    length = jnp.zeros(size, dtype=jnp.int32).at[unit].add(1, mode="drop")
    document = jnp.zeros(size, dtype=jnp.int32).at[unit].set(segments, mode="drop")
    draw, coin = jnp.split(jax.random.uniform(key, (size + 1,)), [size])
    owed = _owed(document, length, draw, config.min_per_document)

    _, order = jax.lax.sort((~owed, draw, jnp.arange(size)), num_keys=2)[1:]
    draw, owed, length = draw[order], owed[order], length[order]
    after = jnp.cumsum(length)
    if config.selection == "exact":
        # In steps of 1/1024 token: float32 0.15 * 160 may exceed 24, and with it the slots.
        budget = jnp.round(rate * jnp.sum(maskable) * 1024) / 1024
        budget = jnp.maximum(budget, jnp.sum(length, where=owed))
        taken = coin * length < budget - (after - length)
    else:
        taken = owed | (draw < rate)
    # Both ways the taken units come first in the order, so `after` counts the slots they need.
    fits = taken & (after <= num_slots)
    overflow = jnp.sum(length, where=taken & ~fits)
    chosen = jnp.zeros(size, dtype=bool).at[order].set(fits)
    return chosen.at[unit].get(mode="fill", fill_value=False), overflow.astype(jnp.int32)


def _owed(
    document: jax.Array, length: jax.Array, draw: jax.Array, min_per_document: int
) -> jax.Array:
    """``{unit}`` bool: the units with the least draw in their document, up to the minimum.

    The draw is the one that orders all units: wherever the selection covers a document anyway,
    the minimum changes nothing.
    """
    if min_per_document == 0:
        return jnp.zeros(draw.shape, dtype=bool)
    unused = length == 0
    unused, document, _, order = jax.lax.sort(
        (unused, document, draw, jnp.arange(draw.size)), num_keys=3
    )
    length = length[order]
    before = jnp.cumsum(length) - length
    new = document != jnp.roll(document, 1)
    at_document_start = jax.lax.cummax(jnp.where(new, before, 0))
    owed = ~unused & (before - at_document_start < min_per_document)
    return jnp.zeros(draw.shape, dtype=bool).at[order].set(owed)


def _slots(selected: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """Selected positions in ascending order on ``num_slots`` slots, and which slots are used."""
    slot = jnp.where(selected, jnp.cumsum(selected) - 1, num_slots)
    positions = jnp.zeros(num_slots, dtype=jnp.int32)
    positions = positions.at[slot].set(jnp.arange(selected.size, dtype=jnp.int32), mode="drop")
    return positions, jnp.arange(num_slots) < jnp.sum(selected)
