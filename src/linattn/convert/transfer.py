"""Attention transfer: maps that learn are trained until their attention rows are the exact ones.

Letters: B batch, H query heads, L tokens, n chosen queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from linattn.attention import attention_rows
from linattn.convert.calibration import record, texts
from linattn.convert.losses import row_divergence
from linattn.convert.running import own_texts
from linattn.convert.samples import Samples
from linattn.feature_maps import FeatureMap
from linattn.hf import AttentionCall, LayerReport, PreTrainedModel
from linattn.hf.layer_attention import rescale_query
from linattn.methods.measures import softmax_log_rows, visible_keys
from linattn.processes import Processes
from linattn.training import Seconds, Training

# Rows of each text that a step looks at.
_ROWS = 128


def transfer(
    student: nn.Module,
    maps: Sequence[FeatureMap],
    layers: Sequence[LayerReport],
    teacher: PreTrainedModel,
    samples: Samples,
    *,
    seconds: float,
    learning_rate: float,
) -> Training:
    """The training of all layers' maps at once, each on its own layer's queries and keys in the original model.

        Σ over layers of  mean over rows of  KL(exact row ‖ the map's row)

    Rows are those of the map alone, without the exact part beside it.

    Source: Zhang et al. 2024 (arXiv 2402.04347), section 3.
    """
    processes = Processes.of_this_run()

    @cache
    def kept(number: int) -> dict[str, AttentionCall]:
        """The teacher's calls on a validation text, which are recorded once."""
        return record(teacher, samples.validation[number])

    def judged(number: int) -> float:
        """The loss on a validation text."""
        with torch.no_grad():
            return float(_loss(maps, layers, kept(number), 0))

    def validate() -> float:
        """The loss on the validation texts."""
        losses = processes.each(range(len(samples.validation)), judged)
        return sum(losses) / len(losses)

    def loss(step: int) -> Tensor:
        """The loss of a step, on this process's texts."""
        return _loss(maps, layers, record(teacher, own_texts(samples.training(step), processes)), step)

    parameters = [parameter for feature_map in maps for parameter in feature_map.parameters()]
    return Training(
        name="transfer",
        model=student,
        parameters=[(parameters, learning_rate)],
        loss=loss,
        validate=validate,
        budget=Seconds(seconds),
    )


def _loss(
    maps: Sequence[FeatureMap], layers: Sequence[LayerReport], calls: dict[str, AttentionCall], step: int
) -> Tensor:
    """The sum over layers."""
    named = zip(maps, layers, strict=True)
    return torch.stack([_layer_loss(feature_map, calls[layer.module_name], step) for feature_map, layer in named]).sum()


def _layer_loss(feature_map: FeatureMap, call: AttentionCall, step: int) -> Tensor:
    """The divergence of evenly spread rows; with padding the mean over texts, each as if it came alone."""
    if call.key_mask is None:
        return _row_loss(feature_map, call, call.query, call.key, step)
    return torch.stack([_row_loss(feature_map, call, query, key, step) for query, key, _ in texts(call)]).mean()


def _row_loss(feature_map: FeatureMap, call: AttentionCall, query: Tensor, key: Tensor, step: int) -> Tensor:
    """The mean divergence of evenly spread rows, others at every step."""
    length, num_keys = query.shape[2], key.shape[2]
    stride = -(-length // _ROWS)
    index = torch.arange(step % stride, length, stride, device=query.device)
    tempered_query = rescale_query(feature_map, query, call.scale)
    rows = attention_rows(tempered_query, key, feature_map, index, is_causal=call.is_causal, enable_gqa=True)
    visible = visible_keys(index, num_queries=length, num_keys=num_keys, is_causal=call.is_causal)
    exact = softmax_log_rows(query[:, :, index], key, visible, scale=call.scale)
    return row_divergence(exact.to(rows.dtype), rows)
