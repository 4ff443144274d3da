"""How benchmarks measure: verify, then time interleaved repeats in one process, and write one JSON row per claim."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import linattn
from linattn.feature_maps import FavorPlus, FeatureMap
from linattn.methods.measures import seconds as seconds
from linattn_lab.costs import spread as spread
from result_file import put_in_place, read_rows, write_rows

RESULTS = Path(__file__).parent / "results.jsonl"
HEADS, HEAD_DIM, NUM_FEATURES = 8, 64, 256

# Several blocks, no whole number of them, and more than one segment of the causal backward pass.
_VERIFIED_LENGTH, _VERIFIED_HEADS = 2_500, 2
_SGEMM = 4096


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


def textbook(query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap, *, is_causal: bool = False) -> Tensor:
    """The definition with every feature in memory; no running maximum guards it. Causal: every weight too."""
    phi_q, phi_k = feature_map.query(query), feature_map.key(key)
    if feature_map.exponential:
        phi_q, phi_k = phi_q.exp(), phi_k.exp()
    if is_causal:
        weights = (phi_q @ phi_k.mT).tril()
        return weights @ value / weights.sum(-1, keepdim=True)
    S, z = torch.einsum("bhlr,bhlv->bhrv", phi_k, value), phi_k.sum(2)
    return torch.einsum("bhlr,bhrv->bhlv", phi_q, S) / torch.einsum("bhlr,bhr->bhl", phi_q, z).unsqueeze(-1)


def verified(feature_map: FeatureMap, bound: float = 1e-4, *, is_causal: bool = False) -> float:
    """Largest relative error of output and gradients against the textbook in float64; refuses a wrong result.

    The bound is far above float32's rounding and far below any fault.
    """
    inputs = [x[:, :_VERIFIED_HEADS].detach().requires_grad_() for x in tokens(_VERIFIED_LENGTH)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    grad = tokens(_VERIFIED_LENGTH, seed=1)[0][:, :_VERIFIED_HEADS]
    out = linattn.linear_attention(*inputs, feature_map, is_causal=is_causal)
    truth = textbook(*exact, feature_map, is_causal=is_causal)
    pairs = [(out, truth)]
    pairs += zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(truth, exact, grad.double()), strict=True)
    wrong = max(relative_error(found, true) for found, true in pairs)
    require(repr(feature_map), wrong, bound)
    return wrong


def verified_window(
    window: int | None, feature_map: FeatureMap, tensors: Sequence[Tensor], *, is_causal: bool
) -> float:
    """Largest relative error beside an exact window against the quadratic reference in float64; refuses a wrong result.

    The map must be fitted beforehand. In float64 and in float32.

    Args:
        window: its width; None for none.
        feature_map: the map.
        tensors: query, key and value.
        is_causal: whether later keys are hidden.
    """
    query, key, value = (x.double() for x in tensors)
    options = {"window": window, "is_causal": is_causal}
    name = repr(feature_map) if window is None else f"{feature_map!r} + window {window}"
    truth = linattn.linear_attention(query, key, value, feature_map, backend="reference", **options)
    wrong = relative_error(linattn.linear_attention(query, key, value, feature_map, **options), truth)
    require(f"{name} in float64", wrong, 1e-10)
    wrong = relative_error(linattn.linear_attention(*tensors, feature_map, **options), truth)
    require(f"{name} in float32", wrong, 1e-4)
    return wrong


def require(name: str, error: float, bound: float) -> None:
    """Refuse to time a wrong result."""
    if not error <= bound:
        raise SystemExit(f"{name}: relative error {error:.2e} exceeds {bound:.2e}; nothing was timed")


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    difference = found.detach().double() - truth.detach().double()
    return float(difference.norm() / truth.detach().norm())


def record(claim: str, *, figure: Mapping[str, float] | float, unit: str, bound: str, **rest: object) -> None:
    """Put a row into the result file, in the place of a former one of the same claim, and print it.

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
    row = {
        "benchmark": Path(sys.argv[0]).stem,
        "claim": claim,
        "figure": figure,
        "unit": unit,
        "bound": bound,
        "holds": holds,
        **rest,
        "machine": machine,
    }
    write_rows(RESULTS, put_in_place(read_rows(RESULTS), [row], lambda former: former["claim"] == claim))
    print(json.dumps(row), flush=True)
