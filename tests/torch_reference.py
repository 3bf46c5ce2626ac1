"""What torch computes: transformers' RobertaForMaskedLM, eager attention, float32, no dropout.

Imports torch, so only the ``parity`` suite may import it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]  # in the parity group only
from transformers import RobertaConfig, RobertaForMaskedLM

Tensors = dict[str, np.ndarray]


def save(config: dict[str, Any], directory: Path) -> None:
    """A checkpoint of random weights, biases and pad rows included: none is tested at zero."""
    torch.manual_seed(0)
    model = RobertaForMaskedLM(RobertaConfig(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)


def logits(model: RobertaForMaskedLM, batch: Tensors) -> np.ndarray:
    with torch.no_grad():
        return model(**_inputs(batch)).logits.numpy()


def loss_and_gradients(model: RobertaForMaskedLM, batch: Tensors) -> tuple[float, Tensors]:
    loss = model(**_inputs(batch), labels=torch.from_numpy(batch["labels"])).loss
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


def adamw_step(model: RobertaForMaskedLM, *, learning_rate: float, decay: float) -> Tensors:
    """The weights after one step on the gradients of ``loss_and_gradients``."""
    groups: dict[float, list[torch.nn.Parameter]] = {decay: [], 0.0: []}
    for name, parameter in model.named_parameters():
        plain = name.endswith("bias") or "LayerNorm" in name or "layer_norm" in name
        groups[0.0 if plain else decay].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": params, "weight_decay": rate} for rate, params in groups.items()],
        lr=learning_rate,
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    optimizer.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def load(directory: Path) -> tuple[RobertaForMaskedLM, set[str]]:
    """A saved model, and the tensors that were missing or unexpected."""
    model, info = RobertaForMaskedLM.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True
    )
    tied = model.lm_head.decoder.weight is model.roberta.embeddings.word_embeddings.weight
    assert tied, "the decoder is not tied after loading"
    return model.eval(), {*info["missing_keys"], *info["unexpected_keys"]}


def _inputs(batch: Tensors) -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask")
    return {name: torch.from_numpy(batch[name]) for name in names if name in batch}
