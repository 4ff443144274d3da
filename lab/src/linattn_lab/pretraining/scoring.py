"""How many bits a model of bytes takes for a byte, over the context it has.

Letters: B batch, L bytes of context, V = 256.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from linattn.hf import LinearLMForCausalLM

UNIFORM = 8.0
"""Bits of a byte that is any of 256 with the same probability."""
# Of windows that are scored together, if one has fewer: a call costs as much for sixteen bytes as for some thousands.
_PASS_BYTES = 1 << 12


@dataclass(frozen=True)
class Score:
    """Bits per byte on windows of a text.

    Attributes:
        bits: the mean over all bytes.
        standard_error: of that mean, windows taken as independent.
        by_position: triples (first, end, bits): the mean over the bytes that have first … end − 1 bytes before them.
        num_bytes: how many bytes were predicted.
    """

    bits: float
    standard_error: float
    by_position: tuple[tuple[int, int, float], ...]
    num_bytes: int


def windows(text: Tensor, context: int, num_bytes: int) -> Tensor:
    """Windows (n, L + 1) of a text (uint8), evenly spread and without overlap, of `num_bytes` bytes at most."""
    most = len(text) // (context + 1)
    count = max(1, min(most, num_bytes // context))
    starts = [number * most // count * (context + 1) for number in range(count)]
    return torch.stack([text[start : start + context + 1] for start in starts]).long()


def bits_per_byte(model: LinearLMForCausalLM, batch: Tensor) -> Tensor:
    """−log₂ p(byte | bytes before it in the window) of windows (B, L + 1): (B, L).

    Cost: one forward pass.
    """
    batch = batch.to(model.device)
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    nats: Tensor = cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none")
    return nats.view(batch[:, 1:].shape) / math.log(2)


def score(model: LinearLMForCausalLM, batch: Tensor) -> Score:
    """The bits per byte of a model on windows (n, L + 1), by octaves of the position too."""
    found = bits(model, batch)
    means = found.mean(1)
    length = found.shape[1]
    error = float(means.std() / math.sqrt(len(means))) if len(means) > 1 else math.nan
    octaves = tuple((first, end, float(found[:, first:end].mean())) for first, end in _octaves(length))
    return Score(float(found.mean()), error, octaves, found.numel())


def bits(model: LinearLMForCausalLM, batch: Tensor) -> Tensor:
    """`bits_per_byte` without gradients, some windows a pass, of windows (n, L + 1): (n, L), float64, on the CPU."""
    length = batch.shape[1] - 1
    found = [batch.new_zeros(0, length).double()]
    with torch.no_grad():
        passes = batch.split(max(1, _PASS_BYTES // length))
        found += [bits_per_byte(model, some).double().cpu() for some in passes if len(some)]
    return torch.cat(found)


def frequency_bits(training: Tensor, text: Tensor) -> float:
    """Bits per byte of a text under the training bytes' frequencies, a count of one added to each."""
    counts = torch.bincount(training, minlength=256).double() + 1
    return float(-(counts / counts.sum()).log2()[text.long()].mean())


def _octaves(length: int) -> Sequence[tuple[int, int]]:
    """0–63, 64–127, 128–255, … of `length` positions."""
    edges = [0, *(64 << number for number in range(length.bit_length()) if 64 << number < length), length]
    return list(pairwise(edges))
