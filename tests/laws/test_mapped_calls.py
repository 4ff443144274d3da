"""torch.vmap over any of a call's tensors is a loop over them, the others shared by all; so are its gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from grid import CAUSAL_MAPS, MAPS, build, qkv, sums, tokens, total
from linattn import MergedKV, nn, positions
from linattn.feature_maps import FavorPlus
from merged_rows import MergedLayer

COUNT, LENGTH = 2, 13
SUBSETS = [subset for size in range(1, 6) for subset in itertools.combinations(range(5), size)]
ALONE = [*((place,) for place in range(5)), (0, 3), (1, 2), (0, 1, 2, 3, 4)]
MERGED = {
    "causal": (MergedKV(4, 6, bits=None), True),
    "4 bits": (MergedKV(4, 6, bits=4), True),
    "bidirectional": (MergedKV(4, 6), False),
    "no window": (MergedKV(None, 6), False),
}
# torch says so of its own operators that it maps one by one.
SLOWLY = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def stacks() -> list[Tensor]:
    """Queries, keys, values, masks and biases of several calls."""
    batches = [qkv(num_queries=LENGTH, num_keys=LENGTH, seed=10 * seed) for seed in range(COUNT)]
    masks = tokens(COUNT, 2, LENGTH, seed=7) > -0.8
    return [*map(torch.stack, zip(*batches, strict=True)), masks, tokens(COUNT, 2, 2, LENGTH, seed=8)]


def looped(function: Callable[..., object], dims: Sequence[int | None], arguments: Sequence[Tensor]) -> object:
    """What torch.vmap should give."""
    calls = [
        [x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)] for i in range(COUNT)
    ]
    return pytree.tree_map(lambda *x: torch.stack(x), *(function(*call) for call in calls))


def agrees(function: Callable[..., object], subset: Sequence[int], dim: int = 0) -> None:
    """The law, for the arguments in the subset mapped along a dimension."""
    dims = [dim if place in subset else None for place in range(5)]
    arguments = [x.movedim(0, dim) if place in subset else x[0] for place, x in enumerate(stacks())]
    found, wanted = torch.vmap(function, in_dims=tuple(dims))(*arguments), looped(function, dims, arguments)
    for x, y in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


def attention(name: str, is_causal: bool) -> Callable[..., Tensor]:
    """A call with merged keys under a name of MERGED, or by a map."""
    if name in MERGED:
        how, is_causal = MERGED[name]
        call: Callable[..., Tensor] = linattn.merged_attention
    else:
        how, call = build(name).requires_grad_(False), linattn.linear_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor, key_bias: Tensor) -> Tensor:
        if name in MERGED and is_causal:
            # Where a mask cannot be read, masked tokens after the first live one take the room of others.
            key_mask = key_mask.cumsum(-1) > 0
        options = {"key_mask": key_mask, "key_bias": key_bias, "is_causal": is_causal, "enable_gqa": True}
        return call(query, key, value, how, **options)

    return attend


@pytest.mark.parametrize("name", MERGED)
def test_with_merged_keys_any_tensors_are_mapped(name: str) -> None:
    for subset in SUBSETS:
        agrees(attention(name, True), subset)


@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", MAPS)
def test_with_any_map_each_tensor_is_mapped_alone(name: str, is_causal: bool) -> None:
    if is_causal and name not in CAUSAL_MAPS:
        return
    for subset in ALONE:
        agrees(attention(name, is_causal), subset)


@pytest.mark.parametrize("name", [*MERGED, "FavorPlus", "Expansion", "Centred-Taylor"])
def test_mapped_along_any_dimension_and_twice(name: str) -> None:
    attend = attention(name, True)
    for subset, dim in (((0,), 1), ((1, 2), 2), ((3,), 1), ((4,), 2)):
        agrees(attend, subset, dim)
    query, key, value, mask, bias = stacks()

    def over_keys(function: Callable[..., object], x: Tensor) -> object:
        return function(lambda y: attend(x, y, value[0], mask[0], bias[0]))(key)

    found = torch.vmap(lambda x: over_keys(torch.vmap, x))(query)
    wanted = torch.stack([torch.stack([attend(x, y, value[0], mask[0], bias[0]) for y in key]) for x in query])
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@SLOWLY
@pytest.mark.parametrize("name", [*MERGED, "FavorPlus", "Expansion", "Centred-Taylor"])
@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_gradients_go_through_mapped_calls(name: str, place: int) -> None:
    """Of the mapped tensor and of those that are shared: summed over all calls, and call by call."""
    attend, given = attention(name, True), stacks()
    dims = [0 if at == place else None for at in range(5)]
    shared = [x if at == place else x[0] for at, x in enumerate(given)]
    floating = (0, 1, 2, 4)
    leaves = [x.clone().requires_grad_() if at in floating else x for at, x in enumerate(shared)]
    wanted_leaves = [leaves[at] for at in floating]
    mapped = torch.vmap(attend, in_dims=tuple(dims))
    truth = torch.autograd.grad(looped(attend, dims, leaves).square().sum(), wanted_leaves)
    by_autograd = torch.autograd.grad(mapped(*leaves).square().sum(), wanted_leaves)
    by_func = torch.func.grad(lambda *x: mapped(*x).square().sum(), argnums=floating)(*shared)
    for found in (by_autograd, by_func):
        for x, y in zip(found, truth, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    agrees(torch.func.grad(lambda *x: attend(*x).square().sum(), argnums=floating), (place,))


@pytest.mark.parametrize("name", ["FavorPlus", "Taylor", "Expansion"])
def test_gradients_go_through_mapped_gates(name: str) -> None:
    """A state's decay among them, which the second part of a stream makes."""
    feature_map = build(name)
    query, key, value = (x[0] for x in stacks()[:3])

    def attend(log_forget: Tensor) -> Tensor:
        state, outs = None, []
        for at in (slice(0, 8), slice(8, LENGTH)):
            part = positions.gated_attention_with_state(
                *(x[:, :, at] for x in (query, key, value)), feature_map, positions.Gates(log_forget[..., at]), state,
                enable_gqa=True,
            )  # fmt: skip
            state = part.state
            outs.append(part.out)
        return torch.cat(outs, 2)

    gates = -tokens(COUNT, 2, 2, LENGTH, seed=9).square()
    wanted = torch.func.grad(lambda x: torch.stack([attend(each) for each in x]).square().sum())(gates)
    found = torch.func.grad(lambda x: torch.vmap(attend)(x).square().sum())(gates)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["FavorPlus", "Expansion", "causal", "4 bits"])
@pytest.mark.parametrize("length", [1, LENGTH])
def test_states_and_tokens_are_mapped_apart(name: str, length: int) -> None:
    """A state of several streams under one token, one state under several tokens, and both."""
    how = MERGED[name][0] if name in MERGED else build(name)
    attend = linattn.merged_attention_with_state if name in MERGED else linattn.linear_attention_with_state
    given = stacks()[:3]

    def step(state: object, query: Tensor, key: Tensor, value: Tensor) -> linattn.Attended:
        return attend(query, key, value, how, state, enable_gqa=True)

    states = [step(None, *(x[i] for x in given)).state for i in range(COUNT)]
    stacked = pytree.tree_map(lambda *x: torch.stack(x), *states)
    tokens_after = [x.flip(0)[..., :length, :] for x in given]
    for dims in ((0, None, None, None), (0, 0, None, None), (None, 0, None, None), (None, None, 0, None), (0, 0, 0, 0)):
        arguments = [stacked if dims[0] == 0 else states[0]]
        arguments += [x if dim == 0 else x[0] for x, dim in zip(tokens_after, dims[1:], strict=True)]
        found = torch.vmap(step, in_dims=dims)(*arguments)
        for i in range(COUNT):
            call = [states[i] if dims[0] == 0 else states[0]]
            call += [x[i] if dim == 0 else x for x, dim in zip(arguments[1:], dims[1:], strict=True)]
            wanted = step(*call)
            state = pytree.tree_map(lambda x, i=i: x[i], found.state)
            torch.testing.assert_close(found.out[i], wanted.out, rtol=1e-11, atol=1e-11)
            if isinstance(state, linattn.State):
                # A token alone may have another m.
                torch.testing.assert_close(total(state, wanted.state.m), sums(wanted.state), rtol=1e-11, atol=1e-11)
                continue
            for x, y in zip(*map(pytree.tree_leaves, (state, wanted.state)), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@SLOWLY
@pytest.mark.parametrize("name", ["merged", "softmax", "gated softmax", "map"])
def test_layers_are_mapped_whose_parameters_require_gradients(name: str) -> None:
    """Under torch.vmap a tensor does not say that gradients follow it."""
    torch.manual_seed(0)
    gate = positions.ForgetGate(16, 2)
    layer = {
        "merged": lambda: MergedLayer(is_causal=True),
        "softmax": lambda: nn.SoftmaxAttention(16, 2, is_causal=True),
        "gated softmax": lambda: nn.SoftmaxAttention(16, 2, is_causal=True, gate=gate),
        "map": lambda: nn.LinearAttention(16, 2, build("FavorPlus"), is_causal=True, gate=gate),
    }[name]().double()
    x = tokens(COUNT, 2, LENGTH, 16)
    parameters = list(layer.parameters())
    found, wanted = torch.vmap(layer)(x), torch.stack([layer(each) for each in x])
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    grads = (torch.autograd.grad(out.square().sum(), parameters) for out in (found, wanted))
    for y, z in zip(*grads, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["FavorPlus", "Taylor", "Centred-call-Taylor"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
def test_relative_biases_are_mapped_and_differentiated(name: str, is_causal: bool) -> None:
    if is_causal and name not in CAUSAL_MAPS:
        return
    feature_map = build(name).requires_grad_(False)
    *given, mask, _ = stacks()
    tables = tokens(COUNT, 2, LENGTH if is_causal else 2 * LENGTH - 1, seed=3) / 4

    def attend(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor, bias: Tensor) -> Tensor:
        options = {"key_mask": key_mask, "is_causal": is_causal, "enable_gqa": True}
        return positions.relative_bias_attention(query, key, value, feature_map, bias, **options)

    arguments = [*given, mask, tables]
    for subset in ALONE:
        dims = tuple(0 if place in subset else None for place in range(5))
        chosen = [x if place in subset else x[0] for place, x in enumerate(arguments)]
        found, wanted = torch.vmap(attend, in_dims=dims)(*chosen), looped(attend, dims, chosen)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    floating = (0, 1, 2, 4)
    leaves = [x[0].clone().requires_grad_() if place in floating else x[0] for place, x in enumerate(arguments)]
    by_autograd = torch.autograd.grad(attend(*leaves).square().sum(), [leaves[place] for place in floating])
    by_func = torch.func.grad(lambda *x: attend(*x).square().sum(), argnums=floating)(*(x[0] for x in arguments))
    for x, y in zip(by_func, by_autograd, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_places_of_tokens_and_rows_are_mapped() -> None:
    """Those of a learned code, which a mask counts, and those of the rows that are looked at."""
    codes = positions.LearnedCodes(8, 2, max_length=LENGTH)
    layer = nn.LinearAttention(16, 2, FavorPlus(10, 8), is_causal=True, positions=codes).double()
    x, mask = tokens(COUNT, 2, LENGTH, 16), stacks()[3]
    found = torch.vmap(lambda each, key_mask: layer(each, key_mask=key_mask))(x, mask)
    wanted = torch.stack([layer(each, key_mask=key_mask) for each, key_mask in zip(x, mask, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    query, key = (each[0] for each in stacks()[:2])

    def rows(index: Tensor) -> Tensor:
        return linattn.attention_rows(query, key, build("FavorPlus"), index, is_causal=True, enable_gqa=True)

    index = torch.tensor([[3, -1], [0, -LENGTH]])
    mapped = torch.vmap(rows)(index)
    torch.testing.assert_close(mapped, torch.stack([rows(each) for each in index]), rtol=1e-11, atol=1e-11)
