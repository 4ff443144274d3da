"""A language model that reads a text in chunks through a KV cache, and writes on; letters as in __init__.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from linattn.hf import Cache, PreTrainedModel


class Reading(NamedTuple):
    """What a model predicts after the last tokens of a text."""

    logs: Tensor  # (n, V), logarithms of the next token's probabilities, at least float32
    seconds: float  # of reading the text, without the output layer, which a prompt needs at its last token alone


class Writing(NamedTuple):
    """What a model writes."""

    tokens: Tensor  # (n,), each the likeliest
    seconds: float  # of writing all but the first, which the text gives


def read(model: PreTrainedModel, tokens: Tensor, cache: Cache, *, last: int, chunk: int) -> Reading:
    """Read a text chunk by chunk, as a long prompt is: the cache is bounded within the prefill already."""
    length, parts, seconds = tokens.shape[1], [], 0.0
    with _timed(cast(Any, model).get_output_embeddings()) as outputs:
        for start in range(0, length, chunk):
            stop, begin = min(start + chunk, length), time.perf_counter()
            count = stop - max(start, length - last)
            logits = _logits(model, tokens[:, start:stop], cache, max(count, 1))
            seconds += time.perf_counter() - begin
            if count > 0:
                parts.append(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    logs = torch.cat(parts)
    # In place: two copies of so many numbers would not fit beside a model everywhere.
    return Reading(logs.sub_(logs.logsumexp(-1, keepdim=True)), seconds - sum(outputs))


def write(model: PreTrainedModel, first: Tensor, cache: Cache, count: int) -> Writing:
    """Go on greedily for a number of tokens."""
    tokens, begin = [first.argmax()], time.perf_counter()
    for _ in range(count - 1):
        tokens.append(_logits(model, tokens[-1].view(1, 1), cache, 1)[0].argmax())
    written = torch.stack(tokens)
    return Writing(written, time.perf_counter() - begin)


def same_beginning(first: Tensor, second: Tensor) -> int:
    """How many tokens two texts have in common before they part."""
    most = min(len(first), len(second))
    return int((first[:most] == second[:most]).long().cumprod(0).sum())


@contextmanager
def _timed(module: nn.Module | None) -> Iterator[list[float]]:
    """Seconds that sum up to those of a module's calls; none where a model has no such module."""
    seconds: list[float] = []
    hooks = [] if module is None else [module.register_forward_hook(lambda *_: seconds.append(time.perf_counter()))]
    if module is not None:
        hooks.append(module.register_forward_pre_hook(lambda *_: seconds.append(-time.perf_counter())))
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def _logits(model: PreTrainedModel, tokens: Tensor, cache: Cache, count: int) -> Tensor:
    """Logits (count, V) after the last of some new tokens."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=count).logits[0]
    return logits
