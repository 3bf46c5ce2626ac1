"""Where model, data, optimizer, mesh and loss meet.

The training program and every check of it build the run through here, so what is checked is what
runs. Nothing is allocated or read until it is asked for.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import jax
import numpy as np
from haliax import Axis
from haliax.partitioning import round_axis_for_partitioning
from jaxtyping import PRNGKeyArray
from levanter.data.dataset import AsyncDataset
from levanter.data.loader import DataLoader
from levanter.trainer import Trainer
from levanter.trainer_state import TrainerState
from levanter.utils.thread_utils import blocking_wait

from mlm_recipe.config import TrainMlmConfig
from mlm_recipe.data.batches import GlobalBatches
from mlm_recipe.data.config import MlmDataConfig
from mlm_recipe.data.example import MlmExample, stack_examples
from mlm_recipe.data.masked_rows import MaskedRows, RatesAt
from mlm_recipe.data.masking_config import MaskingConfig, MaskingRates
from mlm_recipe.data.rows import Row
from mlm_recipe.data.tokenizer import TokenizerInfo
from mlm_recipe.data.word_starts import WordStarts, word_start_table
from mlm_recipe.errors import ConfigError
from mlm_recipe.fit import check_fit
from mlm_recipe.loss import masked_lm_loss
from mlm_recipe.model.roberta import RobertaForMaskedLM

# Evaluation masks are data: they depend on no setting of a run.
_EVAL_MASK_SEED = 20190726

# Levanter's 128 batches of 8192 x 512 would hold several GiB of device memory.
_BUFFERED_BATCHES = 16
_FETCH_BATCHES = 4


@dataclass(frozen=True)
class Streams:
    """One PRNG stream per purpose, all from ``trainer.seed``."""

    init: PRNGKeyArray
    shuffle: PRNGKeyArray
    mask: PRNGKeyArray
    dropout: PRNGKeyArray

    @staticmethod
    def from_seed(seed: int) -> "Streams":
        """Named folds, so that a stream added later changes no other."""
        root = jax.random.PRNGKey(seed)
        names = ("init", "shuffle", "mask", "dropout")
        return Streams(*(jax.random.fold_in(root, zlib.crc32(name.encode())) for name in names))


@dataclass(frozen=True)
class Recipe:
    """A run, ready to train. Build it with `build`, after Levanter has been initialised."""

    config: TrainMlmConfig
    tokenizer: TokenizerInfo
    trainer: Trainer
    streams: Streams
    Vocab: Axis
    Pos: Axis

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding that stand for a token; ``Vocab`` may be padded beyond them."""
        return self.config.roberta.vocab_size or self.tokenizer.vocab_size

    @property
    def num_parameters(self) -> int:
        """Trainable parameters; the rows that pad ``Vocab`` are left out."""
        return self.config.roberta.total_trainable_params(self.vocab_size)

    @property
    def Masked(self) -> Axis:
        """Slots for masked tokens of a training row."""
        return Axis("masked", self.config.masking.num_masked_slots(self.Pos.size))

    @property
    def train_flops_per_example(self) -> float:
        """Forward and backward of one row, the head at the ``masked`` slots only."""
        per_token = self.config.roberta.flops_per_token(
            self.vocab_size, self.Pos.size, self.Masked.size / self.Pos.size
        )
        return 3 * per_token * self.Pos.size

    def init_model(self) -> RobertaForMaskedLM:
        """A freshly initialised model; jit-able."""
        return RobertaForMaskedLM.init(
            self.Vocab, self.config.roberta, vocab_size=self.vocab_size, key=self.streams.init
        )

    def initial_state(self) -> TrainerState[RobertaForMaskedLM]:
        """The state of the run's latest checkpoint, or a fresh one. Call within the trainer."""
        return self.trainer.initial_state(self.streams.dropout, model_init=self.init_model)

    @cached_property
    def data(self) -> MlmDataConfig:
        """The data configuration, its rows holding no more documents than masks can serve.

        Each document is owed ``masking.min_per_document`` masks of a static number of slots.
        """
        packing = self.config.data.packing
        most = packing.max_segments_per_row
        for masking in (self.config.masking, self.config.masking.for_eval()):
            slots = masking.num_masked_slots(self.Pos.size)
            most = min(most, slots // max(masking.min_per_document, 1))
        packing = dataclasses.replace(packing, max_segments_per_row=max(most, 1))
        return dataclasses.replace(self.config.data, packing=packing)

    @cached_property
    def train_set(self) -> MaskedRows:
        """The endless or finite training mixture; its index is the global example number."""
        schedule = self.config.trainer.batch_schedule
        mixture = self.data.train_mixture(self.Pos, schedule, key=self.streams.shuffle)

        def rates_at(indices: np.ndarray) -> MaskingRates:
            steps = [schedule.find_step_containing_offset(int(i)) for i in indices]
            return self.config.masking.rates_at(steps)

        rows = cast(AsyncDataset[Row], mixture)  # what our components yield
        return self._masked(rows, self.config.masking, self.streams.mask, rates_at)

    @cached_property
    def eval_sets(self) -> Mapping[str, MaskedRows]:
        """Validation rows by component name, under masks that are the same in every run."""
        masking = self.config.masking.for_eval()
        key = jax.random.PRNGKey(_EVAL_MASK_SEED)
        return {
            name: self._masked(rows, masking, key, lambda i: masking.rates_at(np.zeros_like(i)))
            for name, rows in self.data.validation_sets(self.Pos).items()
        }

    def host_batch(self, step: int, *, limit: int) -> MlmExample:
        """The first ``limit`` examples of a step's batch, stacked on the host, on no device."""
        schedule = self.config.trainer.batch_schedule
        start = schedule.global_data_offset_by_step(step)
        size = min(schedule.batch_size_at_step(step), limit)
        indices = range(start, start + size)
        return stack_examples(blocking_wait(self.train_set.get_batch(indices)))

    def train_batches(self, start_step: int) -> GlobalBatches:
        """Global batches from a step on; close them."""
        return GlobalBatches(
            self._loader(self.train_set, self.config.trainer.train_batch_size),
            start_step=start_step,
        )

    def eval_loader(self, dataset: AsyncDataset[MlmExample]) -> DataLoader[MlmExample]:
        """Every example once, in order; the last batch is filled with weightless examples."""
        return self._loader(dataset, self.trainer.EvalBatch.size)

    def _masked(
        self, rows: AsyncDataset[Row], masking: MaskingConfig, key: PRNGKeyArray, rates_at: RatesAt
    ) -> MaskedRows:
        word_starts = None
        if masking.unit != "token":
            content = (self.tokenizer.directory / "tokenizer.json").read_text(encoding="utf-8")
            word_starts = _word_starts(json.loads(content), required=masking.unit == "whole_word")
        return MaskedRows(
            rows,
            self.Pos,
            masking,
            self.tokenizer,
            key=key,
            rates_at=rates_at,
            word_starts=word_starts,
        )

    def _loader(self, dataset: AsyncDataset[MlmExample], batch_size) -> DataLoader[MlmExample]:
        trainer = self.config.trainer
        return DataLoader(
            dataset,
            batch_size,
            batch_axis_name=trainer.batch_axis_name,
            max_buffered_batches=_BUFFERED_BATCHES,
            fetch_batch_size=_FETCH_BATCHES,
            mesh=trainer.device_mesh,
            axis_resources=trainer.compute_axis_mapping,
            allow_nondivisible_batch_size=trainer.allow_nondivisible_batch_size,
        )


def build(config: TrainMlmConfig, *, hooks: bool = True) -> Recipe:
    """Resolve tokenizer, axes, optimizer and trainer.

    Args:
        hooks: add Levanter's progress, checkpoint, watch and profile hooks.

    Raises:
        ConfigError: tokenizer and model do not fit.
    """
    tokenizer = config.data.tokenizer_info
    model = config.roberta
    check_fit(tokenizer, vocab_size=model.vocab_size, pad_token_id=model.pad_token_id)
    trainer = Trainer(
        config.trainer,
        config.optimizer.build(config.trainer.num_train_steps),
        # Levanter passes the model, one batch and a key; its protocol says more than it uses.
        cast(Any, partial(masked_lm_loss, z_loss_weight=config.z_loss_weight)),
        add_default_hooks=hooks,
    )
    with config.trainer.use_device_mesh():
        Vocab = round_axis_for_partitioning(
            model.vocab_axis(model.vocab_size or tokenizer.vocab_size),
            config.trainer.parameter_axis_mapping,
        )
    streams = Streams.from_seed(config.trainer.seed)
    return Recipe(config, tokenizer, trainer, streams, Vocab, model.max_Pos)


def _word_starts(tokenizer_json: Mapping[str, Any], *, required: bool) -> WordStarts | None:
    try:
        return word_start_table(tokenizer_json)
    except ConfigError:
        if required:
            raise
        return None  # spans then count tokens
