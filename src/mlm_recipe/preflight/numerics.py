"""Loss and gradient of a program, small enough to write down and compare.

A gradient is kept as a signed random projection to ``SKETCH`` numbers (feature hashing; Weinberger
et al. 2009): it is linear, so the norm of the difference of two sketches estimates the norm of the
difference of the gradients, to some per cent of it.
"""

from typing import Any

import jax
import numpy as np

from mlm_recipe.preflight.program import Gradient

SKETCH = 4096

_CHUNK = 1 << 22


def measure(gradient: Gradient, *, operation_by_operation: bool) -> dict[str, Any]:
    """Loss, gradient norm and sketch.

    Args:
        gradient: what to compute.
        operation_by_operation: run each primitive by itself, on one device: the reference that
            no fusion, partitioning or scheduling pass has touched.
    """
    arguments = gradient.arguments()
    if operation_by_operation:
        with jax.disable_jit():
            loss, gradients = gradient.function(*arguments)
    else:
        loss, gradients = jax.jit(gradient.function)(*arguments)
    leaves = [np.asarray(jax.device_get(leaf)) for leaf in jax.tree_util.tree_leaves(gradients)]
    squares = sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in leaves)
    return {
        "precision": gradient.precision,
        "rows": gradient.rows,
        "loss": float(loss),
        "gradient_norm": squares**0.5,
        "sketch": [float(value) for value in sketch(leaves)],
    }


def sketch(leaves: list[np.ndarray]) -> np.ndarray:
    """Signed projection ``{SKETCH}`` float64 of the concatenated leaves.

    Buckets and signs are a function of a leaf's number and an element's place, so sketches of
    equal trees can be compared whatever made them.
    """
    total = np.zeros(SKETCH)
    for number, leaf in enumerate(leaves):
        generator = np.random.Generator(np.random.Philox(number))
        flat = leaf.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK].astype(np.float64)
            draws = generator.integers(0, 2 * SKETCH, part.size, dtype=np.uint16)
            signs = np.where(draws & 1, 1.0, -1.0)
            total += np.bincount(draws >> 1, weights=signs * part, minlength=SKETCH)
    return total
