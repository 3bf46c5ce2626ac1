"""``summary.json``: what a run did, for people and for scripts. Written however the run ends."""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlm_recipe.scores import EvalResult

SCHEMA_VERSION = 1


@dataclass
class RunSummary:
    """The fields of ``summary.json``; losses are in nats, null where the run never got there."""

    schema_version: int = SCHEMA_VERSION
    """Grows when a field changes its meaning."""
    run_id: str | None = None
    """``trainer.id``."""
    exit_reason: str = "unknown"
    """finished, data_exhausted, config_error, audit_failed, interrupted or error."""
    error: str | None = None
    """Type and message of what ended the run."""
    final_step: int | None = None
    """Optimizer updates in the final state, those before a resume included."""
    num_train_steps: int | None = None
    """Updates asked for."""
    resumed_from_step: int | None = None
    """Step of the checkpoint this process began from; null for a fresh start."""
    train_loss: float | None = None
    """Of the last step."""
    eval_loss: float | None = None
    """Mean over all masked tokens of the validation sets, fixed masks."""
    eval_perplexity: float | None = None
    """exp(eval_loss)."""
    eval_masked_accuracy: float | None = None
    """Fraction of masked tokens predicted first."""
    eval_by_kind: dict[str, dict[str, float]] = field(default_factory=dict)
    """``mask``, ``random``, ``kept``: their loss, masked_accuracy and num_masked."""
    unigram_nats: float | None = None
    """Entropy of the training tokens: what knowing only frequencies would cost."""
    tokens_seen: int | None = None
    """Positions trained on since step 0, padding included."""
    mask_overflow: int = 0
    """Tokens of this process selected for masking that found no slot; not 0 means too few slots."""
    useful_token_share: float | None = None
    """Share of them in this process that were not padding."""
    useful_tokens_per_second: float | None = None
    """Non-padding tokens per second of train step, the first (compiling) step left out."""
    mfu: float | None = None
    """Useful FLOPs over the device's published peak; null where the peak is unknown."""
    num_parameters: int | None = None
    """Trainable parameters, padded vocabulary rows left out."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase: imports, preflight (what was left of it once all was imported),
    initialize, data, audit, state, first_step, train, eval, ..."""
    device: dict[str, Any] = field(default_factory=dict)
    """Kind, counts and backend."""
    versions: dict[str, str] = field(default_factory=dict)
    """Python and packages."""
    git_commit: str | None = None
    """Of the checkout the package runs from."""
    variant: str = "as_configured"
    """The guard's variant that trained."""
    train_step_compiles: int | None = None
    """Times this process had XLA compile the train step; 0 after a preflight on these devices."""
    train_step_cache_hits: int | None = None
    """Times it found the train step in the persistent compilation cache."""
    masking_audit: dict[str, Any] = field(default_factory=dict)
    """Figures of the audit at the start."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's wall time to ``seconds[name]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = round(self.seconds.get(name, 0.0) + spent, 3)

    def record_eval(self, result: EvalResult) -> None:
        """Take over the scores of the last evaluation."""
        self.eval_loss = result.all.loss
        self.eval_perplexity = result.all.perplexity
        self.eval_masked_accuracy = result.all.masked_accuracy
        self.eval_by_kind = {kind: asdict(score) for kind, score in result.by_kind.items()}

    def write(self, path: Path) -> None:
        """Atomically, as strict JSON: NaN and infinities, which it cannot say, become null."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        content = json.dumps(_finite(asdict(self)), indent=2, allow_nan=False)
        partial.write_text(content + "\n", encoding="utf-8")
        os.replace(partial, path)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
