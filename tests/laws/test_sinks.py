"""A sink is one more key of value 0: log-normalisers, of streams too, are all that it needs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import linattn
from grid import qkv
from linattn import MergedKV, Partial
from linattn.feature_maps import Expansion, FavorPlus, FeatureMap
from ways import Attention, by_map, by_merging

LENGTH, HEADS = 29, 4
SINK = torch.tensor([-2.0, 0.0, 1.5, 6.0], dtype=torch.float64)
# Of float64 sums of some thirty numbers of size 1.
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}
TOKENS = qkv(num_queries=LENGTH, num_keys=LENGTH)
MASK = torch.arange(LENGTH) >= torch.tensor([0, 7])[:, None]


HEAD_DIM = TOKENS[0].shape[-1]
# Maps beside windows.
MAPS: dict[str, tuple[FeatureMap, int | None]] = {
    "map": (FavorPlus(HEAD_DIM, 12), None),
    "grouped map": (Expansion(HEAD_DIM, 3).fit(*TOKENS[:2]), None),
    "window": (FavorPlus(HEAD_DIM, 12), 4),
}
# Fewer keys are kept than there are tokens.
MERGED = {"merged": MergedKV(4, 6, None), "merged in 4 bits": MergedKV(4, 6, 4)}


def attention(name: str) -> Attention:
    """The calls by a map or with merged keys."""
    return by_merging(MERGED[name]) if name in MERGED else by_map(*MAPS[name])


def dense(*, is_causal: bool, mask: Tensor | None) -> Tensor:
    """Softmax over the keys and one more in each head, of logit s and value 0."""
    query, key, value = TOKENS
    key, value = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (key, value))
    logits = query @ key.mT * query.shape[-1] ** -0.5
    if is_causal:
        logits = logits.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], -torch.inf)
    sink = SINK.view(-1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat((logits, sink), -1).softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "padded"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("config", [MergedKV(4, LENGTH, None), MergedKV(4, LENGTH, 8)], ids=str)
def test_enough_merged_keys_and_a_sink_are_softmax_over_one_key_more(
    config: MergedKV, is_causal: bool, mask: Tensor | None
) -> None:
    options = {"key_mask": mask, "enable_gqa": True}
    part = linattn.merged_partial(*TOKENS, config, is_causal=is_causal, **options)
    wanted = dense(is_causal=is_causal, mask=mask)
    # Numbers of 8 bits, where they are kept so.
    close = {"rtol": 0, "atol": 0.05} if config.bits and is_causal else ROUNDING
    torch.testing.assert_close(part.with_sink(SINK), wanted, **close)
    if not is_causal:
        return
    state, outs = None, []
    for piece in [slice(0, 5), *(slice(t, t + 1) for t in range(5, 9)), slice(9, 9), slice(9, LENGTH)]:
        shown = {**options, "key_mask": None if mask is None else mask[:, piece]}
        part, state = linattn.merged_partial_with_state(*(x[:, :, piece] for x in TOKENS), config, state, **shown)
        outs.append(part.with_sink(SINK))
    torch.testing.assert_close(torch.cat(outs, 2), wanted, **close)


@pytest.mark.parametrize("name", [*MAPS, *MERGED])
def test_the_normalisers_of_a_stream_are_those_of_the_whole(name: str) -> None:
    attend = attention(name)
    whole = attend.partial(*TOKENS, is_causal=True, key_mask=MASK)
    state, parts = None, []
    for piece in (slice(0, 3), slice(3, 4), slice(4, 17), slice(17, LENGTH)):
        some, shown = [x[:, :, piece] for x in TOKENS], MASK[:, piece]
        plain = attend.stream(*some, state=state, key_mask=shown)
        part, state = attend.stream_partial(*some, state=state, key_mask=shown)
        torch.testing.assert_close(part.out, plain.out, **ROUNDING)
        assert repr(state) == repr(plain.state)
        parts.append(part)
    out, log = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    torch.testing.assert_close(out, whole.out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(log, whole.log_normalizer, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("factor", [3.0, 1e5, -1e5])
@pytest.mark.parametrize("name", MAPS)
def test_a_factor_on_a_state_is_in_its_normalisers(name: str, factor: float) -> None:
    """Of a token that is not there, so that the state's keys alone are read."""
    attend = attention(name)
    before, token = [x[:, :, :20] for x in TOKENS], [x[:, :, 20:21] for x in TOKENS]
    state, masked = attend.stream(*before).state, torch.zeros(2, 1, dtype=torch.bool)
    parts = [
        attend.stream_partial(*token, state=held, key_mask=masked).partial for held in (state, state.decay(factor))
    ]
    torch.testing.assert_close(parts[1].out, parts[0].out, **ROUNDING)
    torch.testing.assert_close(parts[1].log_normalizer, parts[0].log_normalizer + factor, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("sink", [-torch.inf, -1e4, 0.0, 1e4])
def test_rows_that_see_no_key_are_0_with_gradients(sink: float) -> None:
    query, key, value = (x.clone().requires_grad_() for x in TOKENS)
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[0] = True
    logit = torch.full((HEADS,), sink, dtype=torch.float64, requires_grad=True)
    part = linattn.merged_partial(query, key, value, MergedKV(4, 6, None), key_mask=mask, enable_gqa=True)
    out = part.with_sink(logit)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    # Those of nothing, and of everything.
    if sink < -1e3:
        torch.testing.assert_close(out, part.out, **ROUNDING)
    if sink > 1e3:
        assert float(out.detach().abs().max()) == 0
    out.square().sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (query, key, value, logit))


NO_SINKS = {"a number": 0.0, "spread": SINK.view(1, -1, 1, 1), "fewer": SINK[:3], "rows": SINK.expand(2, -1)}


@pytest.mark.parametrize("sink", [*NO_SINKS.values(), SINK.long()], ids=[*NO_SINKS, "integers"])
def test_what_is_no_logit_for_each_head_is_refused(sink: object) -> None:
    """Layouts that broadcast would give outputs of another shape."""
    part = linattn.softmax_partial(*TOKENS, enable_gqa=True)
    with pytest.raises(ValueError, match=r"sink must be a floating tensor \(H,\) = \(4,\), got .*; give one logit"):
        part.with_sink(sink)


def test_gradients_are_those_of_finite_differences() -> None:
    leaves = [x[:1, :, :8, :2].clone().requires_grad_() for x in TOKENS]
    sink = SINK.clone().requires_grad_()

    def call(s: Tensor, *x: Tensor) -> Tensor:
        return linattn.merged_partial_with_state(*x, MergedKV(2, 3, None), enable_gqa=True).partial.with_sink(s)

    assert torch.autograd.gradcheck(call, (sink, *leaves))


def test_a_sink_in_16_bits_stands_beside_normalisers_in_32() -> None:
    """Log-normalisers of 16 bits would be wrong by 2⁻⁸ of their size."""
    part = Partial(torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), torch.tensor([[[100.3]]]))
    found = part.with_sink(torch.tensor([100.0], dtype=torch.bfloat16))
    assert found.dtype is torch.bfloat16
    assert float(found) == pytest.approx(float(torch.sigmoid(torch.tensor(0.3))), rel=2**-8)
