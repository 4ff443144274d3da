"""Run a softmax model once and keep some of what its layers attend with, in memory that does not grow with the samples.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), N kept tokens, D head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linattn.hf._attention_modules import AttentionModule
from linattn.hf._calls import InterfaceCall
from linattn.hf.interception import answering

# Tokens kept per layer, and between half of them and all where there were more: enough for means, moments and centres.
_MOST_TOKENS = 16384


class _Spread:
    """Every stride-th of the tokens that were added, the stride doubled whenever they become too many."""

    def __init__(self) -> None:
        # (1, H, N, D)
        self.tokens: Tensor | None = None
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
    """What the layer of one attention module attended with."""

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
        self._queries.add(live_tokens(query, key_mask))
        self._keys.add(live_tokens(key, key_mask))

    @property
    def scale(self) -> float:
        """The factor of q·k, as the model passed it."""
        assert self._scale is not None
        return self._scale

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Queries (1, H, N, D) and keys (1, Hkv, N, D), evenly spread over all samples."""
        query, key = self._queries.tokens, self._keys.tokens
        if query is None or key is None:
            raise ValueError(
                f"no sample made {self.module_name} attend; leave it out of `layers`, or give such samples"
            )
        if not query.shape[2] or not key.shape[2]:
            raise ValueError(f"every token of the samples is masked in {self.module_name}; give some that are not")
        return query, key


def observe(
    model: PreTrainedModel, modules: Iterable[AttentionModule], batches: Iterable[Mapping[str, Any]]
) -> dict[str, Observed]:
    """What these modules of a softmax model attend with, by name, in one forward pass per batch.

    The model's mode, gradients and attention are afterwards what they were.
    """
    found = {each.module: Observed(each.name) for each in modules}

    def answer(call: InterfaceCall) -> Tensor:
        """By softmax, after the call is added to what is observed."""
        observed = found.get(call.module)
        if observed is not None:
            call.refuse_options(observed.module_name, call.key.shape[-2])
            key_mask, _ = call.read_mask(observed.module_name)
            observed.add(call.query, call.key, key_mask, call.scale)
        return call.by_softmax()

    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad(), _evaluating(model), answering(model, answer):
        for batch in batches:
            own = {name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in batch.items()}
            model(**{**options, **own})
    return {observed.module_name: observed for observed in found.values()}


def live_tokens(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """The unpadded tokens of all samples in a row: (B, H, L, D) -> (1, H, N, D).

    Queries over other tokens than the keys' have no mask of their own.
    """
    tokens = x.transpose(1, 2)
    if key_mask is not None and x.shape[2] == key_mask.shape[1]:
        return tokens[key_mask].unsqueeze(0).transpose(1, 2)
    return tokens.flatten(0, 1).unsqueeze(0).transpose(1, 2)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and then each module's own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(False)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
