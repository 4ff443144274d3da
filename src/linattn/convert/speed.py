"""Whether a conversion pays: the model's time beside the original's, its state, and from which length it is faster.

Letters: B batch, H query heads, Hkv key/value heads, L tokens, D head width, Dv value width.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from linattn.convert.calibration import texts
from linattn.convert.running import Batch, run
from linattn.hf import AttentionCall, LayerAttention
from linattn.methods.costs import exact_state_numbers, map_state_numbers, seconds
from linattn.methods.crossover import Crossover, find_crossover, time_lengths

_REPEATS = 3


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
        """The converted model's time over the original's, medians.

        Example:
            >>> Speed(4, 512, (3.0, 1.0, 2.0), (4.0, 4.0, 4.0), 2, "cpu").ratio
            0.5
        """
        return statistics.median(self.seconds) / statistics.median(self.exact_seconds)


def measure_speed(model: nn.Module, original: nn.Module, batches: Sequence[Batch]) -> Speed:
    """Time both models on the longest batch: three passes each after a warm-up, without gradients."""
    with torch.no_grad():
        batch = max(batches, key=lambda one: run(original, one).live.shape[1])
        live = run(original, batch).live
        passes = {name: partial(_finished, one, batch) for name, one in (("linear", model), ("exact", original))}
        durations = seconds(passes, repeats=_REPEATS)
    size, length = live.shape
    times = tuple(durations["linear"]), tuple(durations["exact"])
    return Speed(size, length, *times, torch.get_num_threads(), live.device.type)


@dataclass(frozen=True)
class Paying:
    """Numbers that a converted layer keeps beside the exact cache's, and times of its attention beside softmax's.

    Attributes:
        num_tokens: L, of the exact cache.
        state_numbers: numbers that a key/value head keeps.
        exact_numbers: numbers of the exact cache for it.
        lengths: at which the layer's attention was timed, ascending.
        seconds: of its calls, medians.
        exact_seconds: of softmax.
        longest: tokens that the model takes at most; None where its configuration does not say.
        is_causal: whether the state is kept between calls; an encoder keeps none.
    """

    num_tokens: int
    state_numbers: int
    exact_numbers: int
    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    exact_seconds: tuple[float, ...]
    longest: int | None
    is_causal: bool

    @property
    def saves_memory(self) -> bool:
        """Whether the state is kept between calls, and smaller than the exact cache."""
        return self.is_causal and self.state_numbers < self.exact_numbers

    @property
    def crossover(self) -> Crossover:
        """From which length on the layer is faster."""
        return find_crossover(list(zip(self.lengths, self.seconds, self.exact_seconds, strict=True)))

    def is_faster_at(self, num_tokens: int) -> bool:
        """Whether the layer is faster than softmax at a length, as far as was timed."""
        crossover = self.crossover
        return crossover.always or (crossover.length is not None and crossover.length <= num_tokens)


def measure_paying(
    attention: LayerAttention, call: AttentionCall, *, num_tokens: int, longest: int | None
) -> Paying | None:
    """One converted layer's state and times, on what the layer was given; None where queries and keys differ."""
    tokens = texts(call)[0]
    query, key, value = tokens
    if query.shape[2] != key.shape[2]:
        return None
    exact = exact_state_numbers(num_tokens, head_dim=key.shape[-1], value_dim=value.shape[-1])
    assert attention.feature_map is not None
    state_numbers = map_state_numbers(attention.feature_map, value_dim=value.shape[-1], window=attention.window)
    times = time_lengths(
        partial(attention, scale=call.scale, is_causal=call.is_causal),
        lambda q, k, v: replace(call, query=q, key=k, value=v, key_mask=None).softmax(),
        tokens,
    )
    return Paying(num_tokens, state_numbers, exact, *times, longest, call.is_causal)


def _finished(model: nn.Module, batch: Batch) -> None:
    """A pass, waited for."""
    if run(model, batch).live.is_cuda:
        torch.cuda.synchronize()
