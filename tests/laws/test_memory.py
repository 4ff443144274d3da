"""No output is left unwritten, and nothing of size L × R or L × L is ever made."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grid import CASES, PAIRED_CASES, Case, qkv

LINEAR_CASES = tuple(c for c in CASES if c.backend != "reference")


@pytest.mark.parametrize("case", PAIRED_CASES, ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_output_is_written(case: Case, blocks_of) -> None:
    blocks_of(8)
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, 5:9], mask[1, :11] = False, False
    leaves = [x.requires_grad_() for x in qkv()]
    out = case.attend(*leaves, case.build(), key_mask=mask)
    assert out.isfinite().all()
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert grad.isfinite().all()


class Largest(TorchDispatchMode):
    """The largest tensor any operation returned, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() >= x.numel() * x.element_size():
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
def test_no_tensor_outgrows_the_inputs(case: Case, blocks_of) -> None:
    """R ≥ 8 features, one head: an L × R tensor would be larger than the inputs for all maps but the elementwise ones,
    and L × L larger for every map. An Expansion's centres are small beside 768 tokens."""
    blocks_of(32)
    length, head_dim = 768 if "Expansion" in case.map_name else 384, 4
    leaves = [x.requires_grad_() for x in qkv(1, 2, 2, length, length, head_dim, head_dim, dtype=torch.float32)]
    feature_map = case.build(head_dim)
    with Largest() as largest:
        out = case.attend(*leaves, feature_map)
        torch.autograd.grad(out.sum(), leaves)
    # The largest things are the inputs and their gradients, with one column more for [v, 1].
    assert largest.numel <= 2 * length * (head_dim + 1)
