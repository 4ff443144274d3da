"""Whether a conversion pays: the model's time beside the original's, its state beside the cache of L exact tokens."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from linattn.convert.running import Batch, run
from linattn.convert.transfer import texts
from linattn.hf import AttentionCall, LayerAttention
from linattn.methods.measures import exact_state_numbers, map_state_numbers, seconds

_REPEATS = 3
# Exact attention over more takes minutes.
_MOST_TOKENS = 65_536


@dataclass(frozen=True)
class Speed:
    """Forward passes over one batch of texts, a model's and the original's in turn.

    Attributes:
        batch_size: texts of the batch.
        num_tokens: their length, padding included.
        seconds: of the converted model's passes.
        exact_seconds: of the original model's.
        threads: torch's threads.
        device: where the models were.
    """

    batch_size: int
    num_tokens: int
    seconds: tuple[float, ...]
    exact_seconds: tuple[float, ...]
    threads: int
    device: str

    @property
    def ratio(self) -> float:
        """The converted model's time over the original's, medians."""
        return statistics.median(self.seconds) / statistics.median(self.exact_seconds)


def measure_speed(model: nn.Module, original: nn.Module, batch: Batch) -> Speed:
    """Time both models on a batch: three passes each after a warm-up, without gradients."""
    with torch.no_grad():
        live = run(original, batch).live
        models = {"linear": model, "exact": original}
        passes = {name: partial(_finished, partial(run, one, batch)) for name, one in models.items()}
        durations = seconds(passes, repeats=_REPEATS)
    size, length = live.shape
    times = tuple(durations["linear"]), tuple(durations["exact"])
    return Speed(size, length, *times, torch.get_num_threads(), live.device.type)


@dataclass(frozen=True)
class Paying:
    """Numbers that a converted layer keeps beside those of the exact cache.

    Attributes:
        num_tokens: L, of the exact cache.
        state_numbers: numbers that a key/value head keeps.
        exact_numbers: numbers of the exact cache for it.
        is_causal: whether the state is kept between calls; an encoder keeps none.
    """

    num_tokens: int
    state_numbers: int
    exact_numbers: int
    is_causal: bool

    @property
    def saves_memory(self) -> bool:
        """Whether the state is kept between calls, and smaller than the exact cache."""
        return self.is_causal and self.state_numbers < self.exact_numbers


def count_numbers(attention: LayerAttention, call: AttentionCall, num_tokens: int) -> Paying:
    """The numbers of one converted layer, for texts of so many tokens."""
    assert attention.feature_map is not None
    head_dim, value_dim = call.key.shape[-1], call.value.shape[-1]
    state_numbers = map_state_numbers(attention.feature_map, value_dim=value_dim, window=attention.window)
    exact_numbers = exact_state_numbers(num_tokens, head_dim=head_dim, value_dim=value_dim)
    return Paying(num_tokens, state_numbers, exact_numbers, call.is_causal)


def is_faster(attention: LayerAttention, call: AttentionCall, num_tokens: int) -> bool:
    """Whether one converted layer is faster than softmax, on its tokens repeated to a length."""
    length = min(num_tokens, _MOST_TOKENS)
    query, key, value = (x.repeat(1, 1, -(-length // x.shape[2]), 1)[:, :, :length] for x in texts(call)[0])
    longer = replace(call, query=query, key=key, value=value, key_mask=None)
    linear = partial(attention, query, key, value, scale=call.scale, is_causal=call.is_causal)
    contenders = {"linear": partial(_finished, linear), "exact": partial(_finished, longer.softmax)}
    with torch.no_grad():
        durations = seconds(contenders, repeats=_REPEATS)
    return statistics.median(durations["linear"]) < statistics.median(durations["exact"])


def _finished(answer: Callable[[], object]) -> None:
    """Wait for an answer, on whichever device."""
    answer()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
