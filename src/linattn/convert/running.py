"""Run a model on a batch, or on the share of one process; letters as in convert/__init__.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn.convert.predictions import NONE, Predictions
from linattn.processes import Processes

Batch = Mapping[str, Tensor]
"""Keyword arguments of a model's forward pass."""


class Outputs(NamedTuple):
    """A model's outputs on a batch."""

    states: tuple[Tensor, ...]  # after every layer, each (B, L, E)
    predictions: Predictions | None  # of the n live tokens where the model predicts tokens, else None
    live: Tensor  # (B, L) bool, False for padding


def run(model: nn.Module, batch: Batch) -> Outputs:
    """One forward pass on the model's device, without a cache; tokens that the attention mask hides are padding."""
    # Logits that a linear head makes of the last states are not made here: those of a text and a large vocabulary are
    # larger than many a model. Where a model does more with them, it makes them all, in a second pass.
    batch = to_device(batch, next((weight.device for weight in model.parameters()), torch.device("cpu")))
    names = inspect.signature(model.forward).parameters
    # Without the first option a decoder would cache every layer's keys, which training does not read.
    options = {name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if name in names}
    outputs = _pass(model, batch, options)
    states = tuple(outputs.hidden_states[1:])
    mask = batch.get("attention_mask")
    live = mask.bool() if mask is not None else states[-1].new_ones(states[-1].shape[:2], dtype=torch.bool)
    head = _head(model, outputs, states[-1]) if "logits_to_keep" in options else None
    if head is not None:
        return Outputs(states, Predictions(states[-1][live], head, _following(batch, live)), live)
    if options.pop("logits_to_keep", None):
        outputs = _pass(model, batch, options)
    logits = getattr(outputs, "logits", None)
    if logits is None or logits.shape[:2] != live.shape:
        return Outputs(states, None, live)
    # The logits of a model that does not generate are of the same token, not of the next.
    can_generate: Callable[[], bool] = getattr(model, "can_generate", lambda: False)
    following = _following(batch, live) if can_generate() else None
    return Outputs(states, Predictions(logits[live], None, following), live)


def _pass(model: nn.Module, batch: Batch, options: Mapping[str, Any]) -> Any:
    """The outputs of transformers' forward pass, states of tokens among them."""
    outputs = model(**batch, output_hidden_states=True, return_dict=True, **options)
    states = getattr(outputs, "hidden_states", None)
    if not states or states[-1].ndim != 3:
        raise ValueError(f"{type(model).__name__} gives no hidden states (B, L, E); give an encoder or a decoder")
    return outputs


def _head(model: nn.Module, outputs: Any, last: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Map from last states (B, L, E) to logits, if it reproduces the model's own (B, 1, V) for the last token."""
    head: Callable[[Tensor], Tensor] | None = getattr(model, "get_output_embeddings", lambda: None)()
    logits = getattr(outputs, "logits", None)
    if head is None or logits is None or logits.ndim != 3:
        return None
    with torch.no_grad():
        rebuilt = head(last[:, -1:])
    return head if rebuilt.shape == logits.shape and torch.allclose(rebuilt, logits, rtol=1e-4, atol=1e-4) else None


def _following(batch: Batch, live: Tensor) -> Tensor | None:
    """The token after each of the n live ones, `NONE` where there is none; None for batches without tokens."""
    tokens = batch.get("input_ids")
    if tokens is None:
        return None
    following = torch.full_like(tokens, NONE)
    following[:, :-1] = torch.where(live[:, 1:], tokens[:, 1:], NONE)
    return following[live]


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The batch's tensors on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def own_texts(batch: Batch, processes: Processes) -> Batch:
    """This process's rows of every tensor (B, …) of a batch."""
    if processes.size == 1:
        return batch
    return {name: x[processes.rank :: processes.size] for name, x in batch.items()}


def check_shared(batches: Iterable[Batch], processes: Processes) -> None:
    """Refuse batches that cannot be dealt out evenly."""
    if processes.size == 1:
        return
    for number, batch in enumerate(batches):
        rows = {name: len(x) for name, x in batch.items()}
        if len(set(rows.values())) > 1 or next(iter(rows.values())) % processes.size:
            raise ValueError(
                f"the texts of a step are dealt out to {processes.size} processes, and batch {number} has rows {rows}; "
                "give every tensor as many rows, a multiple of the processes (batch_size for texts)"
            )


@torch.no_grad()
def mean_loss(judged: Callable[[int], Tensor], number: int, processes: Processes) -> float:
    """The mean of a loss over so many texts, which processes share out, without gradients."""
    losses = processes.each(range(number), lambda text: float(judged(text)))
    return sum(losses) / len(losses)
