"""Gates computed from tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grid import build, qkv, tokens
from linattn.positions import ForgetGate, Gate, gated_attention_with_state

LENGTH = 23


@pytest.mark.parametrize("kind", ["none", "exponential", "complement"])
def test_gates_from_the_input(kind: str) -> None:
    gate = ForgetGate(6, 2, input_gate=kind, soft_cap=3.0).double()
    x = tokens(2, LENGTH, 6)
    fresh = gate(x)
    assert fresh.log_forget.shape == (2, 2, LENGTH)
    torch.testing.assert_close(fresh.log_forget, fresh.log_forget[:1, :, :1].expand(2, -1, LENGTH))
    with torch.no_grad():
        for index, parameter in enumerate(gate.parameters()):
            parameter.add_(tokens(*parameter.shape, seed=index))
    log_forget, log_input = gate(x)
    a = (x @ gate.forget.weight.mT + gate.forget.bias).mT
    torch.testing.assert_close(log_forget.exp(), a.sigmoid())
    if kind == "none":
        assert log_input is None
    elif kind == "complement":
        torch.testing.assert_close(log_input.exp(), 1 - a.sigmoid())
    else:
        raw = (x @ gate.input.weight.mT + gate.input.bias).mT
        torch.testing.assert_close(log_input, 3 * torch.tanh(raw / 3))
    q, k, v = qkv(num_queries=LENGTH, num_keys=LENGTH)
    out = gated_attention_with_state(q, k, v, build("FavorPlus"), gate(x), enable_gqa=True).out
    assert all(bool(g.abs().max() > 0) for g in torch.autograd.grad(out.square().sum(), list(gate.parameters())))


def test_gates_are_wide_under_autocast() -> None:
    """bfloat16 logarithms would lose what they sum to."""
    gate, x = ForgetGate(6, 2, input_gate="exponential"), tokens(1, 3, 6, dtype=torch.bfloat16)
    for layer in (gate.forget, gate.input):
        torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        found = gate(x)
    for wide, exact in zip(found, gate(x.float()), strict=True):
        assert wide.dtype == torch.float32
        assert torch.equal(wide, exact)


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "an unknown input gate": (lambda: ForgetGate(4, 2, input_gate="free"), "input_gate must be one of"),
    "a soft cap of 0": (lambda: ForgetGate(4, 2, soft_cap=0), "soft_cap must be a finite number > 0"),
    "no width": (lambda: ForgetGate(0, 2), "embed_dim must be an integer"),
    "no heads": (lambda: ForgetGate(4, 0), "num_heads must be an integer"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_words(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_it_is_a_gate_of_its_heads() -> None:
    gate = ForgetGate(4, 2)
    assert isinstance(gate, Gate)
    assert gate.num_heads == 2
