"""What an audit records of a model: the calls of the layers that linear attention would replace."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from linattn.hf import Capture, PreTrainedModel, capture
from linattn.hf.linearization import global_layers


def record(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Capture:
    """The attention of a model to one unpadded text, in the layers that attend to all of it.

    Layers with a sliding window are left out beside others, as `linearize_` leaves them their softmax, also where the
    text fits in their window.

    Raises:
        ValueError: as `linattn.hf.capture`; also if a layer is not self-attention over one unpadded text.

    Example:
        >>> import torch
        >>> from transformers import MistralConfig, MistralModel
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
        >>> model = MistralModel(MistralConfig(**sizes, num_key_value_heads=1, sliding_window=3)).eval()
        >>> len(record(model, {"input_ids": torch.tensor([[1, 2, 3]])}).calls)  # the text fits in the only window
        1
    """
    found, recorded = global_layers(model), capture(model, inputs)
    replaced = {layer.module_name for layer in found.replaced}
    calls = tuple(call for call in recorded.calls if call.module_name in replaced)
    for call in calls:
        if call.key_mask is not None or call.query.shape[2] != call.key.shape[2]:
            raise ValueError(f"{call.module_name} is not self-attention over one unpadded text; audit another model")
    return recorded._replace(calls=calls, windowed=tuple(layer.module_name for layer in found.kept))
