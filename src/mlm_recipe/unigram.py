"""What a model that knows only token frequencies would lose: the yardstick beside every loss."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from levanter.store.cache import TreeCache

from mlm_recipe.data.rows import TOKENS_FIELD

_CHUNK = 1 << 22
_MOST_TOKENS = 1 << 26


def unigram_entropy(caches: Mapping[str, TreeCache[dict]]) -> float:
    """Entropy in nats of the distribution of document tokens in the training caches.

    Of each cache the first 67M tokens are counted, so that a large corpus is not read twice.
    """
    counts = np.zeros(0, dtype=np.int64)
    for cache in caches.values():
        store: Any = cache.jagged_array_tree()[TOKENS_FIELD]
        total = min(int(store.data_size), _MOST_TOKENS)
        for start in range(0, total, _CHUNK):
            tokens = store.data[start : min(start + _CHUNK, total)].read().result()
            found = np.bincount(tokens)
            counts = np.pad(counts, (0, max(0, len(found) - len(counts))))
            counts[: len(found)] += found
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
