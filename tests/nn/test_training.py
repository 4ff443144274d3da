"""What training asks of a model: compilation, recomputed activations, autocast, several processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from layers import LAYERS, hybrid, text, tokens
from linattn.nn import Block, LinearLM, RedrawSchedule
from split_models import gradients_of_replicas

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Of all parameters, in order."""
    return list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


# Without a mask every kind is compiled as a step of a stream, below.
@pytest.mark.parametrize(
    ("kind", "is_masked"), [*((kind, True) for kind in LAYERS), ("random", False), ("softmax", False)]
)
def test_a_block_compiles_whole(kind: str, is_masked: bool) -> None:
    torch.compiler.reset()
    block, x = Block(LAYERS[kind](is_causal=True)), tokens(2, 7)
    mask = (torch.arange(7) > torch.tensor([[1], [3]])) if is_masked else None
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    found, expected = compiled(x, key_mask=mask), block(x, key_mask=mask)
    torch.testing.assert_close(found, expected, **CLOSE)
    weight = tokens(2, 7, seed=1)
    pairs = zip(gradients(block, (found * weight).sum()), gradients(block, (expected * weight).sum()), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, **CLOSE)


# A chunk of several tokens is a call of each kind, whose graphs are above.
@pytest.mark.parametrize(
    ("kind", "length"),
    [*((kind, 1) for kind in LAYERS), *((kind, 3) for kind in ("rotary", "gated-window", "softmax"))],
)
def test_a_step_of_a_stream_compiles_whole(kind: str, length: int) -> None:
    torch.compiler.reset()
    block, x = Block(LAYERS[kind](is_causal=True)).requires_grad_(False), tokens(2, 4 + length)
    state = block.forward_with_state(x[:, :4]).state
    step = torch.compile(block.forward_with_state, fullgraph=True, backend="aot_eager")
    found, expected = step(x[:, 4:], state), block.forward_with_state(x[:, 4:], state)
    torch.testing.assert_close(found.out, expected.out, **CLOSE)
    assert torch.equal(found.state.num_tokens, expected.state.num_tokens)


def streamed(model: LinearLM, words: torch.Tensor, key_mask: torch.Tensor) -> torch.Tensor:
    """Logits of a text in two parts."""
    first = model.forward_with_state(words[:, :4], key_mask=key_mask[:, :4])
    rest = model.forward_with_state(words[:, 4:], first.state, key_mask=key_mask[:, 4:])
    return torch.cat((first.logits, rest.logits), 1)


def saved(run: Callable[[], object]) -> int:
    """Numbers that are kept for the backward pass."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: sizes.append(y.numel()) or y, lambda y: y):
        run()
    return sum(sizes)


@pytest.mark.parametrize("call", [LinearLM.forward, streamed], ids=["entire", "in parts"])
def test_recomputed_activations_change_no_gradient(call: Callable[..., torch.Tensor]) -> None:
    model, words = hybrid(), text(2, 9)
    mask = torch.arange(9) >= torch.tensor([[0], [2]])
    stored, size = call(model, words, key_mask=mask)[mask], saved(lambda: call(model, words, key_mask=mask))
    model.gradient_checkpointing = True
    recomputed = call(model, words, key_mask=mask)[mask]
    torch.testing.assert_close(recomputed, stored, rtol=0, atol=0)
    for one, other in zip(gradients(model, stored.sum()), gradients(model, recomputed.sum()), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert saved(lambda: call(model, words, key_mask=mask)) < size / 2


def test_checkpointing_a_block_stores_less() -> None:
    block, x = Block(LAYERS["random"](is_causal=True)), tokens(1, 64).requires_grad_()
    assert saved(lambda: checkpoint(block, x, use_reentrant=False)) < saved(lambda: block(x)) / 4


@pytest.mark.parametrize("kind", LAYERS)
def test_autocast_rounds_and_no_more(kind: str) -> None:
    """bfloat16 keeps 8 bits: outputs and gradients as far from float32's as some roundings take them."""
    block, x = Block(LAYERS[kind](is_causal=True, dtype=torch.float32)), tokens(2, 16).float()
    weight = tokens(2, 16, seed=1).float()
    exact = block(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = block(x)
    ratio = (cast.float() - exact).norm() / exact.norm()
    assert 0 < ratio < 16 * 2**-8
    for one, other in zip(
        gradients(block, (cast * weight).sum()), gradients(block, (exact * weight).sum()), strict=True
    ):
        assert one.isfinite().all()
        assert (one - other).norm() <= 32 * 2**-8 * other.norm() + 1e-3


@pytest.mark.xdist_group("ranks")
def test_two_processes_have_the_gradients_of_one(on_ranks) -> None:
    """In float64, between two redraws of the schedule, alike on both."""
    of_ranks = on_ranks(2, gradients_of_replicas)
    torch.manual_seed(0)
    model, words = hybrid(), text(4, 9)
    RedrawSchedule(model, every=1).step()
    cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()).backward()
    for found in of_ranks:
        for one, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad, rtol=1e-6, atol=1e-12)
