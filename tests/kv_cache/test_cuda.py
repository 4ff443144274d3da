"""On a CUDA GPU merged keys, codes and tiers are what they are on the CPU, whole and in any cut."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from grid import qkv, relative_error
from linattn import MergedKV, MergedState

# What a GPU computes only a GPU shows; laws/test_devices.py holds the devices of tensors everywhere.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GPU, LENGTH = "cuda", 149
SIZES = {"num_queries": LENGTH, "num_keys": LENGTH, "head_dim": 16, "value_dim": 12}
CONFIGS = (
    MergedKV(4, 6, None),
    MergedKV(4, 20, 4),
    MergedKV(8, 20, (4, 3)),
    MergedKV(2, 32, bits=4, coded=((20, 4), (40, 2))),
    MergedKV(3, 0, coded=((17, 3.5),)),
    MergedKV(5, 9, None, 2, coded=((3, (2, 3)),)),
    MergedKV.within(20, head_dim=16, value_dim=12, recall="far"),
)


def streamed(given: list[Tensor], config: MergedKV, cuts: tuple[int, ...]) -> tuple[Tensor, MergedState]:
    """Piece by piece."""
    state, outs = None, []
    for piece in zip(*(x.split(cuts, 2) for x in given), strict=True):
        out, state = linattn.merged_attention_with_state(*piece, config, state, enable_gqa=True)
        outs.append(out)
    return torch.cat(outs, 2), state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_streams(config: MergedKV, dtype: torch.dtype) -> None:
    """Rounding decides a code now and then, and which keys are merged, in float32: most rows are alike there."""
    given = qkv(**SIZES, dtype=dtype)
    truth, after = streamed(list(given), config, (60, 1, 1, 87))
    found, state = streamed([x.to(GPU) for x in given], config, (60, 1, 1, 87))
    if dtype == torch.float64:
        assert relative_error(found.cpu(), truth) < 1e-11
        for x, y in zip(pytree.tree_leaves(state), pytree.tree_leaves(after), strict=True):
            if isinstance(x, Tensor):
                assert x.device.type == GPU
                torch.testing.assert_close(x.cpu(), y, rtol=1e-10, atol=1e-10)
    else:
        rows = (found.cpu() - truth).norm(dim=-1) / truth.norm(dim=-1)
        assert rows.median() < 1e-4
        assert relative_error(found.cpu(), truth) < 0.1


@pytest.mark.parametrize("config", [MergedKV(None, 6, bits=None), MergedKV(7, 20, bits=None)], ids=str)
def test_bidirectional(config: MergedKV) -> None:
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.3
    given, outs = qkv(**SIZES), []
    for device in ("cpu", GPU):
        tokens = [x.to(device) for x in given]
        outs.append(linattn.merged_attention(*tokens, config, enable_gqa=True, key_mask=mask.to(device)).cpu())
    assert relative_error(outs[1], outs[0]) < 1e-11


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_a_state_moves_to_another_device_and_goes_on(config: MergedKV) -> None:
    """By `to`, and through a file: a file of the GPU's is read on a CPU."""
    given = [x.to(GPU) for x in qkv(**SIZES)]
    first, last = ([x[:, :, part] for x in given] for part in (slice(100), slice(100, LENGTH)))
    state = linattn.merged_attention_with_state(*first, config, None, enable_gqa=True).state
    whole = linattn.merged_attention_with_state(*last, config, state, enable_gqa=True).out
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, map_location="cpu", weights_only=True)
    for moved in (state.to("cpu"), read):
        on_cpu = [x.cpu() for x in last]
        found = linattn.merged_attention_with_state(*on_cpu, config, moved, enable_gqa=True).out
        assert relative_error(found, whole.cpu()) < 1e-11
    with pytest.raises(ValueError, match="device"):
        linattn.merged_attention_with_state(*last, config, read, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_enough_keys_are_softmax_attention(dtype: torch.dtype) -> None:
    given = [x.to(GPU, dtype) for x in qkv(**SIZES)]
    truth = linattn.softmax_attention(*(x.double() for x in given), enable_gqa=True, is_causal=True)
    found = streamed(given, MergedKV(16, LENGTH, None), (60, 1, 1, 87))[0]
    assert relative_error(found, truth) < 4 * torch.finfo(dtype).eps
