"""Claim: a forward pass takes little more time than its own matrix products do, and so does one with its backward pass.

The products alone run over the same blocks, in the same shapes, on buffers written over block by block, beside the
call in the same run: what is above 1 is passes over memory, exponentials, and Python. Unlike a share of the rate of
one large product, the ratio means the same on any processor. Forward, bidirectional: features of keys and queries, the
keys' sums and the queries' reading, 8·D·R FLOPs per token and head; causal adds a block's own weights, features by
features and weights by values. Backward: those of `BIDIRECTIONAL_BACKWARD` and `CAUSAL_BACKWARD`. 8 heads, D = Dv = 64,
float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import linattn
from linattn.attention.backends.blocked.blocks import add_product_, blocks, by_columns
from measuring import (
    HEAD_DIM,
    HEADS,
    favor,
    forward_and_backward,
    ratios,
    record,
    seconds,
    sgemm,
    share_of_ceiling,
    spread,
    tokens,
    verified,
)

# Letters: n tokens of a block, d width of a token, r features; upper case: of the sums, (r, d); nn: weights of a block.
# A product is (first, second), ' transposes, += adds to the result; what it is for stands behind it.
FORWARD = (
    ("nd·dr", "φ(k)"),
    ("nr'·nd+=", "S"),
    ("nd·dr", "φ(q)"),
    ("nr·rd", "num"),
)
CAUSAL_FORWARD = (*FORWARD, ("nr·nr'", "weights"), ("nn·nd+=", "num of the block's own past"))
BIDIRECTIONAL_BACKWARD = (
    ("nd·dr", "φ(k)"),
    ("nd·rd'", "grad φ(k)"),
    ("nr·rd", "grad v"),
    ("nr·dr'", "grad k"),
    ("nd·dr", "φ(q)"),
    ("nd·rd'", "grad φ(q)"),
    ("nr'·nd+=", "grad S"),
    ("nr·dr'", "grad q"),
)
CAUSAL_BACKWARD = (
    *BIDIRECTIONAL_BACKWARD,
    ("nr'·nd+=", "S before the block"),
    ("nr·nr'", "weights"),
    ("nd·nd'", "grad weights"),
    ("nn·nr+=", "grad φ(q)"),
    ("nn'·nr+=", "grad φ(k)"),
    ("nn'·nd+=", "grad v"),
)
LENGTHS, NUM_FEATURES = (16_384, 65_536), 256


class Products:
    """Some products of one fold and nothing else: as many blocks, shapes and buffers as the fold has."""

    def __init__(self, names: tuple[tuple[str, str], ...], length: int, num_features: int, *, is_causal: bool) -> None:
        x = torch.randn(1, HEADS, length, HEAD_DIM)
        self._tokens, self._blocks = x[0], blocks(x, num_features, is_causal=is_causal)
        n = self._blocks[0].stop
        rows = {"n": n, "d": HEAD_DIM, "r": num_features}
        kinds = {name: (rows[name[0]], rows[name[1]]) for name in ("nr", "rd", "nn", "dr")}
        self._buffers = {name: 1e-3 * torch.randn(HEADS, *shape) for name, shape in kinds.items()}
        self._buffers["dr"] = self._buffers["dr"][:1].expand(HEADS, -1, -1)
        self._results = {a + b: torch.zeros(HEADS, rows[a], rows[b]) for a in "nrd" for b in "nrd"}
        self._results["rd"] = by_columns(self._results["rd"])
        self._products = [self._product(name) for name, _ in names]

    def __call__(self) -> None:
        """Run them all, block by block."""
        for block in self._blocks:
            for product in self._products:
                product(block)

    def _product(self, name: str) -> Callable[[slice], object]:
        """One product of a block."""
        first, second = name.removesuffix("+=").split("·")
        run = torch.baddbmm if name.endswith("+=") else torch.bmm
        shapes = [x.removesuffix("'")[::-1] if x.endswith("'") else x for x in (first, second)]
        out = self._results[shapes[0][0] + shapes[1][1]]

        def product(block: slice) -> object:
            operands = (self._operand(first, block), self._operand(second, block))
            if shapes[0][0] + shapes[1][1] == "rd":
                return add_product_(out, operands[0].mT, operands[1])  # as the fold does
            return run(out, *operands, out=out) if run is torch.baddbmm else run(*operands, out=out)

        return product

    def _operand(self, name: str, block: slice) -> Tensor:
        """A block of tokens, or a buffer."""
        kind = name.removesuffix("'")
        x = self._tokens[:, block] if kind == "nd" else self._buffers[kind]
        return x.mT if name.endswith("'") else x


def measure(length: int, *, is_causal: bool, gradients: bool) -> None:
    """One ratio, and the share of the rate of a large product."""
    feature_map, inputs = favor(NUM_FEATURES), tokens(length, gradients=gradients)
    error = verified(feature_map, is_causal=is_causal)

    def attend(*inputs: Tensor) -> Tensor:
        return linattn.linear_attention(*inputs, feature_map, is_causal=is_causal)

    names = CAUSAL_FORWARD if is_causal else FORWARD
    if gradients:
        names += CAUSAL_BACKWARD if is_causal else BIDIRECTIONAL_BACKWARD
    contenders: dict[str, Callable[[], object]] = {
        "linattn": forward_and_backward(attend, inputs, inputs[0].detach()) if gradients else lambda: attend(*inputs),
        "products": Products(names, length, NUM_FEATURES, is_causal=is_causal),
        "sgemm": sgemm(),
    }
    found = seconds(contenders, repeats=7)
    what = f"{'causal' if is_causal else 'bidirectional'} forward{' and backward' if gradients else ''}"
    rest = {"length": length, "num_features": NUM_FEATURES, "error": error}
    record(
        f"time over that of its own matrix products, {what}, {length:,} tokens",
        figure=ratios(found["linattn"], found["products"]),
        unit="×",
        bound="<= 1.5" if gradients else "<= 1.35",
        seconds={name: spread(samples) for name, samples in found.items()},
        **rest,
    )
    if not gradients:
        flops = 8 * HEAD_DIM * NUM_FEATURES + is_causal * 2 * 128 * (NUM_FEATURES + HEAD_DIM)
        record(
            f"share of the sgemm rate, {what}, {length:,} tokens",
            figure=share_of_ceiling(flops * length * HEADS, found["linattn"], found["sgemm"]),
            unit="of sgemm",
            bound=">= 0.25",
            **rest,
        )


def main() -> None:
    """Verify, time, record."""
    for gradients in (False, True):
        for is_causal in (False, True):
            for length in LENGTHS:
                measure(length, is_causal=is_causal, gradients=gradients)


if __name__ == "__main__":
    main()
