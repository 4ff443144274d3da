"""Claim: an expansion around 16 centres (order 1) costs little more than its products, and a window little on top.

FLOPs per token and head: 2·C·D for the centres' weights, 2·C·F·Dv and 2·F·Dv for absorbing and reading, F = 1 + D.
8 heads, D = 64, float32, centres fitted beforehand; verified against the quadratic reference in float64.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import torch

import linattn
from linattn.feature_maps import Expansion
from linattn_lab.bench.memory import CHILD_SETTINGS, extra_peak
from measuring import (
    HEAD_DIM,
    HEADS,
    ratios,
    record,
    relative_error,
    require,
    seconds,
    sgemm,
    share_of_ceiling,
    spread,
    tokens,
)

LENGTH, SHORTER, CENTRES, WINDOW = 65_536, 16_384, 16, 32
FLOPS = 2 * CENTRES * HEAD_DIM + 2 * (CENTRES + 1) * (1 + HEAD_DIM) * HEAD_DIM
EXTRA_MEMORY = 192e6


def expansion() -> Expansion:
    """The map, fitted on tokens of another seed."""
    query, key, _ = tokens(2_048, seed=1)
    return Expansion(HEAD_DIM, CENTRES).fit(query, key)


def checked(feature_map: Expansion, is_causal: bool, window: int | None) -> float:
    """The error against the reference in float64, over several blocks; refuses a wrong result."""
    inputs = tokens(1_500)
    attend = partial(linattn.linear_attention, feature_map=feature_map, is_causal=is_causal, window=window)
    error = relative_error(attend(*inputs), attend(*(x.double() for x in inputs), backend="reference"))
    require(repr(feature_map), error, 1e-4)
    return error


def share(feature_map: Expansion) -> None:
    """Against the matrix product timed beside it."""
    error, inputs = checked(feature_map, False, None), tokens(LENGTH)
    runs = {"linattn": lambda: linattn.linear_attention(*inputs, feature_map), "sgemm": sgemm()}
    found = seconds(runs, repeats=5)
    record(
        f"share of the sgemm rate, {CENTRES} centres order 1, bidirectional forward, {LENGTH:,} tokens",
        figure=share_of_ceiling(FLOPS * LENGTH * HEADS, found["linattn"], found["sgemm"]),
        unit="of sgemm",
        bound=">= 0.35",
        error=error,
        seconds={name: spread(samples) for name, samples in found.items()},
    )


def against_exact(feature_map: Expansion) -> None:
    """Against torch's own exact attention."""
    error, inputs = checked(feature_map, False, None), tokens(SHORTER)
    runs = {
        "linattn": lambda: linattn.linear_attention(*inputs, feature_map),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(*inputs),
    }
    found = seconds(runs, repeats=3)
    record(
        f"times faster than exact attention, {CENTRES} centres order 1, {SHORTER:,} tokens",
        figure=ratios(found["sdpa"], found["linattn"]),
        unit="×",
        bound=">= 6",
        error=error,
        seconds={name: spread(samples) for name, samples in found.items()},
    )


def window(feature_map: Expansion, is_causal: bool) -> None:
    """A window's time over that of the map alone."""
    error, inputs = checked(feature_map, is_causal, WINDOW), tokens(LENGTH)
    attend = partial(linattn.linear_attention, *inputs, feature_map, is_causal=is_causal)
    found = seconds({"alone": attend, "window": partial(attend, window=WINDOW)}, repeats=3)
    record(
        f"time with an exact window of {WINDOW} over that without, {CENTRES} centres order 1, "
        f"{'causal' if is_causal else 'bidirectional'}, {LENGTH:,} tokens",
        figure=ratios(found["window"], found["alone"]),
        unit="×",
        bound="<= 1.35",
        error=error,
        seconds={name: spread(samples) for name, samples in found.items()},
    )


def memory(feature_map: Expansion) -> None:
    """Peak memory beyond inputs and output, in a process of its own."""
    error = checked(feature_map, False, None)
    command = [sys.executable, __file__, "memory"]
    child = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | CHILD_SETTINGS)
    record(
        f"peak extra memory at {LENGTH:,} tokens, {CENTRES} centres order 1, bidirectional, forward",
        figure=int(child.stdout.splitlines()[-1]) / 1e6,
        unit="MB",
        bound=f"<= {EXTRA_MEMORY / 1e6:.0f}",
        length=LENGTH,
        error=error,
    )


def measure_memory() -> None:
    """Print the peak extra bytes, after a warm-up on a short input."""
    feature_map = expansion()
    linattn.linear_attention(*tokens(512), feature_map)
    inputs = tokens(LENGTH)
    print(extra_peak(lambda: linattn.linear_attention(*inputs, feature_map)) - inputs[0].nbytes)


def main() -> None:
    """Verify, time, record."""
    feature_map = expansion()
    with torch.no_grad():
        share(feature_map)
        against_exact(feature_map)
        for is_causal in (False, True):
            window(feature_map, is_causal)
    memory(feature_map)


if __name__ == "__main__":
    if sys.argv[1:] == ["memory"]:
        measure_memory()
    else:
        main()
