"""Merged keys under a soft cap, c·tanh(x / c) of each logit x before its bias: softmax wherever softmax has one."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import linattn
from differences import check_gradients
from grid import qkv, relative_error, tokens
from linattn import MergedKV, MergedState
from linattn.kv_cache.merging import reduced
from linattn.kv_cache.query_sample import QuerySample
from linattn.softmax.tokens import Tokens

LENGTH, CAP = 61, 0.8
SIZES = {"num_queries": LENGTH, "num_keys": LENGTH, "scale": 1.5}
FEW = (MergedKV(4, 6, bits=None), MergedKV(7, 20, bits=None), MergedKV(1, 3, bits=None, num_sinks=0))
CODED = (MergedKV(2, 20, bits=4, coded=((12, 4), (10, 2))), MergedKV(4, 16, bits=(3, 5)))
EVERYWHERE = (MergedKV(None, 6, bits=None), MergedKV(4, 6, bits=None), MergedKV(7, 20, bits=None))


def directed(*configs: MergedKV) -> list[tuple[MergedKV, bool]]:
    """Both directions of each config; without a window there is no causal one."""
    pairs = itertools.product(configs, (False, True))
    return [(config, is_causal) for config, is_causal in pairs if config.window is not None or not is_causal]


def truth(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    soft_cap: float = CAP,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and log-normalisers of capped softmax, from all weights."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    logits = soft_cap * torch.tanh(query @ key.mT * query.shape[-1] ** -0.5 / soft_cap)
    if key_bias is not None:
        logits = logits + key_bias.repeat_interleave(groups, 1).unsqueeze(2)
    if key_mask is not None:
        logits = logits.masked_fill(~key_mask[:, None, None], -torch.inf)
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(logits, -1).nan_to_num(0) @ value, logits.logsumexp(-1)


def attend(query: Tensor, key: Tensor, value: Tensor, config: MergedKV, **options: object) -> Tensor:
    """Capped merged attention, heads grouped."""
    return linattn.merged_attention(query, key, value, config, enable_gqa=True, **{"soft_cap": CAP, **options})


def streamed(config: MergedKV, cuts: list[int], mask: Tensor | None = None) -> tuple[Tensor, MergedState]:
    """The same piece by piece."""
    state, outs = None, []
    for start, stop in itertools.pairwise([0, *cuts, LENGTH]):
        piece = (x[:, :, start:stop] for x in qkv(**SIZES))
        part = None if mask is None else mask[:, start:stop]
        out, state = linattn.merged_attention_with_state(
            *piece, config, state, enable_gqa=True, soft_cap=CAP, key_mask=part
        )
        outs.append(out)
    assert state is not None
    return torch.cat(outs, 2), state


def masked(num_live: int) -> Tensor:
    """A mask of rows with so many live tokens, the first one's late."""
    order = torch.rand(2, LENGTH - 5, generator=torch.Generator().manual_seed(1)).argsort(-1) < num_live
    return torch.nn.functional.pad(order, (5, 0))


@pytest.mark.parametrize("mask", [None, masked(40)], ids=["all", "masked"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("config", [MergedKV(4, 64, bits=None), MergedKV(64, 1, bits=None)], ids=str)
def test_enough_keys_are_capped_softmax(config: MergedKV, is_causal: bool, mask: Tensor | None) -> None:
    given, options = qkv(**SIZES), {"is_causal": is_causal, "key_mask": mask, "key_bias": tokens(2, 2, LENGTH, seed=8)}
    wanted, log = truth(*given, **options)
    part = linattn.merged_partial(*given, config, enable_gqa=True, soft_cap=CAP, **options)
    for found in (attend(*given, config, **options), part.out):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part.log_normalizer, log, rtol=1e-12, atol=1e-12)
    assert relative_error(attend(*given, config, **options, soft_cap=None), wanted) > 0.01


@pytest.mark.parametrize("config", [MergedKV(4, 30, bits=None), MergedKV(None, 30, bits=None)], ids=str)
def test_clusters_of_one_key_are_capped_softmax(config: MergedKV) -> None:
    """Where fewer keys are live than may be merged, of more in all."""
    given, mask = qkv(**SIZES), masked(25)
    wanted = truth(*given, key_mask=mask)[0]
    torch.testing.assert_close(attend(*given, config, key_mask=mask), wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("cuts", [[], [1], [5, 6, 7, 30], list(range(1, LENGTH))], ids=["whole", "two", "five", "each"])
def test_enough_keys_are_capped_softmax_in_any_cut(cuts: list[int]) -> None:
    out, state = streamed(MergedKV(4, LENGTH, bits=None), cuts)
    query, key, value = qkv(**SIZES)
    torch.testing.assert_close(out, truth(query, key, value, is_causal=True)[0], rtol=1e-12, atol=1e-12)
    wanted, log = truth(query, key, value)
    part = state.read(query, soft_cap=CAP)
    torch.testing.assert_close(part.out, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part.log_normalizer, log, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(("number", "config"), list(enumerate([*FEW, *CODED])), ids=str)
def test_a_stream_may_be_cut_anywhere(number: int, config: MergedKV, is_masked: bool) -> None:
    """Tokens are masked or not in turns, so that each cut meets both, and every setting."""
    mask = masked(48) if is_masked else None
    whole, _ = streamed(config, [], mask)
    for cuts in ([8], [5, 6, 7, 30], list(range(1, LENGTH)))[(number + is_masked) % 2 :: 2]:
        torch.testing.assert_close(streamed(config, cuts, mask)[0], whole, rtol=1e-10, atol=1e-10)
    assert torch.equal(whole, attend(*qkv(**SIZES), config, key_mask=mask, is_causal=True))


@pytest.mark.parametrize("config", [*FEW, *CODED], ids=str)
def test_a_step_is_capped_softmax_over_what_the_state_holds(config: MergedKV) -> None:
    """Merged keys with their biases, and what codes stand for."""
    out, state = streamed(config, [LENGTH - 1])
    (key, value, bias), query = state.tokens(), qkv(**SIZES)[0][:, :, -1:]
    wanted = truth(query, key, value, key_bias=bias)[0]
    assert bias.max() > 0
    torch.testing.assert_close(out[:, :, -1:], wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state.read(query, soft_cap=CAP).out, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("config", "is_causal"), directed(*EVERYWHERE, CODED[0]), ids=str)
def test_a_cap_between_none_and_all(config: MergedKV, is_causal: bool) -> None:
    """One far above the logits is none; under one far below them all keys weigh the same, merged by their number."""
    given = qkv(**SIZES)
    plain = attend(*given, config, is_causal=is_causal, soft_cap=None)
    high = attend(*given, config, is_causal=is_causal, soft_cap=1e7)
    torch.testing.assert_close(high, plain, rtol=1e-8, atol=1e-8)
    low = attend(*given, config, is_causal=is_causal, soft_cap=1e-9)
    if config not in CODED:
        torch.testing.assert_close(low, truth(*given, is_causal=is_causal, soft_cap=1e-9)[0], rtol=1e-7, atol=1e-7)
    assert relative_error(low, plain) > 0.1


@pytest.mark.parametrize("num_merged", [1, 5, 33])
def test_a_merge_conserves_what_the_sample_reads(num_merged: int) -> None:
    """Attention to each cluster and the values that come of it, by capped logits."""
    query, key, value = qkv(num_queries=50, num_keys=40)
    sample = QuerySample(query[:, :2] + 0.5, torch.ones(2, 2, 50, dtype=torch.bool))
    keys = Tokens(key, value, tokens(2, 2, 40, seed=5))

    def weights(keys: Tokens) -> Tensor:
        return (CAP * torch.tanh(sample.query @ keys.key.mT / CAP) + keys.bias.unsqueeze(2)).exp()

    few = reduced(keys, sample, num_merged, soft_cap=CAP)[0]
    total = weights(keys).sum(-1, keepdim=True)
    found, wanted = weights(few) / total, weights(keys) / total
    torch.testing.assert_close(found.sum((2, 3)), wanted.sum((2, 3)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((found @ few.value).sum(2), (wanted @ value).sum(2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("config", "is_causal"), directed(MergedKV(4, 3, bits=None), MergedKV(None, 4, bits=None)), ids=str
)
def test_gradients_are_those_of_finite_differences(config: MergedKV, is_causal: bool) -> None:
    sizes = {"batch": 1, "heads": 2, "kv_heads": 1, "num_queries": 13, "num_keys": 13, "head_dim": 2, "value_dim": 1}

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        options = {"key_bias": x[3], "is_causal": is_causal}
        part = linattn.merged_partial(*x[:3], config, enable_gqa=True, soft_cap=CAP, **options)
        return part.log_normalizer, attend(*x[:3], config, **options)

    check_gradients(call, (*qkv(**sizes), tokens(1, 1, 13, seed=8)))


def test_gradients_pass_codes_as_a_constant_added() -> None:
    """By finite differences of the same stream, whose rounding is held: with enough keys those of capped softmax."""
    leaves = [x.requires_grad_() for x in qkv(**SIZES)]
    grads = [
        torch.autograd.grad(out.square().sum(), leaves)
        for out in (
            attend(*leaves, MergedKV(4, LENGTH, bits=8), is_causal=True),
            truth(*leaves, is_causal=True)[0],
        )
    ]
    assert all(relative_error(found, wanted) < 0.05 for found, wanted in zip(*grads, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("config", [*EVERYWHERE[1:], CODED[1]], ids=str)
def test_rows_are_alone(config: MergedKV, is_causal: bool) -> None:
    given = qkv(**SIZES)
    together = attend(*given, config, is_causal=is_causal)
    alone = [attend(*(x[row : row + 1] for x in given), config, is_causal=is_causal) for row in range(2)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_low_precision_loses_its_own_digits(dtype: torch.dtype, is_causal: bool) -> None:
    given = [x.to(dtype) for x in qkv(**SIZES)]
    wanted = truth(*(x.double() for x in given), is_causal=is_causal)[0]
    found = attend(*given, MergedKV(4, 64, bits=None), is_causal=is_causal)
    assert found.dtype == dtype
    assert relative_error(found, wanted) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("is_causal", [False, True])
def test_graphs_and_transforms_are_eager_calls(is_causal: bool) -> None:
    """Of a text that is as long as it takes until keys are merged: a graph has each of its blocks."""
    torch.compiler.reset()
    config, given = MergedKV(4, 6, bits=None), [x[:, :, :18] for x in qkv(**SIZES)]
    wanted = attend(*given, config, is_causal=is_causal)
    graph = torch.compile(lambda *x: attend(*x, config, is_causal=is_causal), backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(*given), wanted, rtol=1e-12, atol=1e-12)
    mapped = torch.func.vmap(lambda *x: attend(*(y.unsqueeze(0) for y in x), config, is_causal=is_causal)[0])
    torch.testing.assert_close(mapped(*given), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_compiled_code_is_left_out_or_says_why(is_causal: bool, bits: int | None) -> None:
    """Of as many tokens as it would take, in float32."""
    given, config = qkv(num_queries=128, num_keys=128, dtype=torch.float32), MergedKV(8, 16, bits, 0)
    with torch.no_grad():
        auto = attend(*given, config, is_causal=is_causal)
        assert torch.equal(auto, attend(*given, config, is_causal=is_causal, backend="torch"))
        with pytest.raises(
            ValueError, match=r"cannot run this call: .*it has no soft caps, and this call has one of 0"
        ):
            attend(*given, config, is_causal=is_causal, backend="compiled")


@pytest.mark.parametrize(
    "cap", [0, -1.0, float("inf"), float("nan"), True, "50", torch.tensor(5.0), 10**400], ids=lambda cap: repr(cap)[:20]
)
def test_what_is_no_cap_is_refused(cap: object) -> None:
    given, config = qkv(), MergedKV(4, 6, bits=None)
    state = linattn.merged_attention_with_state(*given, config, enable_gqa=True).state
    for call in (
        lambda: linattn.merged_attention(*given, config, enable_gqa=True, soft_cap=cap),
        lambda: linattn.merged_partial(*given, config, enable_gqa=True, soft_cap=cap),
        lambda: linattn.merged_attention_with_state(*given, config, enable_gqa=True, soft_cap=cap),
        lambda: linattn.merged_partial_with_state(*given, config, enable_gqa=True, soft_cap=cap),
        lambda: state.read(given[0], soft_cap=cap),
    ):
        with pytest.raises(ValueError, match="soft_cap must be a finite number > 0, or None for no cap, got"):
            call()
