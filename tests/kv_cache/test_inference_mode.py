"""Streams with merged keys that began under torch.inference_mode are continued with gradients, exact and in few bits.

What they give is to the bit what one begun under torch.no_grad gives; while inference lasts, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import linattn
from grid import qkv, tokens
from linattn import MergedKV, MergedState
from merged_rows import leaves

CONFIGS = {
    "exact": MergedKV(4, 8, bits=None),
    "8 bits": MergedKV(4, 8, bits=8),
    "4 bits": MergedKV(4, 20, bits=4),
    "2 bits": MergedKV(4, 20, bits=2),
    "no sinks": MergedKV(4, 8, bits=None, num_sinks=0),
}
LENGTH = 60
GIVEN, LATER = qkv(2, 4, 2, LENGTH, LENGTH), qkv(2, 4, 2, 9, 9, seed=5)
# Where a stream has its first block alone, has merged none, and has merged most; padded or not.
WHERE = [(3, False), (3, True), (10, False), (LENGTH, False), (LENGTH, True)]
CASES = [(name, *where) for name in ("exact", "4 bits") for where in WHERE]
CASES += [(name, LENGTH, False) for name in CONFIGS if name not in ("exact", "4 bits")]
MASK = torch.ones(2, LENGTH, dtype=torch.bool)
MASK[0, :7] = False
Use = Callable[[MergedKV, MergedState, list[Tensor]], list[Tensor]]


def begun(config: MergedKV, length: int, is_padded: bool) -> MergedState:
    """A stream of some tokens."""
    given = (x[:, :, :length] for x in GIVEN)
    mask = MASK[:, :length] if is_padded else None
    return linattn.merged_attention_with_state(*given, config, key_mask=mask, enable_gqa=True).state


def pair(config: MergedKV, length: int, is_padded: bool) -> list[MergedState]:
    """A stream begun under inference mode, and one under no_grad."""
    states = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            states.append(begun(config, length, is_padded))
    return states


def on(count: int) -> Use:
    """Some tokens more, and a token after them."""

    def use(config: MergedKV, state: MergedState, given: list[Tensor]) -> list[Tensor]:
        outs = []
        for tokens_of in ([x[:, :, :count] for x in given], [x[:, :, -1:] for x in given]):
            out, state = linattn.merged_attention_with_state(*tokens_of, config, state, enable_gqa=True)
            outs.append(out)
        return outs

    return use


def biased(config: MergedKV, state: MergedState, given: list[Tensor]) -> list[Tensor]:
    """With a bias, and the normaliser."""
    bias = 0.1 * tokens(2, 2, given[1].shape[2], seed=8)
    options = {"key_bias": bias, "enable_gqa": True, "soft_cap": 5.0}
    part, after = linattn.merged_partial_with_state(*given, config, state, **options)
    return [part.out, part.log_normalizer, *(x for x in leaves(after) if x.requires_grad)]


USES: dict[str, Use] = {
    "stream": on(9),
    "token": on(1),
    "bias": biased,
    "select": lambda config, state, given: on(3)(config, state.select(torch.tensor([1, 0])), given),
    "detach": lambda config, state, given: on(3)(config, state.detach(), given),
    "to": lambda config, state, given: on(3)(config, state.to("cpu"), given),
    "read": lambda config, state, given: list(state.read(given[0])),
}


def results(use: Use, config: MergedKV, state: MergedState) -> list[Tensor | None]:
    """Outputs, and gradients of the tokens."""
    given = [x.clone().requires_grad_() for x in LATER]
    outs = use(config, state, given)
    grads = torch.autograd.grad(sum(x.square().sum() for x in outs), given, allow_unused=True)
    return [*(x.detach() for x in outs), *grads]


@pytest.mark.parametrize(("name", "length", "is_padded"), CASES)
def test_a_stream_is_continued_with_gradients(name: str, length: int, is_padded: bool) -> None:
    inferred, plain = pair(CONFIGS[name], length, is_padded)
    assert any(x.is_inference() for x in leaves(inferred))
    for way, use in USES.items():
        found, wanted = (results(use, CONFIGS[name], state) for state in (inferred, plain))
        assert any(x is not None and bool(x.any()) for x in wanted[-3:])
        for x, y in zip(found, wanted, strict=True):
            assert (x is None) == (y is None), way
            assert x is None or torch.equal(x, y), way
    assert any(x.is_inference() for x in leaves(inferred))


@pytest.mark.parametrize("name", CONFIGS)
def test_while_inference_lasts_nothing_is_copied(name: str) -> None:
    """A token that fills no block leaves all else of a state where it is; so does one outside, of any other state."""
    config = CONFIGS[name]
    inferred, plain = pair(config, LENGTH - 3, False)
    for mode, state in ((torch.inference_mode, inferred), (torch.no_grad, plain), (torch.enable_grad, plain)):
        with mode():
            token = (x[:, :, :1] for x in LATER)
            after = linattn.merged_attention_with_state(*token, config, state, enable_gqa=True).state
            places = [{x.data_ptr() for x in leaves(each) if x.numel()} for each in (state, after)]
        # Keys, values and biases of the latest tokens, and the sampled queries, are new.
        assert len(places[0] - places[1]) <= 5
        assert len(places[0] & places[1]) >= 3


@pytest.mark.parametrize("name", ["exact", "4 bits"])
def test_a_stream_begun_in_inference_goes_on_in_any_mode(name: str) -> None:
    """In inference, then with gradients, then without."""
    config, ends = CONFIGS[name], []
    for state in pair(config, 30, False):
        for mode in (torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                state = linattn.merged_attention_with_state(*LATER, config, state, enable_gqa=True).state
        ends.append(state)
    assert all(map(torch.equal, *map(leaves, ends)))


@pytest.mark.parametrize("late", [0, 1])
def test_rows_that_went_on_in_inference_beside_padding_go_on_with_gradients(late: int) -> None:
    config, mask = MergedKV(2, 8, 4, num_sinks=0), torch.ones(2, 1, dtype=torch.bool)
    mask[late] = False
    state = None
    for place, token in enumerate(
        zip(*(x.split(1, 2) for x in qkv(heads=2, num_queries=31, num_keys=31)), strict=True)
    ):
        with torch.inference_mode(place > 0):
            state = linattn.merged_attention_with_state(*token, config, state, key_mask=mask).state
    leaf, *rest = token
    leaf = leaf.clone().requires_grad_()
    (grad,) = torch.autograd.grad(linattn.merged_attention_with_state(leaf, *rest, config, state).out.sum(), leaf)
    assert bool(grad.any())


@pytest.mark.parametrize("bits", [None, 4])
def test_a_short_state_is_read_with_gradients(bits: int | None) -> None:
    """With a query head for each key head the recent tokens go into the products as they are."""
    query, key, value = qkv(heads=2, num_queries=3, num_keys=3)
    with torch.inference_mode():
        state = linattn.merged_attention_with_state(query, key, value, MergedKV(4, 8, bits=bits)).state
    leaf = query.clone().requires_grad_()
    (grad,) = torch.autograd.grad(state.read(leaf).out.square().sum(), leaf)
    assert bool(grad.any())
