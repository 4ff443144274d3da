"""Claim: bfloat16 inputs take at most 0.65 of float32's time. Where it is missed, this measures why.

Exponents are kept exact: the projection, half of all arithmetic, is a float32 product, and so are the others, because
rounding their factors saved a tenth of the time here and broke two laws (constant values come back; an error at most
twice the reference's). `projection_error` is what a bfloat16 projection would do to the output, `rounding_error` what
rounding the exact output does. 8 heads, D = 64, 256 features, 16,384 tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

import linattn
from measuring import favor, ratios, record, relative_error, require, seconds, spread, textbook, tokens

LENGTH = 16_384


def with_rounded_projection(query: Tensor, key: Tensor, value: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Attention whose exponents come from a product in bfloat16; everything else in float64."""
    x, y = ((z @ weights).double() - z.double().square().sum(-1, keepdim=True) * scale / 2 for z in (query, key))
    weight = torch.exp(x - x.amax()) @ torch.exp(y - y.amax()).mT
    return weight @ value.double() / weight.sum(-1, keepdim=True)


def main() -> None:
    """Verify, time, record."""
    feature_map = favor()
    inputs = {dtype: tokens(LENGTH, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    short = tokens(512, dtype=torch.bfloat16)
    truth = textbook(*(x.double() for x in short), feature_map)
    # The result is rounded once, to half of bfloat16's spacing; all before it happens in float32.
    error = relative_error(linattn.linear_attention(*short, feature_map), truth)
    require("bfloat16", error, torch.finfo(torch.bfloat16).eps / 2 + 1e-4)
    weights = (feature_map.projection.mT * feature_map.scale**0.5).to(torch.bfloat16)
    found = seconds(
        {str(dtype): lambda x=x: linattn.linear_attention(*x, feature_map) for dtype, x in inputs.items()}, repeats=9
    )
    record(
        f"bfloat16 over float32, bidirectional forward, {LENGTH:,} tokens",
        figure=ratios(found["torch.bfloat16"], found["torch.float32"]),
        unit="×",
        bound="<= 0.65",
        length=LENGTH,
        error=error,
        rounding_error=relative_error(truth.to(torch.bfloat16), truth),
        projection_error=relative_error(with_rounded_projection(*short, weights, feature_map.scale), truth),
        seconds={name: spread(samples) for name, samples in found.items()},
    )


if __name__ == "__main__":
    main()
