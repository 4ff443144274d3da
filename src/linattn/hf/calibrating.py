"""Fit maps to the queries and keys that a softmax model has on samples.

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
from linattn.hf.layer_attention import LayerAttention, rescale_query
from linattn.hf.observing import Observed, observe
from linattn.planning import Plan
from linattn.planning.methods import fit

Sample = Mapping[str, Any] | Tensor
"""Keyword arguments of a model's forward pass, or a tensor (B, L) of input ids."""


def fit_maps(model: PreTrainedModel, maps: Mapping[str, FeatureMap], batches: Iterable[Mapping[str, Any]]) -> None:
    """Fit maps, by the name of their attention module and in place, to what a softmax model attends with on batches."""
    modules = [found for found in attention_modules(model) if found.name in maps]
    for name, observed in observe(model, modules, batches).items():
        query, key = observed.tokens()
        with torch.no_grad():
            feature_map = maps[name].to(query.device)
            fit(feature_map, rescale_query(feature_map, query, observed.scale), key)


def calibrate_maps(
    model: PreTrainedModel, attentions: Sequence[tuple[AttentionModule, LayerAttention]], batches: Iterable[Sample]
) -> None:
    """Fit the maps that take statistics, each to what its own layer attends with."""
    maps = {found.name: attention.feature_map for found, attention in attentions}
    fitted: dict[str, FeatureMap] = {name: each for name, each in maps.items() if isinstance(each, FittedMap)}
    if not fitted:
        names = ", ".join(sorted(set(map(repr, maps.values()))))
        raise ValueError(f"there is nothing to calibrate: {names} takes no statistics of samples; leave calibrate out")
    if len(set(fitted.values())) < len(fitted):
        raise ValueError(
            "several layers have one map, which cannot be fitted to each of them; let the function build one per call"
        )
    fit_maps(model, fitted, _checked(batches))


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
    """True if a plan has maps to be fitted, and no tensors of theirs."""
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
