"""Codes of texts whose keys and values move away from those that their frames were taken of."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from grid import qkv
from linattn import MergedKV, MergedState
from linattn.kv_cache.coded_tokens import CodedTokens
from linattn.kv_cache.frames import Frames
from linattn.softmax.tokens import Tokens

LENGTH, PERIOD = 1_000, 60
SIZES = {"num_queries": LENGTH, "num_keys": LENGTH, "head_dim": 16, "value_dim": 12}
CONFIG = MergedKV(8, 0, coded=((96, 4),))
MERGING = MergedKV(8, 90, bits=4, coded=((64, 6),))


def turned(x: Tensor) -> Tensor:
    """Coordinates far from 0, in pairs that turn once in the text, as rotary positions turn them."""
    angle = 2 * torch.pi * torch.arange(LENGTH, dtype=x.dtype).unsqueeze(-1) / LENGTH
    return x + 8 * torch.cat((angle.cos(), angle.sin()), -1).repeat(1, x.shape[-1] // 2)


def steps(base: float) -> Tensor:
    """Factors of tokens that grow by a base in a period."""
    return base ** (torch.arange(LENGTH, dtype=torch.float64).unsqueeze(-1) / PERIOD)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "grows to 2^16": lambda x: x * steps(2.0),
    "falls to 2^-16": lambda x: (x + 0.3) * steps(0.5),
    "drifts by 16 deviations": lambda x: x + torch.arange(LENGTH).unsqueeze(-1) / PERIOD,
    "turns": turned,
    "grows in some coordinates": lambda x: torch.where(torch.arange(x.shape[-1]) < 3, x * steps(2.0), x),
}


def given(change: str, dtype: torch.dtype = torch.float64, *, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """The first tokens of a text: of so many the frames are taken anew already, and merging ones merge."""
    query, key, value = qkv(**SIZES)
    query, key, value = (x[:, :, :length].to(dtype) for x in (query, CHANGES[change](key), CHANGES[change](value)))
    return query, key, value


def streamed(
    tokens: tuple[Tensor, ...], config: MergedKV, cuts: list[int], backend: str = "torch"
) -> tuple[Tensor, MergedState]:
    state, outs = None, []
    for start, stop in itertools.pairwise([0, *cuts, tokens[1].shape[2]]):
        piece = (x[:, :, start:stop] for x in tokens)
        out, state = linattn.merged_attention_with_state(*piece, config, state, enable_gqa=True, backend=backend)
        outs.append(out)
    assert state is not None
    return torch.cat(outs, 2), state


def error(got: Tensor, exact: Tensor) -> float:
    """Of rows, beside what they differ by among each other."""
    return float((got - exact).norm() / (exact - exact.mean(2, keepdim=True)).norm())


def ratios(tokens: tuple[Tensor, ...], config: MergedKV) -> list[float]:
    """Errors of the tier's tokens at many points of a text: numbers rounded by a frame of these very tokens are 1."""
    (tier_size, bits), state, each, end = config.coded[0], None, [], 0
    for piece in zip(*(x.split(25, 2) for x in tokens), strict=True):
        state = linattn.merged_attention_with_state(*piece, config, state, enable_gqa=True).state
        tier, end = state.keys.coded[0], end + 25
        each.append(1.0)
        if not isinstance(tier, CodedTokens) or tier.bias.shape[2] < tier_size:
            continue
        stop = end - state.keys.recent.bias.shape[2]
        exact = Tokens(*(x[:, :, stop - tier_size : stop] for x in tokens[1:]), tier.bias)
        frames = Frames.of(exact, (bits, bits), state.keys.sample.power)
        begun = frames.outside(CodedTokens.of(frames.inside(exact), frames, (bits, bits)).decoded())
        for got, wanted, fresh in zip(tier.frames.outside(tier.decoded())[:2], exact[:2], begun[:2], strict=True):
            each[-1] = max(each[-1], error(got, wanted) / error(fresh, wanted))
    return each


@pytest.mark.parametrize("change", CHANGES)
def test_the_error_stays_near_that_of_codes_begun_now(change: str) -> None:
    each = ratios(given(change), CONFIG)
    assert len(each) == 40
    assert max(each) < 4


@pytest.mark.parametrize("size", [12, 20])
@pytest.mark.parametrize("change", ["drifts by 16 deviations", "turns"])
def test_small_tiers_follow_the_text_too(change: str, size: int) -> None:
    """Their few tokens are looked at with those that come."""
    assert 1 < max(ratios(given(change, length=350), MergedKV(8, 0, coded=((size, 4),)))) < 4


@pytest.mark.parametrize("change", ["drifts by 16 deviations", "turns"])
def test_heads_of_few_keys_follow_the_text_too(change: str) -> None:
    """A head that a bias leaves one key in 24 has four in a full tier, of which frames are taken anew."""
    query, key, value = given(change)
    bias = key.new_full(key.shape[:3], -torch.inf)
    bias[:, 0], bias[..., ::24] = 0, 0
    state, end, worst = None, 0, 0.0
    for *piece, some in zip(*(x.split(25, 2) for x in (query, key, value, bias)), strict=True):
        state = linattn.merged_attention_with_state(*piece, CONFIG, state, key_bias=some, enable_gqa=True).state
        tier, end = state.keys.coded[0], end + 25
        if isinstance(tier, CodedTokens) and tier.bias.shape[2] == CONFIG.coded[0][0]:
            stop, live = end - state.keys.recent.bias.shape[2], tier.bias[:, 1] != -torch.inf
            pairs = zip(tier.frames.outside(tier.decoded())[:2], (key, value), strict=True)
            wrong = [(got[:, 1] - exact[:, 1, stop - len(live[0]) : stop])[live] for got, exact in pairs]
            worst = max(worst, *(float(x.square().mean().sqrt()) for x in wrong))
    # Deviations of a text's tokens: of all keys codes lose 0.07, and of those that frames are far from 1 and more.
    assert 0 < worst < 0.5


def test_a_tier_that_grows_token_by_token_begins_with_frames_that_are_taken_again() -> None:
    """Those of its first few tokens have deviations by chance."""
    assert max(ratios(tuple(x[:, :, :150] for x in qkv(**SIZES)), MergedKV(1, 0, coded=((12, 4),)))) < 1.8


@pytest.mark.parametrize("config", [CONFIG, MERGING], ids=lambda config: config.label)
@pytest.mark.parametrize("change", ["turns", "falls to 2^-16"])
def test_a_stream_may_be_cut_anywhere(change: str, config: MergedKV) -> None:
    tokens = given(change, length=360)
    whole, other = streamed(tokens, config, [])
    out, state = streamed(tokens, config, [1, 5, 6, 7, 230, *range(330, 360)])
    torch.testing.assert_close(out, whole, rtol=1e-9, atol=1e-9 * float(whole.abs().max()))
    for x, y in zip(pytree.tree_leaves(state), pytree.tree_leaves(other), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


def test_a_few_tokens_that_are_alike_leave_the_frames() -> None:
    """A block of them is far from the frames for what it is spread; the tier is not."""
    query, key, value = qkv(**SIZES)
    key[:, :, 200:216], value[:, :, 200:216] = 3.0, 3.0
    before, after = (streamed(tuple(x[:, :, :end] for x in (query, key, value)), CONFIG, [])[1] for end in (190, 280))
    for x, y in zip(*(pytree.tree_leaves(state.keys.coded[0].frames) for state in (before, after)), strict=True):
        assert torch.equal(x, y)


def test_each_head_takes_frames_by_its_own_tokens() -> None:
    """A head beside one that moves, and a row beside such, keep their codes as they are without it."""
    tokens, still = given("turns", length=400), tuple(x[:, :, :400] for x in qkv(**SIZES))
    mixed = tuple(torch.stack((x[0], y[0])) for x, y in zip(tokens, still, strict=True))
    for row, alone in enumerate((tokens, still)):
        wanted = streamed(tuple(x[:1] for x in alone), CONFIG, [])
        out, state = streamed(mixed, CONFIG, [])
        torch.testing.assert_close(out[row : row + 1], wanted[0], rtol=1e-10, atol=1e-10)
        kept = state.select(torch.tensor([row])).keys.coded[0]
        for x, y in zip(kept.leaves(), wanted[1].keys.coded[0].leaves(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)
    key = torch.cat((tokens[1][:, :1], still[1][:, 1:]), 1)
    beside = streamed((still[0], key, still[2]), CONFIG, [])[1].keys.coded[0].leaves()
    for x, y in zip(beside, streamed(still, CONFIG, [])[1].keys.coded[0].leaves(), strict=True):
        assert torch.equal(x[:, 1], y[:, 1])


@pytest.mark.parametrize("config", [CONFIG, MERGING], ids=lambda config: config.label)
@pytest.mark.parametrize("change", CHANGES)
def test_compiled_code_takes_the_same_frames(change: str, config: MergedKV) -> None:
    pytest.importorskip("linattn_compiled")
    tokens = given(change, torch.float32, length=400)
    out, state = streamed(tokens, config, [200])
    with torch.no_grad():
        other, after = streamed(tokens, config, [200], "compiled")
    assert torch.equal(state.keys.coded[0].frames.key.order, after.keys.coded[0].frames.key.order)
    torch.testing.assert_close(other, out, rtol=1e-4, atol=1e-4 * float(out.abs().max()))


def test_a_value_that_is_no_number_leaves_the_others() -> None:
    """It counts as the largest that codes reach, and no frame is taken of it."""
    query, key, value = (x[:, :, :350].clone() for x in qkv(**SIZES))
    wanted = streamed((query, key, value), CONFIG, [])[0]
    value[:, :, 160, 0] = torch.inf
    out = streamed((query, key, value), CONFIG, [])[0]
    assert out[:, :, 180:].isfinite().all()
    # Once it has left the tier.
    torch.testing.assert_close(out[:, :, 300:], wanted[:, :, 300:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 3e38])
@pytest.mark.parametrize("backend", ["torch", "compiled"])
@pytest.mark.parametrize("config", [MergedKV(8, 16, num_sinks=0, bits=None), MergedKV(8, 16), MergedKV(8, 16, bits=8)])
def test_a_query_that_is_no_number_spoils_its_own_row_alone(config: MergedKV, backend: str, bad: float) -> None:
    """It is no part of the sample by which keys are merged."""
    query, key, value = (x[:, :, :350].float() for x in qkv(**SIZES))
    query = query.clone()
    # A block of eight tokens gives all of its own to the sample.
    query[:, :, 160] = bad
    out, state = streamed((query, key, value), config, [200], backend)
    assert torch.cat((out[:, :, :160], out[:, :, 161:]), 2).isfinite().all()
    assert all(x.isfinite().all() for x in state.tokens()[:2])


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("backend", ["torch", "compiled"])
def test_in_full_view_too(window: int | None, backend: str) -> None:
    query, key, value = (x[:, :, :120].float() for x in qkv(**SIZES))
    query = query.clone()
    query[:, :, 60] = torch.nan
    out = linattn.merged_attention(query, key, value, MergedKV(window, 16), enable_gqa=True, backend=backend)
    assert torch.cat((out[:, :, :60], out[:, :, 61:]), 2).isfinite().all()


def test_a_tier_that_begins_with_what_is_no_number_recovers() -> None:
    """Frames are of its other tokens, and are taken anew where the largest codes in place of it have left."""
    query, key, value = (x[:, :, :300].clone() for x in qkv(**SIZES))
    wanted = streamed((query, key, value), CONFIG, [])[0]
    key[:, :, 5, 1], value[:, :, 7, 0] = -torch.inf, torch.inf
    out = streamed((query, key, value), CONFIG, [])[0]
    assert error(out[:, :, 240:], wanted[:, :, 240:]) < 0.6


def test_gradients_pass_frames_taken_anew_by() -> None:
    """Those of unrounded tokens, since the frames and what rounding adds are constants."""
    query, key, value = given("turns", length=300)
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = linattn.merged_attention(query, key, value * factor, CONFIG, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out.detach(), streamed((query, key, value), CONFIG, [])[0], rtol=1e-9, atol=1e-9)
    out.square().sum().backward()
    # Rows are linear in a factor of all values: the derivative of their squares is twice these.
    torch.testing.assert_close(float(factor.grad), 2 * float(out.detach().square().sum()), rtol=2e-2, atol=0)
