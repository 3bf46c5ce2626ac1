"""Failures that end with exit code 0: XLA:GPU compiles for absent devices what they cannot hold."""

import re

from mlm_recipe.guard.evidence import read_evidence
from mlm_recipe.guard.types import ChildExit, Failure, FailureKind

_ARGUMENTS = re.compile(
    r"byte size of input/output arguments \((\d+)\) exceeds the base limit \((\d+)\)"
)
_REMATERIALIZED = re.compile(
    r"Can't reduce memory use below \S+ \((\d+) bytes\) by rematerialization; "
    r"only reduced to \S+ \((\d+) bytes\)"
)
# The limits are about four fifths of the device; programs a little above them do run.
_ARGUMENTS_FACTOR = 1.3
_ESTIMATE_FACTOR = 2.0


def overlooked(exit: ChildExit) -> Failure | None:
    """What an apparent success hides; None where nothing is seen.

    Only what cannot have run is named: arguments beyond any device that has that limit, or a
    compiler's estimate of twice the limit and more.
    """
    text = read_evidence(exit).text
    arguments = [(int(m[1]), int(m[2])) for m in _ARGUMENTS.finditer(text)]
    estimates = [(int(m[2]), int(m[1])) for m in _REMATERIALIZED.finditer(text)]
    for found, factor in ((arguments, _ARGUMENTS_FACTOR), (estimates, _ESTIMATE_FACTOR)):
        need, limit = max(found, default=(0, 1))
        if need > factor * limit:
            return Failure(
                FailureKind.OUT_OF_MEMORY,
                "compiled for more memory than the device has",
                reason="device",
                message=f"needs {need / 2**30:.1f} GiB, XLA's limit is {limit / 2**30:.1f} GiB",
                advice="XLA compiled it without an error, but it cannot run: shard parameters and "
                "optimizer state, recompute activations, or split the batch.",
                phase="compiled",
                remedies=("fsdp", "full_remat", "more_microbatches"),
            )
    return None
