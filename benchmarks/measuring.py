"""How benchmarks measure: verify, then time interleaved repeats in one process, and append one JSON row per claim."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

import linattn
from linattn.feature_maps import FavorPlus, FeatureMap

RESULTS = Path(__file__).parent / "results.jsonl"
HEADS, HEAD_DIM, NUM_FEATURES = 8, 64, 256

# Long enough for every block size to be met by no whole number of blocks.
_VERIFIED_LENGTH = 777
_SGEMM = 4096


def seconds(contenders: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, list[float]]:
    """Wall-clock seconds of each contender, interleaved after one warm-up each."""
    for run in contenders.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - start)
    return found


def spread(samples: list[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def ratios(numerator: list[float], denominator: list[float]) -> dict[str, float]:
    """Spread of the ratios of interleaved repeats."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


def tokens(length: int, *, gradients: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Normal queries, keys and values, (1, 8, L, 64)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, HEADS, length, HEAD_DIM)
    return [torch.randn(*shape, generator=generator).to(dtype).requires_grad_(gradients) for _ in range(3)]


def favor(num_features: int = NUM_FEATURES) -> FavorPlus:
    """The map of most claims."""
    return FavorPlus(HEAD_DIM, num_features)


def forward_and_backward(attend: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> Callable[[], object]:
    """A run of attend(q, k, v) and the gradients of all three."""
    return lambda: torch.autograd.grad(attend(*inputs), inputs, grad)


def sgemm() -> Callable[[], object]:
    """The ceiling: torch's own product of two 4096 × 4096 float32 matrices."""
    first, second = torch.randn(_SGEMM, _SGEMM), torch.randn(_SGEMM, _SGEMM)
    return lambda: first @ second


def share_of_ceiling(flops: float, samples: list[float], ceiling: list[float]) -> dict[str, float]:
    """FLOPs per second over those of the product timed beside it."""
    most = 2 * _SGEMM**3
    return spread([flops / a / (most / b) for a, b in zip(samples, ceiling, strict=True)])


def verified(
    feature_map: FeatureMap, bound: float = 1e-4, *, is_causal: bool = False, dtype: torch.dtype = torch.float32
) -> float:
    """Largest relative error of output and gradients against the reference in float64; refuses a wrong result.

    The bound is on float32's rounding; other dtypes name theirs.
    """
    inputs = tokens(_VERIFIED_LENGTH, gradients=True, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = tokens(_VERIFIED_LENGTH, seed=1, dtype=dtype)[0]
    out = linattn.linear_attention(*inputs, feature_map, is_causal=is_causal)
    truth = linattn.linear_attention(*exact, feature_map, is_causal=is_causal, backend="reference")
    pairs = [(out, truth)]
    pairs += zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(truth, exact, grad.double()), strict=True)
    wrong = max(relative_error(found, true) for found, true in pairs)
    require(repr(feature_map), wrong, bound)
    return wrong


def require(name: str, error: float, bound: float) -> None:
    """Refuse to time a wrong result."""
    if not error <= bound:
        raise SystemExit(f"{name}: relative error {error:.2e} exceeds {bound:.2e}; nothing was timed")


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def record(claim: str, *, figure: Mapping[str, float] | float, unit: str, bound: str, **rest: object) -> None:
    """Append a row to the result file and print it.

    Args:
        claim: what is measured, in words.
        figure: the measured number, or its median, minimum and maximum.
        unit: what it counts.
        bound: what the claim says of it, "<= 3.6" or ">= 0.5".
        rest: shapes, dtype, errors, seconds.
    """
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processor": torch.cpu.get_capabilities().get("cpu_name", platform.machine()),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }
    value = figure if isinstance(figure, float) else figure["median"]
    sign, limit = bound.split()
    holds = value <= float(limit) if sign == "<=" else value >= float(limit)
    row = {"claim": claim, "figure": figure, "unit": unit, "bound": bound, "holds": holds, **rest, "machine": machine}
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
