"""What each family's model is called with: a batch of three rows of 7, 4 and 1 tokens, and each row alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ENCODERS = ("bert", "roberta", "distilbert", "modernbert", "esm")
# Decoders, and what transformers calls their language models.
LANGUAGE_HEADS = {
    "gpt2": "LMHeadModel",
    "gpt_neox": "ForCausalLM",
    "llama": "ForCausalLM",
    "mistral": "ForCausalLM",
    "qwen2": "ForCausalLM",
    "qwen3": "ForCausalLM",
    "bert_decoder": "LMHeadModel",
}
DECODERS = tuple(LANGUAGE_HEADS)
LENGTHS = (7, 4, 1)
# Mistral's window is a setting, on by default and wider than these texts; the kernel takes its place only without one.
OPTIONS: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": None}}


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Token numbers and mask, padded on one side."""
    ids = torch.randint(3, 64, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    mask = mask.flip(-1) if side == "left" else mask
    return torch.where(mask, ids, 0), mask.long()


def batch(family: str) -> dict[str, Tensor]:
    """Arguments of a forward pass with padding, where the family knows any."""
    draw = torch.Generator().manual_seed(2)
    ids, mask = padded("left" if family in DECODERS else "right")
    if family == "vit":
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=draw, dtype=torch.float64)}
    if family == "whisper":
        sound = torch.randn(3, 4, 16, generator=draw, dtype=torch.float64)
        return {"input_features": sound, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    if family == "bart":
        own, own_mask = ids.flip(0), mask.flip(0)
        encoder = {"input_ids": own, "attention_mask": own_mask}
        return encoder | {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    if family in DECODERS:
        return {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}
    return {"input_ids": ids, "attention_mask": mask}


def positions(mask: Tensor) -> Tensor:
    """Positions counted from the first real token."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def alone(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One row of a batch, its padding cut off."""
    found = {}
    for name, x in inputs.items():
        side = "decoder_attention_mask" if name.startswith("decoder") else "attention_mask"
        found[name] = x[row : row + 1, inputs[side][row].bool()] if side in inputs and x.ndim == 2 else x[row : row + 1]
    return {name: x for name, x in found.items() if not name.endswith("attention_mask")}


def real(inputs: dict[str, Tensor]) -> Tensor | slice:
    """Which positions of the output mean something."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return slice(None) if mask is None else mask.bool()


def run(model: Any, **inputs: Any) -> Tensor:
    """The first output of a model, without gradients."""
    with torch.no_grad():
        out: Tensor = model(**inputs)[0]
    return out


def differ(ours: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest number."""
    return float((ours - wanted).abs().max() / wanted.abs().max())
