"""Fit the maps of kernels to the attention that a softmax model pays to samples.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, N tokens of all samples, D head width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from linattn.feature_maps import FeatureMap, FittedMap
from linattn.hf._attention_modules import AttentionModule, attention_modules
from linattn.hf.kernel_attention import KernelAttention, rescale_query
from linattn.hf.observing import Observed, observe
from linattn.planning import Plan
from linattn.planning.methods import fit

Sample = Mapping[str, Any] | Tensor
"""Keyword arguments of a model's forward pass, or a tensor (B, L) of input ids."""


def fit_maps(model: PreTrainedModel, maps: Mapping[str, FeatureMap], batches: Iterable[Mapping[str, Any]]) -> None:
    """Fit maps to the queries and keys that layers of a softmax model have on samples, each to its own layer's.

    Cost: a forward pass per batch, memory for at most 16384 tokens of each layer's queries and keys, and the fits.

    Args:
        model: not linearized; its mode, its gradients and its attention are afterwards what they were.
        maps: `FittedMap`s by the qualified name of their attention module; changed in place.
        batches: keyword arguments of the model's forward pass; padded tokens are left out.

    Raises:
        ValueError: if a layer asks for what no kernel can express, attends to no token of the samples or not at all.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from linattn.feature_maps import Expansion
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=2, intermediate_size=4)
        >>> feature_map = Expansion(2, num_centres=3)
        >>> batches = [{"input_ids": torch.tensor([[1, 2, 3, 4]])}]
        >>> fit_maps(BertModel(BertConfig(**sizes)), {"encoder.layer.0.attention.self": feature_map}, batches)
        >>> feature_map.centres.shape
        torch.Size([2, 3, 2])

    Source: the `fit` of each map.
    """
    modules = [found for found in attention_modules(model) if found.name in maps]
    for name, observed in observe(model, modules, batches).items():
        query, key = observed.tokens()
        with torch.no_grad():
            feature_map = maps[name].to(query.device)
            fit(feature_map, rescale_query(feature_map, query, observed.scale), key)


def calibrate_kernels(
    model: PreTrainedModel, kernels: Sequence[tuple[AttentionModule, KernelAttention]], batches: Iterable[Sample]
) -> None:
    """Fit the maps that take statistics, each to what its own layer attends with."""
    fitted = [(found, kernel) for found, kernel in kernels if isinstance(kernel.feature_map, FittedMap)]
    if not fitted:
        names = ", ".join(sorted({repr(kernel.feature_map) for _, kernel in kernels}))
        raise ValueError(f"there is nothing to calibrate: {names} takes no statistics of samples; leave calibrate out")
    if len({kernel.feature_map for _, kernel in fitted}) < len(fitted):
        raise ValueError(
            "several layers have one map, which cannot be fitted to each of them; let the function build one per call"
        )
    fit_maps(model, {found.name: kernel.feature_map for found, kernel in fitted}, _checked(batches))


def calibrate_plans(
    model: PreTrainedModel, plans: Sequence[tuple[AttentionModule, Plan]], batches: Iterable[Sample]
) -> list[Plan]:
    """The plans with fitted maps, each on what its own layer attends with; those fitted already stay as they are."""
    open_plans = {found.name: (found, plan) for found, plan in plans if _takes_samples(plan)}
    if not open_plans:
        raise ValueError(
            "there is nothing to calibrate: no plan has a map that takes statistics of samples and has none yet; leave "
            "calibrate out"
        )
    observed = observe(model, [found for found, _ in open_plans.values()], _checked(batches))
    return [_fitted_plan(plan, observed[found.name]) if found.name in open_plans else plan for found, plan in plans]


def _takes_samples(plan: Plan) -> bool:
    """Whether a plan has maps to be fitted, and no tensors of theirs."""
    return not plan.fitted and any(isinstance(feature_map, FittedMap) for _, feature_map in plan.build().values())


def _fitted_plan(plan: Plan, observed: Observed) -> Plan:
    """The plan with maps fitted to one layer's queries, at the temperature the plan was made for, and keys."""
    query, key = observed.tokens()
    with torch.no_grad():
        return plan.fit(query if observed.scale == plan.scale else query * (observed.scale / plan.scale), key)


def _checked(batches: Iterable[Sample]) -> Iterator[Mapping[str, Any]]:
    """Each batch as keyword arguments, or an error."""
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"calibrate must be an iterable of batches, got {type(batches).__name__}; put a single batch into a list"
        )
    number = -1
    for number, batch in enumerate(batches):
        if isinstance(batch, Tensor):
            if batch.ndim != 2 or batch.is_floating_point():
                raise ValueError(
                    f"calibrate[{number}] is a tensor of {batch.dtype} and shape {tuple(batch.shape)}, wanted input "
                    "ids, integers of shape (B, L); give other inputs by name, as in {'input_ids': …}"
                )
            yield {"input_ids": batch}
        elif isinstance(batch, Mapping):
            yield batch
        else:
            raise TypeError(
                f"calibrate[{number}] is {type(batch).__name__}, wanted a mapping of the model's inputs, as a "
                "tokenizer returns, or a tensor of input ids"
            )
    if number < 0:
        raise ValueError("calibrate holds no batches; give some that are like what the model will read")
