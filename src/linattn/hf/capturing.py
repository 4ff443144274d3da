"""Record the queries, keys and values of every layer, and prove that they are the model's whole attention.

Letters: B batch, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linattn.hf.interception import AttentionCall, intercept


class Capture(NamedTuple):
    """What `capture` returns.

    Attributes:
        calls: one per layer, in the order of the forward pass; tensors detached, contiguous and the caller's own.
        output: the model's first output under its own attention; (B, L, width) last hidden states for base models.
    """

    calls: tuple[AttentionCall, ...]
    output: Tensor


def capture(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Capture:
    """The queries, keys and values of every layer of one forward pass.

    softmax(scale · q·k) v, computed from what was recorded, must give the model's own output: this is checked, so that
    a misread mask, scale or position is an error here and not a wrong figure later.

    Cost: two forward passes without gradients; memory for q, k, v of all layers.

    Args:
        model: a transformers model that `intercept` accepts, in evaluation mode.
        inputs: its keyword arguments, such as a tokenizer returns.

    Returns:
        A `Capture`.

    Raises:
        ValueError: as `intercept`; also if the model is in training mode.
        RuntimeError: if exact attention on the recorded tensors differs from the model's own output by more than half
            the digits of its dtype, relative to the output's norm.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=4)
        >>> recorded = capture(BertModel(BertConfig(**sizes)).eval(), {"input_ids": torch.tensor([[1, 2, 3]])})
        >>> [tuple(call.key.shape) for call in recorded.calls], tuple(recorded.output.shape)
        ([(1, 2, 3, 2), (1, 2, 3, 2)], (1, 3, 4))

    Source: transformers' documentation, "Attention interface".
    """
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode; call model.eval() first, or dropout is recorded")
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> Tensor:
        """Keep the call, answer exactly."""
        own = {name: getattr(call, name).detach().contiguous().clone() for name in ("query", "key", "value")}
        calls.append(replace(call, **own))
        return call.softmax()

    with torch.no_grad():
        output: Tensor = model(**inputs)[0]
        with intercept(model, record):
            rebuilt: Tensor = model(**inputs)[0]
    _check_rebuilt(model, output, rebuilt, inputs.get("attention_mask"))
    return Capture(tuple(calls), output)


def _check_rebuilt(model: PreTrainedModel, output: Tensor, rebuilt: Tensor, padding: Tensor | None) -> None:
    """Refuse a recording that does not explain the model; padded positions carry no meaning and are left out."""
    if padding is not None:
        output, rebuilt = output[padding.bool()], rebuilt[padding.bool()]
    difference = float((rebuilt.double() - output.double()).norm() / output.double().norm())
    allowed = torch.finfo(output.dtype).eps ** 0.5
    if not difference <= allowed:
        raise RuntimeError(
            f"exact attention on the recorded queries, keys and values of {type(model).__name__} differs from its own "
            f"output by {difference:.1e} of its norm, more than {allowed:.1e}: its attention is more than "
            "softmax(scale · q·k) v, and no figure measured on it would be right"
        )
