"""Claim: on a GPU the fused kernels are faster than features made before ready kernels, and than exact attention.

    python benchmarks/gpu_kernels.py          needs a CUDA GPU; flash-linear-attention is measured where it is installed

bfloat16, B = 4, 16 heads, FAVOR+; causal unless said. Peers: features by compiled torch and flash-linear-attention's
chunked kernel with its normaliser, and torch's scaled_dot_product_attention. Verified first against float64: outputs
and gradients, and that a second run gives the same bits. Runs are interleaved, caches flushed before each.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import linattn
from linattn.feature_maps import FavorPlus
from measuring import ratios, record, relative_error, require, spread

BATCH, HEADS, WIDTH, REPEATS = 4, 16, 64, 7
LENGTH, LONG, FEATURES = 8192, 16_384, (64, 128, 256)
# How often the peers' time is ours at least, forward and with the backward pass, by the number of features.
FORWARD, BOTH = {64: 2.5, 128: 3.0, 256: 4.0}, {64: 2.5, 128: 2.5, 256: 3.5}
Run = Callable[[], object]


def tokens(length: int, *, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    """Normal queries, keys and values on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (BATCH, heads, length, WIDTH)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def fused(inputs: list[Tensor], feature_map: FavorPlus) -> Tensor:
    """The op by its kernels."""
    return linattn.linear_attention(*inputs, feature_map, is_causal=True, backend="triton")


def peer(feature_map: FavorPlus) -> Callable[[list[Tensor]], Tensor] | None:
    """Features by compiled torch, then flash-linear-attention; None where it is not installed."""
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return None

    @torch.compile
    def features(x: Tensor) -> Tensor:
        exponents = feature_map.query(x)
        # One maximum for all tokens, which its kernel needs to stay finite.
        return torch.exp(exponents - exponents.amax()).to(x.dtype).transpose(1, 2)

    def attend(inputs: list[Tensor]) -> Tensor:
        query, key, value = inputs
        given = features(query), features(key), value.transpose(1, 2).contiguous()
        return chunk_linear_attn(*given, scale=1.0, normalize=True)[0].transpose(1, 2)

    return attend


def both(attend: Callable[[list[Tensor]], Tensor], inputs: list[Tensor]) -> Run:
    """A run forward and back."""
    grad = torch.randn_like(inputs[2])
    return lambda: torch.autograd.grad(attend(inputs), inputs, grad)


def seconds(runs: Mapping[str, Run]) -> dict[str, list[float]]:
    """Times of interleaved repeats, by the GPU's own clock."""
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(2):
            run()
    for _ in range(REPEATS):
        for name, run in runs.items():
            flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            found[name].append(start.elapsed_time(stop) / 1e3)
    return found


def graphed(run: Run) -> Run:
    """The same as one CUDA graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def verify(feature_map: FavorPlus) -> float:
    """The largest error of outputs and gradients in bfloat16; refuses wrong results, and those that differ by run."""
    worst = 0.0
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        inputs = [x[:1, :2].detach().requires_grad_() for x in tokens(500, dtype=dtype)]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        truth = linattn.linear_attention(*exact, feature_map, is_causal=True, backend="reference")
        found, again = ((out := fused(inputs, feature_map), *torch.autograd.grad(out.sum(), inputs)) for _ in range(2))
        expected = truth, *torch.autograd.grad(truth.sum(), exact)
        worst = max(relative_error(x, y) for x, y in zip(found, expected, strict=True))
        require(f"{dtype}", worst, bound)
        require("a second run", float(any(not torch.equal(x, y) for x, y in zip(found, again, strict=True))), 0.0)
    return worst


def ceilings() -> dict[str, float]:
    """Bytes and FLOPs per second of a copy and a product on this GPU."""
    first = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    target, large = torch.empty_like(first), torch.empty(2**29, dtype=torch.int8, device="cuda")
    timed = seconds({"product": lambda: torch.mm(first, first, out=target), "copy": large.clone})
    product, copy = (statistics.median(timed[name]) for name in ("product", "copy"))
    return {"bytes": 2 * large.numel() / copy, "flops": 2 * 8192**3 / product}


def least(num_features: int, limits: Mapping[str, float]) -> float:
    """The seconds that no kernel can beat: a token's vectors once through memory, or its products."""
    moved = 2 * 4 * WIDTH + 4
    flops = 8 * WIDTH * num_features + 4 * 64 * (num_features + WIDTH)
    return BATCH * HEADS * LENGTH * max(moved / limits["bytes"], flops / limits["flops"])


def compare(num_features: int, limits: Mapping[str, float], **rest: Any) -> None:
    """Rows of one number of features at the first length."""
    feature_map, inputs = FavorPlus(WIDTH, num_features).cuda(), tokens(LENGTH)
    shape = {"features": num_features, "length": LENGTH, **rest}
    other = peer(feature_map)
    runs: dict[str, Run] = {
        "ours": lambda: fused(inputs, feature_map),
        "ours both": both(lambda x: fused(x, feature_map), inputs),
    }
    if other is not None:
        # Both round features and sums to bfloat16, each in its own way.
        require("flash-linear-attention", relative_error(other(inputs), fused(inputs, feature_map)), 5e-2)
        runs |= {"peer": lambda: other(inputs), "peer both": both(other, inputs)}
    timed = seconds(runs)
    floor = [least(num_features, limits) / x for x in timed["ours"]]
    record(f"share of the limit, {num_features} features", figure=spread(floor), unit="", bound=">= 0.3", **shape)
    if other is None:
        print("flash-linear-attention is not installed: its rows are left out", file=sys.stderr)
        return
    for name, bound in (("", FORWARD), (" both", BOTH)):
        label = f"flash-linear-attention over ours, {num_features} features" + (", with backward" if name else "")
        figure = ratios(timed["peer" + name], timed["ours" + name])
        record(label, figure=figure, unit="×", bound=f">= {bound[num_features]}", **shape)


def against_exact_attention(**rest: Any) -> None:
    """Rows against the fastest exact attention of torch, merged keys too."""
    feature_map, inputs = FavorPlus(WIDTH, 256).cuda(), tokens(LONG)
    merged = linattn.Exact(32, num_merged=128)
    with torch.no_grad():
        timed = seconds(
            {
                "ours": lambda: fused(inputs, feature_map),
                "exact": lambda: F.scaled_dot_product_attention(*inputs, is_causal=True),
                "merged": lambda: linattn.linear_attention(*inputs, None, exact=merged),
                "exact, both directions": lambda: F.scaled_dot_product_attention(*inputs),
            }
        )
    shape = {"features": 256, "length": LONG, **rest}
    record("exact attention over ours", figure=ratios(timed["exact"], timed["ours"]), unit="×", bound=">= 8", **shape)
    figure = ratios(timed["exact, both directions"], timed["merged"])
    record("exact attention over merged keys with a window", figure=figure, unit="×", bound=">= 1", **shape)


def small_calls(**rest: Any) -> None:
    """Rows of one short call, eager and as a CUDA graph, and of memory."""
    feature_map, inputs = FavorPlus(WIDTH, 64).cuda(), tokens(1024, heads=8)
    with torch.no_grad():
        timed = seconds(
            {"eager": lambda: fused(inputs, feature_map), "graph": graphed(lambda: fused(inputs, feature_map))}
        )
    for name, bound in (("eager", 0.07), ("graph", 0.02)):
        figure = spread([1e3 * x for x in timed[name]])
        record(f"a short call, {name}", figure=figure, unit="ms", bound=f"<= {bound}", length=1024, **rest)
    inputs = tokens(LENGTH)
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fused(inputs, FavorPlus(WIDTH, 256).cuda())
        extra = torch.cuda.max_memory_allocated() - before
    figure = extra / (4 * inputs[0].nbytes)
    record("memory over that of q, k, v and out", figure=figure, unit="×", bound="<= 2", length=LENGTH, **rest)


def main() -> None:
    """Verify, time, record."""
    if not torch.cuda.is_available():
        sys.exit("gpu_kernels measures a CUDA GPU, and torch sees none; run it on a machine that has one")
    rest: dict[str, Any] = {"error": verify(FavorPlus(WIDTH, 256).cuda()), "gpu": torch.cuda.get_device_name()}
    limits = ceilings()
    rest |= {"copy bytes/s": limits["bytes"], "product FLOP/s": limits["flops"]}
    for num_features in FEATURES:
        compare(num_features, limits, **rest)
    against_exact_attention(**rest)
    small_calls(**rest)


if __name__ == "__main__":
    main()
