"""On a CUDA GPU linear attention in plain torch is what it is on the CPU: every map, backend and direction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import linattn
from grid import CASES, CAUSAL_MAPS, SOFTMAX_MAPS, Case, build, qkv, relative_error
from layers import LAYERS, hybrid, text, tokens

# What a GPU computes only a GPU shows; test_devices.py holds the devices of tensors everywhere.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GPU = "cuda"
# Sums of roundings in another order: so many times that of one number.
ROUNDINGS = 40


def allowed(map_name: str, dtype: torch.dtype) -> float:
    """Of a signed map the denominator is a difference, which costs it digits."""
    return ROUNDINGS * torch.finfo(dtype).eps * (1 if build(map_name).nonnegative else 1000)


def outcome(case: Case, device: str, dtype: torch.dtype, **options: object) -> list[Tensor]:
    """Outputs, and the gradients of tokens, biases and parameters; some keys are masked."""
    leaves = [x.to(device, dtype).requires_grad_() for x in qkv(dtype=dtype)]
    bias = tokens(2, 37)[..., :2].mT.to(device, dtype).requires_grad_()
    mask = torch.ones(2, 37, dtype=torch.bool, device=device)
    mask[0, 5:9], mask[1, :3] = False, False
    feature_map = case.build().to(device)
    out = case.attend(*leaves, feature_map, key_mask=mask, key_bias=bias, **options)
    followed = [x for x in feature_map.parameters() if x.requires_grad]
    total = (out * torch.arange(out.numel(), device=device).view(out.shape).cos()).sum()
    return [out, *torch.autograd.grad(total, (*leaves, bias, *followed))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case: Case, dtype: torch.dtype) -> None:
    truth = outcome(case, "cpu", torch.float64)
    for index, (x, y) in enumerate(zip(outcome(case, GPU, dtype), truth, strict=True)):
        assert x.device.type == GPU
        assert relative_error(x.cpu(), y) < allowed(case.map_name, dtype), f"item {index}"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("map_name", ["FavorPlus", "Expansion-2", "LearnedExponential"])
def test_a_window_beside_it(map_name: str, backend: str, is_causal: bool) -> None:
    case = Case(map_name, backend, is_causal)
    truth = outcome(case, "cpu", torch.float64, window=4)
    for index, (x, y) in enumerate(zip(outcome(case, GPU, torch.float64, window=4), truth, strict=True)):
        assert relative_error(x.cpu(), y) < allowed(map_name, torch.float64), f"item {index}"


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_streams(map_name: str, window: int | None) -> None:
    """Pieces and single tokens; the state moves to the CPU and back on the way."""
    if window and not (map_name in SOFTMAX_MAPS and build(map_name).nonnegative):
        return
    options = {"enable_gqa": True, "window": window}
    whole = linattn.linear_attention(*qkv(), build(map_name), is_causal=True, **options)
    feature_map, state, outs = build(map_name).to(GPU), None, []
    for index, parts in enumerate(zip(*(x.to(GPU).split((17, 1, 1, 18), 2) for x in qkv()), strict=True)):
        found = linattn.linear_attention_with_state(*parts, feature_map, state, **options)
        state = found.state.to("cpu").to(GPU) if index == 1 else found.state
        outs.append(found.out)
    assert relative_error(torch.cat(outs, 2).cpu(), whole) < allowed(map_name, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "blocked", "auto"])
def test_sixteen_bits(backend: str, dtype: torch.dtype) -> None:
    """A result is rounded once, features, weights and sums once each: four halves of a last place, twice."""
    given = [x.to(dtype) for x in qkv()]
    truth = linattn.linear_attention(
        *(x.double() for x in given), build("FavorPlus"), enable_gqa=True, is_causal=True, backend="reference"
    )
    found = linattn.linear_attention(
        *(x.to(GPU) for x in given), build("FavorPlus").to(GPU), enable_gqa=True, is_causal=True, backend=backend
    )
    assert relative_error(found.cpu(), truth) < 4 * torch.finfo(dtype).eps


def test_autocast_and_default_device() -> None:
    given, feature_map = [x.float().to(GPU) for x in qkv()], build("FavorPlus").to(GPU)
    options = {"enable_gqa": True, "is_causal": True, "backend": "blocked"}
    expected = linattn.linear_attention(*given, feature_map, **options)
    with torch.autocast(GPU, torch.bfloat16):
        found = linattn.linear_attention(*given, feature_map, **options)
    assert torch.equal(found, expected)
    cpu = [x.cpu() for x in given]
    expected = linattn.linear_attention(*cpu, build("FavorPlus"), **options)
    with torch.device(GPU):
        found = linattn.linear_attention(*cpu, build("FavorPlus"), **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind: str) -> None:
    """A text at once, and token by token."""
    torch.manual_seed(0)
    layer, x = LAYERS[kind](is_causal=True), tokens(2, 9)
    truth = layer(x)
    layer = layer.to(GPU)
    assert relative_error(layer(x.to(GPU)).cpu(), truth) < 1e-11
    state, outs = None, []
    for token in x.to(GPU).split(1, 1):
        out, state = layer.forward_with_state(token, state)
        outs.append(out)
    assert relative_error(torch.cat(outs, 1).cpu(), truth) < 1e-11


def test_a_language_model_trains() -> None:
    """The same losses step by step."""
    losses = []
    for device in ("cpu", GPU):
        torch.manual_seed(0)
        model = hybrid().to(device)
        optimizer, ids = torch.optim.AdamW(model.parameters(), 1e-2), text(2, 20).to(device)
        steps = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
    assert losses[1] == pytest.approx(losses[0], rel=1e-8)
