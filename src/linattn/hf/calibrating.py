"""Fit maps to queries and keys on samples, in memory that does not grow with them; letters as in hf/__init__.py."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.feature_maps import FittedMap
from linattn.hf._attention_modules import attention_modules
from linattn.hf._calls import SINKS, InterfaceCall
from linattn.hf._probing import on_device
from linattn.hf.interception import answering
from linattn.hf.layer_attention import Attending, rescale_query

Sample = Mapping[str, Any] | Tensor
"""Keyword arguments of a model's forward pass, or a tensor (B, L) of input ids."""
Batches = Iterable[Mapping[str, Any]]

# Tokens kept per layer, and between half of them and all where there were more: enough for means, moments and centres.
_MOST_TOKENS = 16384


def fit_maps(model: PreTrainedModel, maps: Mapping[str, FittedMap], batches: Batches) -> None:
    """Fit maps, by the name of their attention module and in place, to what a softmax model attends with on batches."""
    observations = {part.module: Observed(part.name) for part in attention_modules(model) if part.name in maps}

    def answer(call: InterfaceCall) -> Tensor:
        """By its own attention, after the call is added to what is observed."""
        if (observed := observations.get(call.module)) is not None:
            key_mask, _ = call.read_mask(observed.module_name, call.key.shape[-2], takes=(SINKS,))
            observed.add(call.query, call.key, key_mask, call.scale)
        return call.by_former()[0]

    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        with evaluating(model), answering(model, answer):
            for batch in batches:
                model(**{**options, **on_device(batch, model)})
        for observed in observations.values():
            query, key, scale = observed.tokens()
            feature_map = maps[observed.module_name].to(query.device)
            feature_map.fit(rescale_query(feature_map, query, scale), key)


def calibrate_maps(model: PreTrainedModel, attentions: Sequence[Attending], batches: Batches) -> None:
    """Fit the maps that take statistics, each to what its own layer attends with."""
    maps = {part.name: attention.feature_map for part, attention in attentions}
    fitted = {name: each for name, each in maps.items() if isinstance(each, FittedMap)}
    if not fitted:
        names = ", ".join(sorted({attention.summary for _, attention in attentions}))
        raise ValueError(f"there is nothing to calibrate: {names} takes no statistics of samples; leave calibrate out")
    if len(set(fitted.values())) < len(fitted):
        raise ValueError(
            "several layers have one map, which cannot be fitted to each of them; let the function build one per call"
        )
    fit_maps(model, fitted, batches)


def first_sample(batches: Iterable[Sample] | None) -> tuple[Mapping[str, Any] | None, Batches | None]:
    """The first batch as keyword arguments, None where there is none, and all batches."""
    if batches is None:
        return None, None
    checked = _checked(batches)
    first = next(checked)
    return first, chain([first], checked)


def _checked(batches: Iterable[Sample]) -> Iterator[Mapping[str, Any]]:
    """Each batch as keyword arguments, or an error."""
    if isinstance(batches, Mapping | Tensor | str) or not isinstance(batches, Iterable):
        raise TypeError(
            f"calibrate must be an iterable of batches, got {type(batches).__name__}; put a single batch into a list"
        )
    number = -1
    for number, batch in enumerate(batches):
        name = f"calibrate[{number}]"
        if not isinstance(batch, Mapping | Tensor):
            raise TypeError(
                f"{name} is {type(batch).__name__}, wanted a mapping of the model's inputs, as a tokenizer returns, or "
                "a tensor of input ids"
            )
        if isinstance(batch, Tensor) and (batch.ndim != 2 or batch.is_floating_point()):
            raise ValueError(
                f"{name} is a tensor of {batch.dtype} and shape {tuple(batch.shape)}, wanted input ids, integers of "
                "shape (B, L); give other inputs by name, as in {'input_ids': …}"
            )
        yield {"input_ids": batch} if isinstance(batch, Tensor) else batch
    if number < 0:
        raise ValueError("calibrate holds no batches; give some that are like what the model will read")


class _Spread:
    """Every stride-th of the tokens that were added, the stride doubled whenever they become too many."""

    def __init__(self) -> None:
        self.tokens: Tensor | None = None  # (1, H, N, D)
        self._stride, self._seen = 1, 0

    def add(self, x: Tensor) -> None:
        """(1, H, N, D): the next tokens."""
        while -(-(self._seen + x.shape[2]) // self._stride) > _MOST_TOKENS:
            self._stride *= 2
            self.tokens = None if self.tokens is None else self.tokens[:, :, ::2].clone()
        new = x[:, :, -self._seen % self._stride :: self._stride]
        self.tokens = new.clone() if self.tokens is None else torch.cat((self.tokens, new), 2)
        self._seen += x.shape[2]


class Observed:
    """Queries and keys that one attention module attended with, and its scale."""

    def __init__(self, module_name: str) -> None:
        self.module_name = module_name
        self._scale: float | None = None
        self._queries, self._keys = _Spread(), _Spread()

    def add(self, query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float) -> None:
        """One call: its unpadded tokens."""
        if self._scale not in (None, scale):
            raise ValueError(
                f"{self.module_name} attends at scale {self._scale} and then at {scale}; a map is fitted at one, so "
                "leave this layer its softmax"
            )
        self._scale = scale
        self._queries.add(_live_tokens(query, key_mask))
        self._keys.add(_live_tokens(key, key_mask))

    def tokens(self) -> tuple[Tensor, Tensor, float]:
        """Queries (1, H, N, D) and keys (1, Hkv, N, D), evenly spread over all samples, and the factor of q·k."""
        query, key = self._queries.tokens, self._keys.tokens
        if query is None or key is None or self._scale is None:
            raise ValueError(
                f"no sample made {self.module_name} attend; leave it out of `layers`, or give such samples"
            )
        if not query.shape[2] or not key.shape[2]:
            raise ValueError(f"every token of the samples is masked in {self.module_name}; give some that are not")
        return query, key, self._scale


def _live_tokens(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """The unpadded tokens of all samples in a row: (B, H, L, D) -> (1, H, N, D)."""
    tokens = x.transpose(1, 2)
    # Queries over other tokens than the keys' have no mask of their own.
    if key_mask is not None and x.shape[2] == key_mask.shape[1]:
        return tokens[key_mask].unsqueeze(0).transpose(1, 2)
    return tokens.flatten(0, 1).unsqueeze(0).transpose(1, 2)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and then each module's own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(False)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
