"""Run a model on a batch, and the outputs that a conversion compares.

Letters: B batch, L tokens, E width of a state, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]
"""Keyword arguments of a model's forward pass."""


class Outputs(NamedTuple):
    """A model's outputs on a batch.

    Attributes:
        states: after every layer, each (B, L, E).
        logits: (B, L, V) where the model predicts tokens, else None.
        live: (B, L) bool, False for padding.
    """

    states: tuple[Tensor, ...]
    logits: Tensor | None
    live: Tensor

    @property
    def last(self) -> Tensor:
        """Its predictions, or else its last states; (B, L, ·)."""
        return self.states[-1] if self.logits is None else self.logits


def run(model: nn.Module, batch: Batch) -> Outputs:
    """One forward pass on the model's device, without a cache; tokens that the attention mask leaves out are padding.

    Raises ValueError if the model gives no hidden states of tokens.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=4)
        >>> found = run(BertModel(BertConfig(**sizes)).eval(), {"input_ids": torch.tensor([[1, 2, 3]])})
        >>> len(found.states), tuple(found.last.shape), found.live.tolist()
        (2, (1, 3, 4), [[True, True, True]])
    """
    batch = to_device(batch, next((weight.device for weight in model.parameters()), torch.device("cpu")))
    # Without this option a decoder would cache every layer's keys, which training does not read.
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    found = model(**batch, output_hidden_states=True, return_dict=True, **options)
    states = getattr(found, "hidden_states", None)
    if not states or states[-1].ndim != 3:
        raise ValueError(
            f"{type(model).__name__} gives no hidden states (B, L, E), which a conversion compares; give an encoder or "
            "a decoder, with or without its language-model head"
        )
    mask = batch.get("attention_mask")
    live = mask.bool() if mask is not None else states[-1].new_ones(states[-1].shape[:2], dtype=torch.bool)
    logits = getattr(found, "logits", None)
    per_token = logits is not None and logits.shape[:2] == live.shape
    return Outputs(tuple(states[1:]), logits if per_token else None, live)


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The batch's tensors on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}
