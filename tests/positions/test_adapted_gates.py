"""Gates call their layers: what others put around or on a projection, adapters and pruning among them, is in the gates.

Letters: B batch, L tokens, E width.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from grid import tokens
from layers import VOCABULARY, WIDTH, linear, text
from linattn.feature_maps import EluPlusOne
from linattn.nn import Block, LinearLM
from linattn.positions import ForgetGate
from linattn.positions.gates import InputGate

E, HEADS, CAP = 6, 2, 3.0
KINDS: tuple[InputGate, ...] = ("none", "exponential", "complement")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")


class Adapter(nn.Module):
    """A projection and a correction of low rank, as libraries of adapters wrap it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        kind = {"bias": False, "dtype": base.weight.dtype}
        self.down, self.up = nn.Linear(base.in_features, 2, **kind), nn.Linear(2, base.out_features, **kind)
        for number, layer in enumerate((self.down, self.up)):
            with torch.no_grad():
                layer.weight.copy_(tokens(*layer.weight.shape, seed=20 + number))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(gate: ForgetGate, name: str) -> None:
    """Put an adapter around a projection."""
    setattr(gate, name, Adapter(getattr(gate, name)))


def patched(gate: ForgetGate, name: str) -> None:
    """Give the layer a forward of its own, as offloading does."""
    layer = getattr(gate, name)
    own = layer.forward
    layer.forward = lambda x: 2 * own(x)


def hooked(gate: ForgetGate, name: str) -> None:
    """Have a hook write the weight before each call."""

    def write(layer: nn.Linear, _: object) -> None:
        with torch.no_grad():
            layer.weight.fill_(0.25)

    getattr(gate, name).register_forward_pre_hook(write)


def normed(gate: ForgetGate, name: str) -> None:
    """A norm of the weight by a hook, and not at its own length."""
    with torch.no_grad():
        nn.utils.weight_norm(getattr(gate, name), "weight").weight_g.mul_(1.5)


def parametrized(gate: ForgetGate, name: str) -> None:
    """The same by a parametrization."""
    with torch.no_grad():
        parametrizations.weight_norm(getattr(gate, name), "weight").parametrizations.weight.original0.mul_(1.5)


CHANGES: dict[str, Callable[[ForgetGate, str], object]] = {
    "plain": lambda gate, name: None,
    "adapter": adapted,
    "pruned": lambda gate, name: prune.l1_unstructured(getattr(gate, name), "weight", amount=0.5),
    "pruned bias": lambda gate, name: prune.random_unstructured(getattr(gate, name), "bias", amount=1),
    "norm by a hook": normed,
    "norm by a parametrization": parametrized,
    "another forward": patched,
    "a hook that writes": hooked,
}


def weights_of(change: str, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """W and b that a changed projection stands for, (Hkv, E) and (Hkv,), in float64."""
    base = layer.base if isinstance(layer, Adapter) else layer
    weight, bias = base.weight.double(), base.bias.double()
    if change == "adapter":
        weight = weight + layer.up.weight.double() @ layer.down.weight.double()
    elif change == "pruned":
        weight = layer.weight_orig.double() * layer.weight_mask.double()
    elif change == "pruned bias":
        bias = layer.bias_orig.double() * layer.bias_mask.double()
    elif change == "norm by a hook":
        v = layer.weight_v.double()
        weight = layer.weight_g.double() * v / v.norm(dim=1, keepdim=True)
    elif change == "another forward":
        weight, bias = 2 * weight, 2 * bias
    elif change == "a hook that writes":
        weight = torch.full_like(weight, 0.25)
    return weight, bias


def gate_of(kind: InputGate, change: str, dtype: torch.dtype = torch.float64) -> ForgetGate:
    """A gate as training might leave it, with each projection changed alike."""
    gate = ForgetGate(E, HEADS, input_gate=kind, soft_cap=CAP)
    with torch.no_grad():
        for index, parameter in enumerate(gate.parameters()):
            parameter.add_(tokens(*parameter.shape, seed=index))
    gate.to(dtype)
    for name in ("forget", "input"):
        if getattr(gate, name) is not None:
            CHANGES[change](gate, name)
    return gate


def formula(gate: ForgetGate, change: str, x: Tensor) -> list[Tensor]:
    """log σ(a), and what the input gate is, in float64."""
    weight, bias = weights_of(change, gate.forget)
    a = (x.double() @ weight.mT + bias).mT
    wanted = [nn.functional.logsigmoid(a)]
    if gate.input_gate == "complement":
        wanted.append(nn.functional.logsigmoid(-a))
    elif gate.input is not None:
        weight, bias = weights_of(change, gate.input)
        wanted.append(CAP * torch.tanh((x.double() @ weight.mT + bias).mT / CAP))
    return wanted


def given(gate: ForgetGate, x: Tensor) -> list[Tensor]:
    """The gates of tokens, those that there are."""
    return [each for each in gate(x) if each is not None]


def moves(gate: ForgetGate) -> list[Tensor]:
    """Its trainable parameters."""
    return [x for x in gate.parameters() if x.requires_grad]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_gates_are_those_of_the_changed_layer(kind: InputGate, change: str) -> None:
    """Gradients too, before a step of an optimizer and after."""
    gate, x = gate_of(kind, change), tokens(2, 5, E)
    for _ in range(2):
        found = given(gate, x)
        wanted = formula(gate, change, x)
        for y, z in zip(found, wanted, strict=True):
            torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            plain = formula(gate_of(kind, "plain"), "plain", x)
        assert (change == "plain") == torch.allclose(found[0], plain[0], rtol=1e-3)
        if change == "a hook that writes":
            return
        pairs = zip(*(torch.autograd.grad(sum(y.square().sum() for y in each), moves(gate))
                      for each in (found, wanted)), strict=True)  # fmt: skip
        for y, z in pairs:
            torch.testing.assert_close(y, z, rtol=1e-11, atol=1e-11)
        sum(y.square().sum() for y in given(gate, x)).backward()
        assert all(bool(y.grad.any()) for y in moves(gate) if y.numel() > 2)
        torch.optim.SGD(moves(gate), lr=0.1).step()
        gate.zero_grad()
        if change == "plain":
            return


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hooks_on_a_projection_are_called(dtype: torch.dtype) -> None:
    gate, x = ForgetGate(E, HEADS).to(dtype), torch.zeros(1, 1, E, dtype=dtype)
    gate.forget.register_forward_hook(lambda _, args, out: out + 2)
    wanted = torch.nn.functional.logsigmoid(gate.forget.bias.float() + 2)
    torch.testing.assert_close(gate(x).log_forget.flatten(), wanted, rtol=2**-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_gates_of_models_in_half_precision(change: str, dtype: torch.dtype) -> None:
    """Plain layers compute in float32; changed ones in their own dtype, of which each number takes some roundings."""
    gate, x = gate_of("exponential", change, dtype), tokens(2, 5, E).to(dtype)
    found = given(gate, x)
    sizes = [(x.double().abs() @ weight.abs().mT + bias.abs()).mT
             for weight, bias in (weights_of(change, layer) for layer in (gate.forget, gate.input))]  # fmt: skip
    # E + 2 terms, each rounded in the product, the sum and, of a norm or a correction, thrice before.
    eps = torch.finfo(torch.float32 if change == "plain" else dtype).eps
    for y, z, size in zip(found, formula(gate, change, x), sizes, strict=True):
        assert y.dtype == torch.float32
        spread = 3 if change == "adapter" else 1
        assert bool(((y.double() - z).abs() <= (E + 5) * spread * eps * (size + 1)).all())


@pytest.mark.parametrize("change", CHANGES)
def test_autocast_changes_no_gate(change: str) -> None:
    gate, x = gate_of("exponential", change, torch.float32), tokens(2, 5, E, dtype=torch.bfloat16)
    plain = given(gate, x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = given(gate, x)
    for y, z in zip(cast, plain, strict=True):
        assert y.dtype == torch.float32
        assert torch.equal(y, z)


@pytest.mark.parametrize("change", ["plain", "adapter", "pruned", "norm by a parametrization"])
def test_compiled_gates_are_the_same(change: str) -> None:
    torch.compiler.reset()
    gate, x = gate_of("exponential", change), tokens(2, 5, E)
    compiled = torch.compile(gate, fullgraph=True, backend="aot_eager")
    results = []
    for function in (gate, compiled):
        found = [each for each in function(x) if each is not None]
        results.append([*found, *torch.autograd.grad(sum(y.square().sum() for y in found), moves(gate))])
    for y, z in zip(*results, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)


def model() -> LinearLM:
    """A language model of one gated layer."""
    torch.manual_seed(0)
    gate = ForgetGate(WIDTH, 2, input_gate="exponential")
    return LinearLM(VOCABULARY, [Block(linear(EluPlusOne(4), gate=gate, is_causal=True)).double()])


def trained(of: LinearLM, steps: int = 3) -> list[float]:
    """Losses of some steps of training."""
    words, losses = text(2, 9), []
    optimizer = torch.optim.SGD([x for x in of.parameters() if x.requires_grad], lr=0.5)
    for _ in range(steps):
        loss = nn.functional.cross_entropy(of(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_pruned_model_trains_and_stays_pruned() -> None:
    pruned = model()
    layers = [(each, "weight") for each in pruned.modules() if isinstance(each, nn.Linear)]
    prune.global_unstructured(layers, prune.RandomUnstructured, amount=0.3)
    forget = pruned.blocks[0].attention.gate.forget
    with torch.no_grad():
        forget.weight_orig.add_(0.3)
    before = forget.weight_orig.detach().clone()
    losses = trained(pruned)
    assert losses == sorted(losses, reverse=True)
    assert not torch.equal(forget.weight_orig, before)
    pruned(text(1, 3))
    assert torch.equal(forget.weight, forget.weight_orig * forget.weight_mask)
    # To where the pruning is made final nothing changes.
    words = text(2, 7, seed=3)
    wanted = pruned(words)
    for layer, name in layers:
        prune.remove(layer, name)
    torch.testing.assert_close(pruned(words), wanted, rtol=1e-12, atol=1e-12)


def test_adapters_of_gates_alone_learn_and_can_be_merged() -> None:
    adapted_model = model().requires_grad_(False)
    gate = adapted_model.blocks[0].attention.gate
    gate.forget = Adapter(gate.forget)
    before = [x.detach().clone() for x in (gate.forget.up.weight, gate.forget.down.weight)]
    losses = trained(adapted_model, steps=4)
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]
    after = (gate.forget.up.weight, gate.forget.down.weight)
    assert not any(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    words = text(2, 7, seed=3)
    wanted = adapted_model(words)
    weight, bias = weights_of("adapter", gate.forget)
    gate.forget = gate.forget.base
    assert not torch.allclose(adapted_model(words), wanted, rtol=1e-6)
    with torch.no_grad():
        gate.forget.weight.copy_(weight)
        gate.forget.bias.copy_(bias)
    torch.testing.assert_close(adapted_model(words), wanted, rtol=1e-11, atol=1e-11)
