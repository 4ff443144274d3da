"""Maps fitted to a model's attention, and trained until their rows are its own; letters as in convert/__init__.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from linattn.attention import attention_rows
from linattn.convert.running import Batch, mean_loss, own_texts, to_device
from linattn.convert.samples import Samples
from linattn.feature_maps import FeatureMap, FittedMap
from linattn.hf import AttentionCall, LayerReport, PreTrainedModel, calibrating
from linattn.hf.interception import recorded
from linattn.hf.layer_attention import rescale_query
from linattn.methods.measures import softmax_log_rows, visible_keys
from linattn.methods.method import Method
from linattn.processes import Processes
from linattn.training import Seconds, Training

# Rows of each text that a step looks at.
_ROWS = 128


def record(model: PreTrainedModel, batch: Batch) -> dict[str, AttentionCall]:
    """The attention calls of one forward pass by module name: `linattn.hf.capture` without its check."""
    return {call.module_name: call for call in recorded(model, to_device(batch, model.device))[0]}


def build_maps(
    methods: Sequence[Method],
    layers: Sequence[LayerReport],
    calls: dict[str, AttentionCall],
    *,
    num_features: int | None,
    seed: int,
) -> list[FeatureMap]:
    """Every layer's map by its method, drawn from seed + layer, on its call's device and trainable; not yet fitted."""
    maps = []
    for method, layer in zip(methods, layers, strict=True):
        call = calls[layer.module_name]
        width, heads = call.query.shape[-1], call.key.shape[1]
        drawn = {"scale": width**-0.5, "seed": seed + layer.layer, "num_heads": heads}
        feature_map = method.build_map(width, num_features=num_features, **drawn)
        maps.append(feature_map.to(call.query.device).requires_grad_(True))
    return maps


def fit_maps(
    maps: Sequence[FeatureMap], layers: Sequence[LayerReport], model: PreTrainedModel, batches: Sequence[Batch]
) -> None:
    """Fit maps that take statistics, in place, dealt out to processes, to their layer's unpadded queries and keys."""
    named = zip(layers, maps, strict=True)
    fitted = {layer.module_name: feature_map for layer, feature_map in named if isinstance(feature_map, FittedMap)}
    processes, names = Processes.of_this_run(), list(fitted)
    if share := {name: fitted[name] for name in names[processes.rank :: processes.size]}:
        calibrating.fit_maps(model, share, batches)
    for name, state in zip(names, processes.each(names, lambda name: fitted[name].state_dict()), strict=True):
        if name not in share:
            fitted[name].load_state_dict(state)


def texts(call: AttentionCall) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value of each row of a batch, without its padding."""
    rows = []
    for row in range(len(call.query)):
        live = slice(None) if call.key_mask is None else call.key_mask[row]
        query = call.query[row : row + 1]
        # Queries of another text than the keys have no padding that is known of.
        if query.shape[2] == call.key.shape[2]:
            query = query[:, :, live]
        rows.append((query, call.key[row : row + 1, :, live], call.value[row : row + 1, :, live]))
    return rows


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
    """The training of all layers' maps at once, each on its own layer's queries and keys in the original model."""
    # Zhang et al. 2024 (arXiv 2402.04347), section 3.
    processes = Processes.of_this_run()

    @cache
    def kept(number: int) -> dict[str, AttentionCall]:
        return record(teacher, samples.validation[number])

    def judged(number: int) -> Tensor:
        return _loss(maps, layers, kept(number), 0)

    def loss(step: int) -> Tensor:
        return _loss(maps, layers, record(teacher, own_texts(samples.training(step), processes)), step)

    parameters = [parameter for feature_map in maps for parameter in feature_map.parameters()]
    return Training(
        name="transfer",
        model=student,
        parameters=[(parameters, learning_rate)],
        loss=loss,
        validate=lambda: mean_loss(judged, len(samples.validation), processes),
        budget=Seconds(seconds),
    )


def row_divergence(log_exact: Tensor, weights: Tensor) -> Tensor:
    """Mean of KL(p‖a) over attention rows a (B, H, n, L) beside exact ones, ln p; -inf for keys not attended to."""
    attended = log_exact > -torch.inf
    # A weight that underflowed counts as the smallest normal number, and gets no gradient.
    log_weights = weights.clamp(min=torch.finfo(weights.dtype).tiny).log()
    # An absent pair is 0, not 0·(-inf): nan would follow it through the gradient.
    difference = torch.where(attended, log_exact, 0) - torch.where(attended, log_weights, 0)
    return (log_exact.exp() * difference).sum(-1).mean()


def _loss(
    maps: Sequence[FeatureMap], layers: Sequence[LayerReport], calls: dict[str, AttentionCall], step: int
) -> Tensor:
    """The sum over layers; of a layer with padding the mean over texts, each as if it came alone."""
    losses = []
    for feature_map, layer in zip(maps, layers, strict=True):
        call = calls[layer.module_name]
        pairs = [(call.query, call.key)] if call.key_mask is None else [(q, k) for q, k, _ in texts(call)]
        divergences = [_row_loss(feature_map, call, query, key, step) for query, key in pairs]
        losses.append(torch.stack(divergences).mean())
    return torch.stack(losses).sum()


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
