"""What only a GPU can show of the kernels: sizes that an interpreter never ends, and what ran side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import linattn
from grid import relative_error
from linattn.feature_maps import FavorPlus, FeatureMap

# Races, real sizes and addresses beyond 2**31 do not exist in the interpreter, which runs the laws everywhere else.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def tokens(length: int, width: int, dtype: torch.dtype, *, batch: int = 2, heads: int = 4) -> list[Tensor]:
    """Queries, and keys and values of half as many heads."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(batch, count, length, width) for count in (heads, heads // 2, heads // 2)]
    found = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in found]


def gradients(given: list[Tensor], feature_map: FeatureMap, backend: str, *, is_causal: bool) -> list[Tensor]:
    """Outputs and the gradients of tokens."""
    leaves = [x.detach().requires_grad_() for x in given]
    out = linattn.linear_attention(*leaves, feature_map, is_causal=is_causal, enable_gqa=True, backend=backend)
    return [out, *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("width", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_real_sizes_are_right(dtype: torch.dtype, width: int, is_causal: bool) -> None:
    if width > 128 and dtype != torch.bfloat16:
        return
    given, feature_map = tokens(4109, width, dtype), FavorPlus(width, 256).cuda()
    truth = gradients([x.double() for x in given], feature_map, "blocked", is_causal=is_causal)
    # Products of float16 are TF32's; those of bfloat16, and the weights, are rounded once each.
    allowed = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1.6e-2}[dtype]
    for index, (x, y) in enumerate(
        zip(gradients(given, feature_map, "triton", is_causal=is_causal), truth, strict=True)
    ):
        assert relative_error(x, y) < allowed, f"item {index}"


def test_twenty_runs_are_equal_to_the_bit() -> None:
    given, feature_map = tokens(2100, 64, torch.bfloat16), FavorPlus(64, 256).cuda()
    first = gradients(given, feature_map, "triton", is_causal=True)
    for _ in range(19):
        again = gradients(given, feature_map, "triton", is_causal=True)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


def test_no_later_token_reaches_an_earlier_row() -> None:
    given, feature_map = tokens(2100, 64, torch.bfloat16), FavorPlus(64, 256).cuda()
    expected = gradients(given, feature_map, "triton", is_causal=True)[0][:, :, :1000]
    changed = [torch.cat((x[:, :, :1000], -30 * x[:, :, 1000:]), 2) for x in given]
    assert torch.equal(gradients(changed, feature_map, "triton", is_causal=True)[0][:, :, :1000], expected)


def test_few_heads_are_summed_side_by_side() -> None:
    given, feature_map = tokens(30_000, 64, torch.float32, batch=1, heads=2), FavorPlus(64, 64).cuda()
    truth = gradients([x.double() for x in given], feature_map, "blocked", is_causal=True)
    for x, y in zip(gradients(given, feature_map, "triton", is_causal=True), truth, strict=True):
        assert relative_error(x, y) < 1e-5


@torch.no_grad()
def test_more_than_two_to_the_thirty_first_elements() -> None:
    """The last rows, beside those of a call that resumes from the state of the others."""
    length, last, feature_map = 2**25 + 4096, 4096, FavorPlus(64, 32).cuda()
    given = [x.detach() for x in tokens(length, 64, torch.bfloat16, batch=1, heads=2)]
    given[0] = given[0][:, :1]
    whole = linattn.linear_attention(*given, feature_map, is_causal=True, backend="triton")[:, :, -last:]
    state = linattn.State.empty(
        feature_map, batch_size=1, num_heads=1, value_dim=64, dtype=torch.bfloat16, device="cuda"
    ).absorb(feature_map, *(x[:, :, :-last] for x in given[1:]))
    late = [x[:, :, -last:] for x in given]
    found = linattn.linear_attention_with_state(*late, feature_map, state, backend="triton").out
    assert relative_error(found, whole) < 1.6e-2
