"""Where a token is in its document, as a row of the position table."""

from typing import cast

import haliax as hax
import jax
from haliax import NamedArray
from haliax.wrap import wrap_axiswise_call


def roberta_position_ids(
    input_ids: NamedArray, segment_ids: NamedArray | None, pad_token_id: int
) -> NamedArray:
    """Position ids ``{..., position}``: ``pad + 1`` onwards over the tokens of each segment.

    ``<pad>`` takes the id ``pad`` and is not counted, also between tokens, as in transformers'
    ``create_position_ids_from_input_ids``.

    Args:
        input_ids: ``{..., position}``.
        segment_ids: ``{..., position}``, 0, 1, ... ascending and -1 on padding; counting
            restarts with every segment. None is one segment.
    """
    is_token = hax.where(input_ids != pad_token_id, 1, 0)
    count = hax.cumsum(is_token, "position")
    if segment_ids is not None:
        # Padding belongs to the segment before it, so that it does not restart the count.
        segment = _cummax(segment_ids)
        starts = segment != hax.roll(segment, 1, "position")
        count = count - _cummax(hax.where(starts, count - is_token, 0))
    return hax.where(is_token == 1, count + pad_token_id, pad_token_id)


def _cummax(x: NamedArray) -> NamedArray:
    running = wrap_axiswise_call(jax.lax.cummax, x, "position", single_axis_only=True)
    return cast(NamedArray, running)
