"""Position ids, and the lookup that keeps gradients from the padding row."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
import pytest
from haliax import Axis, NamedArray
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_recipe.model import nn
from mlm_recipe.model.position_ids import roberta_position_ids

PAD = 1


def row(values: list[int]) -> NamedArray:
    return hax.named(np.array(values, np.int32), "position")


@pytest.mark.parametrize(
    "input_ids, segment_ids, expected",
    [
        ([0, 5, PAD, 6, 2], None, [2, 3, 1, 4, 5]),
        ([0, 5, PAD, 6, 2], [0, 0, -1, 0, 0], [2, 3, 1, 4, 5]),
        ([PAD, PAD, 0, 6, 2], [-1, -1, 0, 0, 0], [1, 1, 2, 3, 4]),
        ([0, 2, 0, 9, 2], [0, 0, 1, 1, 1], [2, 3, 2, 3, 4]),
        ([0, 2, PAD, 9, 2], [0, 0, -1, 1, 1], [2, 3, 1, 2, 3]),
        ([0, PAD, 0, 2, PAD], [0, -1, 1, 1, -1], [2, 1, 2, 3, 1]),
        ([PAD] * 5, [-1] * 5, [1] * 5),
    ],
)
def test_position_ids(input_ids: list[int], segment_ids: list[int] | None, expected: list[int]):
    segments = None if segment_ids is None else row(segment_ids)
    assert roberta_position_ids(row(input_ids), segments, PAD).array.tolist() == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from([PAD, 5, 6]), min_size=1, max_size=6), max_size=4))
def test_position_ids_of_packed_documents_are_those_of_each(documents: list[list[int]]):
    tokens = [token for document in documents for token in document]
    segments = [n for n, document in enumerate(documents) for _ in document]
    padding = 24 - len(tokens)
    expected = []
    for document in documents:
        counts = np.cumsum(np.array(document) != PAD)
        expected += [
            PAD if t == PAD else PAD + int(n) for t, n in zip(document, counts, strict=True)
        ]
    ids = roberta_position_ids(
        row([*tokens, *[PAD] * padding]), row([*segments, *[-1] * padding]), PAD
    )
    assert ids.array.tolist() == expected + [PAD] * padding


def test_lookup_gives_the_padding_row_no_gradient():
    Rows, Embed = Axis("rows", 3), Axis("embed", 2)
    table = hnn.Embedding(hax.ones((Rows, Embed)), Rows, Embed)
    ids = row([PAD, 2, PAD, 2])

    def total(table: hnn.Embedding) -> jax.Array:
        return hax.sum(nn.lookup(table, ids, PAD)).scalar()

    value, grads = eqx.filter_value_and_grad(total)(table)
    assert value == 8
    assert grads.weight.array.tolist() == [[0, 0], [0, 0], [2, 2]]
