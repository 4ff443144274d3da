"""Figure 3 of the Performer paper: attention of its "Regular" size, and those it is compared with.

8 heads of width 64 and 256 features; attention alone, where the paper timed whole networks. Its Transformer holds the
matrix of weights, L×L a head, as `softmax` of a product does; its X(OPT) has attention return the values. Exact
attention as torch computes it today holds no such matrix.

Letters: H heads, L tokens, D head width.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from linattn.attention import linear_attention
from linattn.feature_maps import FavorPlus
from linattn.softmax import softmax_attention
from linattn_lab.bench.memory import extra_peak, in_a_process
from linattn_lab.experiments.experiment import EXACT, FigureRow
from linattn_lab.experiments.inputs import generator, seed
from linattn_lab.experiments.judging import in_series, slope

HEADS, HEAD_DIM, FEATURES = 8, 64, 256

TRANSFORMER = "Transformer, L×L weights kept"
PERFORMER, CAUSAL = "FAVOR+", "FAVOR+, causal"
OPTIMUM = "X(OPT), the values returned"
CONTENDERS = (EXACT, TRANSFORMER, PERFORMER, CAUSAL, OPTIMUM)

FORWARD, BACKWARD = "forward", "forward and backward"
PASSES = (FORWARD, BACKWARD)

_WARM_UP_TOKENS, _VERIFIED_HEADS = 512, 2
# Rounding of float32, 2⁻²⁴ a step, with room for 1,600 in a row.
_FLOAT32_BOUND = 1e-4

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def series(contender: str, passes: str) -> str:
    """Name of a curve."""
    return f"{contender}, {passes}"


def contenders() -> dict[str, Attend]:
    """Every kind of attention by name."""
    favor = FavorPlus(HEAD_DIM, FEATURES, seed=seed("figure 3"))
    return {
        EXACT: softmax_attention,
        TRANSFORMER: materialised,
        PERFORMER: lambda query, key, value: linear_attention(query, key, value, favor),
        CAUSAL: lambda query, key, value: linear_attention(query, key, value, favor, is_causal=True),
        OPTIMUM: lambda query, key, value: value.clone(),
    }


def materialised(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(QKᵀ/√D)·V, as a Transformer was written in 2020."""
    return torch.softmax(query @ key.mT * HEAD_DIM**-0.5, -1) @ value


def call(attend: Attend, length: int, passes: str) -> Callable[[], object]:
    """A call on Gaussian inputs (1, H, L, D), which are drawn here; with backward all three gradients are taken."""
    backward = passes == BACKWARD
    drawn = torch.randn(3, 1, HEADS, length, HEAD_DIM, generator=generator("figure 3", length))
    query, key, value = (x.clone().requires_grad_(backward) for x in drawn)
    if not backward:
        return lambda: attend(query, key, value)

    def run() -> tuple[Tensor, ...]:
        """Output and gradients; X(OPT) has but one."""
        out = attend(query, key, value)
        return out, *torch.autograd.grad(out, (query, key, value), torch.ones_like(out), allow_unused=True)

    return run


def growth(rows: Sequence[FigureRow], contender: str, passes: str, num_lengths: int) -> float:
    """The power of L as which a curve grows over its greatest lengths."""
    return slope(in_series(rows, series(contender, passes))[-num_lengths:])[0]


@cache
def verify() -> None:
    """Refuse to measure what is wrong: both exact ones agree, and both linear ones agree with their definition.

    Once a process, and with few heads, which are all alike: the definition takes far longer than a call.
    """
    shape = (3, 1, _VERIFIED_HEADS, _WARM_UP_TOKENS, HEAD_DIM)
    query, key, value = torch.randn(shape, generator=generator("figure 3", "verify"))
    built = contenders()
    favor = FavorPlus(HEAD_DIM, FEATURES, seed=seed("figure 3"))
    reference = {TRANSFORMER: softmax_attention(query, key, value)} | {
        name: linear_attention(query, key, value, favor, is_causal=name == CAUSAL, backend="reference")
        for name in (PERFORMER, CAUSAL)
    }
    for name, wanted in reference.items():
        error = ((built[name](query, key, value) - wanted).norm() / wanted.norm()).item()
        if not error < _FLOAT32_BOUND:
            raise ValueError(f"{name} is off its definition by {error:.1e} in {_WARM_UP_TOKENS} tokens: not measured")


def extra_bytes(cases: Sequence[tuple[str, int, str]]) -> list[int]:
    """Extra peak memory of a call, results included, for (contender, length, passes): in one process of their own."""
    code = f"from {__name__} import print_extra_bytes; print_extra_bytes()"
    return [int(line) for line in in_a_process(code, [cases, torch.get_num_threads()], "memory").split()]


def print_extra_bytes() -> None:
    """In that process: bytes of each case, a line each, after short calls that load libraries and start threads."""
    cases, threads = json.loads(sys.argv[-1])
    torch.set_num_threads(threads)
    built = contenders()
    for contender, passes in {(contender, passes) for contender, _, passes in cases}:
        call(built[contender], _WARM_UP_TOKENS, passes)()
    for contender, length, passes in cases:
        sys.stdout.write(f"{extra_peak(call(built[contender], length, passes))}\n")
