"""The YAML tree as dataclasses: one block, one class."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import draccus
import jax
import levanter.config  # noqa: F401  registers draccus codecs (mp policies, time spans)
from draccus.utils import DraccusException
from jax.sharding import AxisType, Mesh
from levanter.models.lm_model import LmConfig
from levanter.optim.config import OptimizerConfig
from levanter.tracker import TrackerConfig
from levanter.tracker.wandb import WandbConfig
from levanter.trainer import TrainerConfig
from levanter.utils.mesh import create_mesh_from_axis_specs

from mlm_recipe.data.config import MlmDataConfig
from mlm_recipe.data.masking_config import MaskingConfig
from mlm_recipe.errors import ConfigError
from mlm_recipe.guard.config import GuardConfig
from mlm_recipe.model.config import RobertaConfig
from mlm_recipe.optim import RobertaAdamWConfig


@dataclass
class MlmTrainerConfig(TrainerConfig):
    """Levanter's TrainerConfig, as it is but for the defaults below."""

    tracker: TrackerConfig | tuple[TrackerConfig, ...] = field(
        default_factory=lambda: WandbConfig(project="mlm_recipe", save_code=False)
    )
    """One tracker or a list: wandb, tensorboard, json_logger, json_file, noop, ..."""
    log_jaxprs: bool = False
    """Write the train step's jaxpr; costs a second trace."""
    log_xla_hlo: bool = False
    """Write the train step's StableHLO; costs a second lowering."""

    _devices = None  # no field: no configuration names devices

    def on(self, devices: Sequence[Any]) -> "MlmTrainerConfig":
        """The same trainer on these devices, attached or not, instead of ``jax.devices()``."""
        placed = copy.copy(self)
        placed._devices = list(devices)  # pyright: ignore[reportAttributeAccessIssue]
        return placed

    @property
    def device_mesh(self) -> Mesh:
        if self._devices is None:
            return super().device_mesh
        ici, dcn = self._axis_shapes()
        names = [*ici, *(name for name in dcn if name not in ici)]
        kinds = (AxisType.Explicit,) * len(names) if self.use_explicit_mesh_axes else None
        return create_mesh_from_axis_specs(
            ici_axes=ici, dcn_axes=dcn, axis_types=kinds, devices=self._devices
        )

    @cached_property
    def num_slices(self) -> int:
        devices = jax.devices() if self._devices is None else self._devices
        return max(getattr(device, "slice_index", 0) or 0 for device in devices) + 1

    @cached_property
    def mesh_axis_specs(self) -> list[str]:
        ici, dcn = self._axis_shapes()
        return list(ici.keys() | dcn.keys())

    @cached_property
    def _mesh_axis_totals(self) -> dict[str, int]:
        ici, dcn = self._axis_shapes()
        return {name: ici.get(name, 1) * dcn.get(name, 1) for name in {*ici, *dcn}}

    def _axis_shapes(self) -> tuple[dict[str, int], dict[str, int]]:
        count = jax.device_count() if self._devices is None else len(self._devices)
        return self.mesh.axis_shapes(count, self.num_slices)


@dataclass(frozen=True)
class TrainMlmConfig:
    """A masked-LM pretraining run."""

    data: MlmDataConfig = field(default_factory=lambda: MlmDataConfig())
    """Documents, tokenizer, cache, packing, mixture."""
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    """Which tokens are predicted, and what replaces them."""
    model: LmConfig = field(default_factory=RobertaConfig)
    """The encoder; its type must have a masked-LM head."""
    optimizer: OptimizerConfig = field(default_factory=RobertaAdamWConfig)
    """Any Levanter optimizer; roberta_adamw has RoBERTa's published values."""
    trainer: MlmTrainerConfig = field(default_factory=lambda: MlmTrainerConfig())
    """Steps, batch, precision, mesh, evaluation, checkpoints, tracking."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Preflight, fallbacks, limits, and what happens after a death."""
    output_dir: str = "runs"
    """Every run writes only below ``output_dir/<trainer.id>``."""
    audit_batches: int = 4
    """Audit the masks of this many first batches and refuse to train on a violation; 0 is off."""
    z_loss_weight: float = 0.0
    """Weight of log(Z)^2 in the loss (PaLM, Chowdhery et al. 2022, section 5)."""

    @property
    def run_dir(self) -> Path:
        """The directory of this run; its name is the run id."""
        assert self.trainer.id is not None
        return Path(self.output_dir) / self.trainer.id

    @property
    def roberta(self) -> RobertaConfig:
        """The model config, known to have a masked-LM head."""
        assert isinstance(self.model, RobertaConfig)
        return self.model


def decode_config(raw: Mapping[str, Any]) -> TrainMlmConfig:
    """The raw mapping as dataclasses.

    Raises:
        ConfigError: what the launcher's schema could not see, such as a cross-field rule.
    """
    try:
        config = draccus.decode(TrainMlmConfig, dict(raw))
    except DraccusException as error:
        raise _as_config_error(error) from error
    if not isinstance(config.model, RobertaConfig):
        kind = (raw.get("model") or {}).get("type")
        raise ConfigError("model.type", kind, "the model has no masked-LM head", "use roberta")
    return config


def _as_config_error(error: BaseException) -> ConfigError:
    """The ConfigError below draccus's wrapping, or one made of its path and message."""
    path, last = "", error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError):
            return cause
        path = ".".join(str(p) for p in getattr(cause, "key_path", ())) or path
        last, cause = cause, cause.__cause__
    return ConfigError(path or "config", "(see message)", str(last), "correct that value")
