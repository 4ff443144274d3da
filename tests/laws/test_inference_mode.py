"""States made under torch.inference_mode are continued with gradients; while it lasts, nothing is copied.

What such a state gives, forward and backward, is to the bit what one made under torch.no_grad gives.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from grid import CAUSAL_MAPS, build, qkv
from layers import LAYERS, hybrid, text
from linattn import State
from linattn.feature_maps import FeatureMap
from linattn.nn import Block
from linattn.positions import Gates, gated_attention_with_state

LENGTH = 13
GIVEN = qkv(2, 2, 2, LENGTH, LENGTH)
LATER = qkv(2, 2, 2, 6, 6, seed=5)
PADDED = torch.ones(2, LENGTH, dtype=torch.bool)
PADDED[0, :5] = False
# A window, what the earlier tokens decay by, and whether a row is padded.
HOW: tuple[tuple[int | None, float | None, bool], ...] = (
    (None, None, False),
    (None, -1.5, True),
    (None, -1e5, False),
    (4, None, True),
    (4, -1.5, False),
    (4, 1e5, True),
    (16, None, False),
)
WINDOWED = [name for name in CAUSAL_MAPS if (one := build(name)).softmax_kernel and one.positive_normalizer]
# Each map once without a window and once with one, if it has any, in turns.
CASES = [
    *((name, HOW[:3][at % 3]) for at, name in enumerate(CAUSAL_MAPS)),
    *((name, HOW[3:][at % 4]) for at, name in enumerate(WINDOWED)),
]


def begun(feature_map: FeatureMap, window: int | None, decay: float | None, is_padded: bool) -> State:
    """A state of some tokens."""
    mask = PADDED if is_padded else None
    state = linattn.linear_attention_with_state(*GIVEN, feature_map, window=window, key_mask=mask).state
    return state if decay is None else state.decay(decay)


def pair(make: Callable[[], object]) -> list:
    """What is made under inference mode, and under no_grad."""
    made = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            made.append(make())
    return made


Use = Callable[[FeatureMap, State, list[Tensor], int | None], list[Tensor]]


def with_later(count: int, **options: object) -> Use:
    """Some tokens more."""

    def use(feature_map: FeatureMap, state: State, given: list[Tensor], window: int | None) -> list[Tensor]:
        tokens = (x[:, :, :count] for x in given)
        out, after = linattn.linear_attention_with_state(*tokens, feature_map, state, window=window, **options)
        return [out, after.S, after.z, after.read(feature_map, given[0]).out]

    return use


def partial(feature_map: FeatureMap, state: State, given: list[Tensor], window: int | None) -> list[Tensor]:
    """Logarithms of the normaliser too."""
    part, _ = linattn.linear_partial_with_state(*given, feature_map, state, window=window)
    return [part.out, part.log_normalizer]


def merged(feature_map: FeatureMap, state: State, given: list[Tensor], window: int | None) -> list[Tensor]:
    """With a state of other tokens, in both orders."""
    other, flushed = linattn.linear_attention_with_state(*given, feature_map).state, state.flush(feature_map)
    return [x.read(feature_map, given[0]).out for x in (flushed.merge(other), other.merge(flushed))]


def decayed(feature_map: FeatureMap, state: State, given: list[Tensor], window: int | None) -> list[Tensor]:
    """By a factor that gradients follow, and one too large for exponents."""
    factor = given[1].mean((2, 3))
    return [state.decay(each).read(feature_map, given[0]).out for each in (factor, factor * 1e6)]


def gated(feature_map: FeatureMap, state: State, given: list[Tensor], window: int | None) -> list[Tensor]:
    """Under gates."""
    gates = Gates(torch.nn.functional.logsigmoid(given[1].mean(-1)))
    return [gated_attention_with_state(*given, feature_map, gates, state, window=window).out]


USES: dict[str, Use] = {
    "stream": with_later(6),
    "token": with_later(1),
    "read": lambda each, state, given, _: list(state.read(each, given[0])),
    "flush": lambda each, state, given, _: list(state.flush(each).read(each, given[0])),
    "absorb": lambda each, state, given, _: [state.flush(each).absorb(each, *given[1:]).read(each, given[0]).out],
    "merge": merged,
    "decay": decayed,
}
# What is made of the same steps, whichever the map.
COMPOSED: dict[str, Use] = {
    "partial": partial,
    "by reference": with_later(1, backend="reference"),
    "gates": gated,
    "select": lambda each, state, given, _: [state.select(torch.tensor([1, 0])).read(each, given[0]).out],
    "detach": lambda each, state, given, _: [state.detach().read(each, given[0]).out],
    "to": lambda each, state, given, _: [state.to("cpu").read(each, given[0]).out],
}


def results(use: Use, feature_map: FeatureMap, state: State, window: int | None) -> list[Tensor | None]:
    """Outputs of one use, and gradients of its tokens and of the map's weights."""
    given = [x.clone().requires_grad_() for x in LATER]
    outs = use(feature_map, state, given, window)
    loss = sum(x.square().sum() for x in outs)
    leaves = [*given, *(x for x in feature_map.parameters() if x.requires_grad)]
    return [*(x.detach() for x in outs), *torch.autograd.grad(loss, leaves, allow_unused=True)]


@pytest.mark.parametrize(("name", "how"), CASES, ids=str)
def test_a_state_is_continued_with_gradients(name: str, how: tuple[int | None, float | None, bool]) -> None:
    feature_map, (window, *rest) = build(name).requires_grad_(True), how
    inferred, plain = pair(lambda: begun(feature_map, window, *rest))
    assert inferred.S.is_inference()
    for way, use in (USES | COMPOSED if name in ("FavorPlus", "Expansion", "Learned") else USES).items():
        found, wanted = (results(use, feature_map, state, window) for state in (inferred, plain))
        assert any(x is not None and bool(x.any()) for x in wanted), way
        for x, y in zip(found, wanted, strict=True):
            assert (x is None) == (y is None), way
            assert x is None or torch.equal(x.nan_to_num(), y.nan_to_num()), way
    # The state itself is as it was.
    assert inferred.S.is_inference()


@pytest.mark.parametrize("how", HOW, ids=str)
def test_while_inference_lasts_nothing_is_copied(how: tuple[int | None, float | None, bool]) -> None:
    """Nor of a state that was not made under it."""
    window, *rest = how
    feature_map = build("FavorPlus")
    inferred, plain = pair(lambda: begun(feature_map, window, *rest))

    def places(state: State) -> list[int]:
        held = [state.S, state.z, state.m, *([state.window] if state.window else [])]
        return [x.data_ptr() for x in pytree.tree_leaves(held)]

    with torch.inference_mode():
        assert places(inferred.detach()) == places(inferred)
        assert [x.data_ptr() for x in inferred._relative_sums] == places(inferred)[:3]
        if isinstance(inferred.window, linattn.attention.window.WindowKeys):
            assert inferred.window.tokens()[0].data_ptr() == inferred.window.recent[0].data_ptr()
        step = linattn.linear_attention_with_state(*(x[:, :, :1] for x in LATER), feature_map, inferred, window=window)
        assert step.state.S.is_inference()
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert places(plain.detach()) == places(plain)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_goes_on_from_inference(kind: str) -> None:
    torch.manual_seed(0)
    block = Block(LAYERS[kind](is_causal=True))
    first, second = (torch.randn(2, n, 12, generator=torch.Generator().manual_seed(n)).double() for n in (7, 5))
    grads = []
    for state in pair(lambda: block.forward_with_state(first).state):
        x = second.clone().requires_grad_()
        out, after = block.forward_with_state(x, state)
        later = block.forward_with_state(x[:, :1], after).out
        loss = out.square().sum() + later.square().sum()
        grads.append(torch.autograd.grad(loss, [x, *block.parameters()]))
    assert all(map(torch.equal, *grads))


def test_a_model_is_trained_behind_a_prompt_read_in_inference() -> None:
    model, words = hybrid(), text(2, 12)
    grads = []
    for state in pair(lambda: model.forward_with_state(words[:, :7]).state):
        logits = model.forward_with_state(words[:, 7:], state).logits
        grads.append(torch.autograd.grad(logits.square().sum(), list(model.parameters())))
    assert all(map(torch.equal, *grads))
