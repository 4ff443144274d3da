"""No product meets subnormal numbers, for which processors take up to two hundred times as long.

Queries and keys of pretrained models and gates that forget fast spread the exponents of features over more than a
dtype's range, where each number is either large enough to count or 0.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grid import CASES, CAUSAL_MAPS, HEAD_DIM, Case, build, qkv
from linattn import positions
from linattn.feature_maps import GroupedFeatureMap

LENGTH = 256
# Of all multiplications of a call, those of a subnormal number.
MOST = 0.01
PRODUCTS = ("aten::mm", "aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::addmm")


class Subnormal(TorchDispatchMode):
    """How many multiplications of products there are, and how many of a subnormal number."""

    def __init__(self) -> None:
        super().__init__()
        self.num_all, self.num_slow = 0, 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name in PRODUCTS:
            # What a product is added to is no factor.
            first, second = args[-2:]
            count = first.numel() * second.shape[-1]
            shares = [((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).double().mean() for x in (first, second)]
            self.num_all, self.num_slow = self.num_all + count, self.num_slow + count * float(sum(shares))
        return function(*args, **(kwargs or {}))


def tokens(size: float) -> list[Tensor]:
    """Queries and keys of a size, float32."""
    query, key, value = qkv(1, 2, 2, LENGTH, LENGTH, HEAD_DIM, HEAD_DIM, dtype=torch.float32)
    return [x.requires_grad_() for x in (query * size, key * size, value)]


@pytest.mark.parametrize("size", [8.0])
@pytest.mark.parametrize("case", [case for case in CASES if case.backend == "blocked"], ids=str)
def test_large_queries_and_keys(case: Case, size: float) -> None:
    leaves, feature_map = tokens(size), case.build()
    with Subnormal() as seen:
        torch.autograd.grad(case.attend(*leaves, feature_map).sum(), leaves, materialize_grads=True)
    assert seen.num_slow < MOST * seen.num_all, seen.num_slow / seen.num_all


@pytest.mark.parametrize("rate", [1.0])
@pytest.mark.parametrize("name", [name for name in CAUSAL_MAPS if not isinstance(build(name), GroupedFeatureMap)])
def test_gates_that_forget_fast(name: str, rate: float) -> None:
    leaves, feature_map = tokens(1.0), build(name)
    gates = positions.Gates(torch.full((1, 2, LENGTH), -rate))
    with Subnormal() as seen:
        out = positions.gated_attention_with_state(*leaves, feature_map, gates, backend="blocked").out
        torch.autograd.grad(out.sum(), leaves, materialize_grads=True)
    assert seen.num_slow < MOST * seen.num_all, seen.num_slow / seen.num_all
