"""Claim: on a GPU the fused kernels are faster than features made before ready kernels, and than exact attention.

    python benchmarks/gpu_kernels.py [SECONDS]

A CUDA GPU is needed; flash-linear-attention is measured where it is installed.

bfloat16, B = 4, 16 heads, FAVOR+; causal unless said. Peers: features by compiled torch and flash-linear-attention's
chunked kernel with its normaliser; that kernel alone, with features given to both; and torch's
scaled_dot_product_attention by the fastest of its backends. Verified first against float64: outputs and gradients, and
that a second run gives the same bits. Runs are interleaved, caches flushed before each. A peer that is missing or fails
is left out, and so are rows that would begin after so many seconds (420), which peers' own tuning may take.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import linattn
from linattn.feature_maps import FavorPlus, FeatureMap, Relu
from measuring import ratios, record, relative_error, require, spread

BATCH, HEADS, WIDTH, REPEATS = 4, 16, 64, 7
LENGTH, LONG, FEATURES = 8192, 16_384, (64, 128, 256)
# How often the peers' time is ours at least, forward and with the backward pass, by the number of features.
FORWARD, BOTH = {64: 2.5, 128: 3.0, 256: 4.0}, {64: 2.5, 128: 2.5, 256: 3.5}
# Of kernels that are given features, and the width of heads there.
GIVEN_FORWARD, GIVEN_BOTH, GIVEN_WIDTH = 1.35, 2.0, 128
EXACT_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
SECONDS = 420
Run = Callable[[], object]
Attend = Callable[[list[Tensor]], Tensor]


def tokens(
    length: int,
    *,
    batch: int = BATCH,
    heads: int = HEADS,
    width: int = WIDTH,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    """Normal queries, keys and values on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, heads, length, width)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def fused(inputs: list[Tensor], feature_map: FeatureMap, *, is_causal: bool = True) -> Tensor:
    """The op by its kernels."""
    return linattn.linear_attention(*inputs, feature_map, is_causal=is_causal, backend="triton")


def peer_kernel() -> Callable[..., Any] | None:
    """flash-linear-attention's, None where it is not installed or does not import."""
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except Exception as error:  # whatever keeps a peer away costs its rows alone
        print(f"flash-linear-attention is left out: {error!r}", file=sys.stderr)
        return None
    found: Callable[..., Any] = chunk_linear_attn
    return found


def with_features(kernel: Callable[..., Any], feature_map: FavorPlus) -> Attend:
    """Features by compiled torch, then the peer's kernel with its normaliser."""

    @torch.compile
    def features(x: Tensor) -> Tensor:
        exponents = feature_map.query(x)
        # One maximum for all tokens, which its kernel needs to stay finite.
        return torch.exp(exponents - exponents.amax()).to(x.dtype).transpose(1, 2)

    def attend(inputs: list[Tensor]) -> Tensor:
        query, key, value = inputs
        given = features(query), features(key), value.transpose(1, 2).contiguous()
        out: Tensor = kernel(*given, scale=1.0, normalize=True)[0].transpose(1, 2)
        return out

    return attend


def given_features(kernel: Callable[..., Any], inputs: list[Tensor]) -> Tensor:
    """The peer's kernel alone over the features of a rectifier, without a normaliser."""
    query, key, value = (x.transpose(1, 2).contiguous() for x in inputs)
    out: Tensor = kernel(query.relu(), key.relu(), value, scale=1.0, normalize=False)[0].transpose(1, 2)
    return out


def works(name: str, run: Run) -> bool:
    """Whether a peer runs; why not is said."""
    try:
        run()
        torch.cuda.synchronize()
    except Exception as error:  # whatever keeps a peer away costs its rows alone
        print(f"{name} is left out: {error!r}", file=sys.stderr)
        return False
    return True


def is_late(name: str, end: float) -> bool:
    """Whether there is no time left for a peer, which is said."""
    if time.monotonic() < end:
        return False
    print(f"{name} is left out: its time is over", file=sys.stderr)
    return True


def exactly(backend: SDPBackend, inputs: list[Tensor], *, is_causal: bool) -> Tensor:
    """Exact attention by one of torch's backends."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*inputs, is_causal=is_causal)


def exact_runs(inputs: list[Tensor], *, is_causal: bool) -> dict[str, Attend]:
    """Exact attention by each of torch's backends that runs here."""
    found: dict[str, Attend] = {}
    for backend in EXACT_BACKENDS:

        def attend(x: list[Tensor], chosen: SDPBackend = backend) -> Tensor:
            return exactly(chosen, x, is_causal=is_causal)

        if works(backend.name, lambda attend=attend: attend(inputs)):
            found[backend.name] = attend
    return found


def fastest(timed: Mapping[str, list[float]], names: Iterable[str]) -> str:
    """The name whose median is the least."""
    return min(names, key=lambda name: statistics.median(timed[name]))


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


def verify(feature_map: FeatureMap) -> float:
    """The largest error of outputs and gradients in bfloat16; refuses wrong results, and those that differ by run."""
    worst = 0.0
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        given = tokens(500, batch=1, heads=2, width=feature_map.head_dim, dtype=dtype)
        for is_causal in (True, False):
            exact = [x.detach().double().requires_grad_() for x in given]
            truth = linattn.linear_attention(*exact, feature_map, is_causal=is_causal, backend="reference")
            expected = truth, *torch.autograd.grad(truth.sum(), exact)
            found, again = (
                (out := fused(given, feature_map, is_causal=is_causal), *torch.autograd.grad(out.sum(), given))
                for _ in range(2)
            )
            worst = max(relative_error(x, y) for x, y in zip(found, expected, strict=True))
            require(f"{type(feature_map).__name__} in {dtype}", worst, bound)
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


def compare(num_features: int, limits: Mapping[str, float], kernel: Callable[..., Any] | None, **rest: Any) -> None:
    """Rows of one number of features at the first length."""
    feature_map, inputs = FavorPlus(WIDTH, num_features).cuda(), tokens(LENGTH)
    shape = {"features": num_features, "length": LENGTH, **rest}
    runs: dict[str, Run] = {
        "ours": lambda: fused(inputs, feature_map),
        "ours both": both(lambda x: fused(x, feature_map), inputs),
    }
    if kernel is not None:
        other = with_features(kernel, feature_map)
        pair: dict[str, Run] = {"peer": lambda: other(inputs), "peer both": both(other, inputs)}
        if all(works(f"flash-linear-attention, {num_features} features, {name}", run) for name, run in pair.items()):
            # Both round features and sums to bfloat16, each in its own way.
            require("flash-linear-attention", relative_error(other(inputs), fused(inputs, feature_map)), 5e-2)
            runs |= pair
    timed = seconds(runs)
    floor = [least(num_features, limits) / x for x in timed["ours"]]
    record(f"share of the limit, {num_features} features", figure=spread(floor), unit="", bound=">= 0.3", **shape)
    for name, bound in (("", FORWARD), (" both", BOTH)):
        if "peer" + name in timed:
            label = f"flash-linear-attention over ours, {num_features} features" + (", with backward" if name else "")
            figure = ratios(timed["peer" + name], timed["ours" + name])
            record(label, figure=figure, unit="×", bound=f">= {bound[num_features]}", **shape)


def compare_given(kernel: Callable[..., Any], **rest: Any) -> None:
    """Rows of features that are given to both kernels; ours divides by the normaliser too."""
    feature_map, inputs = Relu(GIVEN_WIDTH, floor=0.0).cuda(), tokens(LENGTH, width=GIVEN_WIDTH)
    runs: dict[str, Run] = {
        "ours": lambda: fused(inputs, feature_map),
        "peer": lambda: given_features(kernel, inputs),
        "ours both": both(lambda x: fused(x, feature_map), inputs),
        "peer both": both(lambda x: given_features(kernel, x), inputs),
    }
    if not all(works(f"flash-linear-attention, given features, {name}", runs[name]) for name in ("peer", "peer both")):
        return
    timed = seconds(runs)
    for name, bound in (("", GIVEN_FORWARD), (" both", GIVEN_BOTH)):
        label = "flash-linear-attention's kernel alone over ours, given features" + (", with backward" if name else "")
        figure = ratios(timed["peer" + name], timed["ours" + name])
        record(label, figure=figure, unit="×", bound=f">= {bound}", width=GIVEN_WIDTH, length=LENGTH, **rest)


def against_exact_attention(**rest: Any) -> None:
    """Rows against the fastest exact attention of torch: of features, of merged keys."""
    feature_map, inputs = FavorPlus(WIDTH, 256).cuda(), tokens(LONG)
    merged = linattn.MergedKV(32, 128, None)
    causal, every = (exact_runs(inputs, is_causal=is_causal) for is_causal in (True, False))
    if not (causal and every):
        print("no backend of exact attention runs here: its rows are left out", file=sys.stderr)
        return
    with torch.no_grad():
        runs: dict[str, Run] = {
            "ours": lambda: fused(inputs, feature_map),
            "merged": lambda: linattn.merged_attention(*inputs, merged),
        }
        runs |= {f"causal {name}": lambda attend=attend: attend(inputs) for name, attend in causal.items()}
        runs |= {f"every {name}": lambda attend=attend: attend(inputs) for name, attend in every.items()}
        timed = seconds(runs)
    for label, ours, kind, bound in (
        ("exact attention over ours", "ours", "causal", ">= 8"),
        ("exact attention over merged keys with a window", "merged", "every", ">= 1"),
    ):
        best = fastest(timed, (name for name in timed if name.startswith(kind)))
        shape = {"features": feature_map.num_features, "length": LONG, "by": best, **rest}
        record(label, figure=ratios(timed[best], timed[ours]), unit="×", bound=bound, **shape)
    grads: dict[str, Run] = {"ours": both(lambda x: fused(x, feature_map), inputs)}
    grads |= {name: both(attend, inputs) for name, attend in causal.items()}
    timed = seconds(grads)
    best = fastest(timed, causal)
    shape = {"features": feature_map.num_features, "length": LONG, "by": best, **rest}
    figure = ratios(timed[best], timed["ours"])
    record("exact attention over ours, with backward", figure=figure, unit="×", bound=">= 8", **shape)


def small_calls(**rest: Any) -> None:
    """Rows of one short call, eager and as a CUDA graph, and of few heads against many."""
    feature_map, inputs = FavorPlus(WIDTH, 64).cuda(), tokens(1024, heads=8)
    few, many = tokens(65_536, batch=1, heads=4), tokens(4096, batch=16, heads=4)
    with torch.no_grad():
        runs: dict[str, Run] = {
            "eager": lambda: fused(inputs, feature_map),
            "graph": graphed(lambda: fused(inputs, feature_map)),
            "few": lambda: fused(few, feature_map),
            "many": lambda: fused(many, feature_map),
        }
        timed = seconds(runs)
    for name, bound in (("eager", 0.07), ("graph", 0.02)):
        figure = spread([1e3 * x for x in timed[name]])
        record(f"a short call, {name}", figure=figure, unit="ms", bound=f"<= {bound}", length=1024, **rest)
    figure = ratios(timed["few"], timed["many"])
    record("4 heads of 65,536 tokens over 64 of 4,096", figure=figure, unit="×", bound="<= 1.3", **rest)


def one_token(limits: Mapping[str, float], **rest: Any) -> None:
    """Rows of a step of many heads, whose sums are read and written once, and of few as a CUDA graph."""
    feature_map = FavorPlus(WIDTH, 256).cuda()
    for batch, heads in ((64, 16), (1, 16)):
        inputs = [x.detach() for x in tokens(1, batch=batch, heads=heads)]
        with torch.no_grad():
            state = linattn.linear_attention_with_state(*inputs, feature_map, backend="triton").state

            def step(given: list[Tensor] = inputs, before: linattn.State = state) -> object:
                return linattn.linear_attention_with_state(*given, feature_map, before, backend="triton")

            timed = seconds({"step": graphed(step)})["step"]
        shape = {"features": 256, "heads": batch * heads, **rest}
        if batch > 1:
            moved = 2 * sum(x.nbytes for x in (state.S, state.z, state.m))
            figure = spread([moved / x / limits["bytes"] for x in timed])
            record("bytes of a step over those of a copy", figure=figure, unit="", bound=">= 0.7", **shape)
        else:
            record("a step", figure=spread([1e6 * x for x in timed]), unit="us", bound="<= 8", **shape)


def memory(**rest: Any) -> None:
    """Rows of what a call takes beside its own tensors, and keeps for the backward pass."""
    feature_map, inputs = FavorPlus(WIDTH, 256).cuda(), tokens(LENGTH)
    whole = 4 * inputs[0].nbytes
    for name, run, bound in (
        ("", lambda: fused([x.detach() for x in inputs], feature_map), 2),
        (", with backward", both(lambda x: fused(x, feature_map), inputs), 4),
    ):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        extra = (torch.cuda.max_memory_allocated() - before) / whole
        label = f"memory over that of q, k, v and out{name}"
        record(label, figure=extra, unit="×", bound=f"<= {bound}", length=LENGTH, **rest)
    before = torch.cuda.memory_allocated()
    out = fused(inputs, feature_map)
    kept = (torch.cuda.memory_allocated() - before - out.nbytes) / out[..., 0].numel()
    record("bytes kept for the backward pass", figure=kept, unit="a token and head", bound="<= 12", **rest)


def main() -> None:
    """Verify, time, record."""
    if not torch.cuda.is_available():
        sys.exit("gpu_kernels measures a CUDA GPU, and torch sees none; run it on a machine that has one")
    allowed = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    end, worst = time.monotonic() + allowed, 0.0
    for feature_map in (FavorPlus(WIDTH, 256).cuda(), Relu(GIVEN_WIDTH, floor=0.0).cuda()):
        worst = max(worst, verify(feature_map))
    rest: dict[str, Any] = {"error": worst, "gpu": torch.cuda.get_device_name()}
    limits = ceilings()
    rest |= {"copy bytes/s": limits["bytes"], "product FLOP/s": limits["flops"]}
    small_calls(**rest)
    one_token(limits, **rest)
    memory(**rest)
    against_exact_attention(**rest)
    kernel = peer_kernel()
    for num_features in FEATURES:
        late = kernel is None or is_late(f"flash-linear-attention, {num_features} features", end)
        compare(num_features, limits, None if late else kernel, **rest)
    if kernel is not None and not is_late("flash-linear-attention, given features", end):
        compare_given(kernel, **rest)


if __name__ == "__main__":
    main()
