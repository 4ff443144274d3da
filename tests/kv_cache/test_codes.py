"""Merged keys in few bits: what rounding costs, that it is the same in any cut, and what it leaves alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from grid import qkv, relative_error
from linattn import MergedKV
from linattn.kv_cache.codes import coded_bytes
from linattn.methods.method import parse_method

LENGTH = 109
SIZES = {"num_queries": LENGTH, "num_keys": LENGTH, "head_dim": 16, "value_dim": 12}
# A merge leaves 30 keys, and serves two blocks.
FEW = tuple(MergedKV(2, 32, bits=bits) for bits in (2, 4, 8, (2.5, 3)))


def attend(query: Tensor, key: Tensor, value: Tensor, config: MergedKV, **options: object) -> Tensor:
    """Merged attention, causal."""
    return linattn.merged_attention(query, key, value, config, is_causal=True, enable_gqa=True, **options)


def exactly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention."""
    return linattn.softmax_attention(query, key, value, is_causal=True, enable_gqa=True)


def test_tokens_that_take_no_more_memory_stay_whole() -> None:
    """256 keys in 4 bits are 16 float64 ones: beside 4 sinks, a window of 4 and its block the first 28 tokens are."""
    config, given = MergedKV(4, 256, bits=4), qkv(**SIZES)
    found, truth = attend(*given, config), exactly(*given)
    assert config.merged_tier.num_unquantized(8) == 16
    torch.testing.assert_close(found[:, :, :28], truth[:, :, :28], rtol=1e-12, atol=1e-12)
    assert relative_error(found[:, :, 28:32], truth[:, :, 28:32]) > 1e-4


def test_each_bit_halves_the_error() -> None:
    given = qkv(**SIZES)
    truth = exactly(*given)
    errors = {bits: relative_error(attend(*given, MergedKV(4, LENGTH, bits=bits)), truth) for bits in (2, 3, 4, 6, 8)}
    # Root distortions fall so; the first merged keys are exact, a quarter of all at 8 bits.
    for (more, less), factor in zip(itertools.pairwise(errors.values()), (1.84, 1.91, 3.84, 3.96), strict=True):
        assert less / 1.4 < more / factor < 1.4 * less
    assert errors[4] < 0.06


@pytest.mark.parametrize("power", [-100, -70, 70, 120])
def test_numbers_of_any_size_are_rounded_alike(power: int) -> None:
    """Squares of numbers as large, or as small, are none of float32; nor are those of rows that are all alike."""
    query, key, value = (x.float() for x in qkv(**SIZES))
    for rows in (slice(None), slice(1)):
        given = query, key[:, :, rows].expand_as(key), value[:, :, rows].expand_as(value)
        far = given[0] / 2.0**power, given[1] * 2.0**power, given[2] * 2.0**power
        assert relative_error(attend(*far, MergedKV(4, LENGTH, bits=4)) / 2.0**power, exactly(*given)) < 0.06


def test_weights_are_those_of_keys_and_their_mean() -> None:
    """Rows are read relative to what all keys have in common, and told with it."""
    query, key, value = qkv(**SIZES)
    given, config = (query, key + 3, value), MergedKV(4, LENGTH, bits=8)
    part = linattn.merged_partial(*given, config, is_causal=True, enable_gqa=True)
    truth = linattn.softmax_partial(*given, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(part.out, attend(*given, config), rtol=1e-12, atol=1e-12)
    # Half a level is a 500th of some four deviations: logits are off by thousandths, the worst by less than this.
    torch.testing.assert_close(part.log_normalizer, truth.log_normalizer, rtol=0, atol=0.03)


@pytest.mark.parametrize("config", FEW, ids=str)
def test_what_is_masked_leaves_nothing(config: MergedKV) -> None:
    """A row that sees no key is 0, and later ones are as if the stream began with them, whenever that comes."""
    given = qkv(**SIZES)
    for length in (42, 43, 44):
        masked = torch.zeros(2, length, dtype=torch.bool)
        none = linattn.merged_attention_with_state(
            *(x[:, :, :length] + 3 for x in given), config, enable_gqa=True, key_mask=masked
        )
        assert none.state.num_tokens == 0
        assert (none.out == 0).all()
        token = [x[:, :, length : length + 1] for x in given]
        alone = linattn.merged_attention_with_state(*token, config, none.state, enable_gqa=True)
        torch.testing.assert_close(alone.out, token[2].repeat_interleave(2, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("number", range(len(FEW)), ids=lambda number: str(FEW[number]))
def test_a_stream_may_be_cut_anywhere(number: int, masked: bool) -> None:
    """Codes are the same however often they are read and written; a dozen merges show what more of them do.

    Tokens are masked or not in turns, so that each cut meets both, and every setting.
    """
    config, length = FEW[number], 65
    given = [x[:, :, :length] for x in qkv(**SIZES)]
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(2)) > 0.2 if masked else None
    whole = attend(*given, config, key_mask=mask)
    for cuts in ([1], [8], [5, 6, 7, 30], list(range(1, length)))[(number + masked) % 2 :: 2]:
        state, outs = None, []
        for start, stop in itertools.pairwise([0, *cuts, length]):
            piece = [x[:, :, start:stop] for x in given]
            own = None if mask is None else mask[:, start:stop]
            out, state = linattn.merged_attention_with_state(*piece, config, state, enable_gqa=True, key_mask=own)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("config", FEW, ids=str)
def test_later_tokens_change_nothing_before_them(config: MergedKV) -> None:
    """Nor do they change what rows are rounded relative to."""
    given = qkv(**SIZES)
    before = attend(*given, config)
    for x in given:
        x[:, :, 50:] = 1e3 * x[:, :, 50:].flip(1)
    torch.testing.assert_close(attend(*given, config)[:, :, :50], before[:, :, :50], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", FEW, ids=str)
def test_masked_tokens_are_inert(config: MergedKV) -> None:
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[0, :40] = False
    seen, outs = mask[:, None, :, None], []
    for filling in (0.0, torch.nan, 1e4):
        given = [x.masked_fill(~seen, filling) for x in qkv(**SIZES)]
        outs.append(torch.where(seen, attend(*given, config, key_mask=mask), 0))
    assert bool(outs[0].isfinite().all())
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**40])
def test_the_model_s_units_do_not_matter(factor: float) -> None:
    """Float16 holds no such values, nor such keys."""
    query, key, value = qkv(**SIZES)
    config = MergedKV(4, LENGTH, bits=4)
    found = attend(query / factor, key * factor, value * factor, config) / factor
    torch.testing.assert_close(found, attend(query, key, value, config), rtol=1e-9, atol=1e-9)


def test_what_all_keys_have_in_common_does_not_matter() -> None:
    """It changes no weight, and would leave the rest few levels; nor do coordinates that are large in every key."""
    query, key, value = qkv(**SIZES)
    config = MergedKV(4, LENGTH, bits=4)
    before = attend(query, key, value, config)
    added = 50 * torch.randn(key.shape[-1], dtype=key.dtype)
    torch.testing.assert_close(attend(query, key + added, value, config), before, rtol=1e-9, atol=1e-9)
    wide = torch.where(torch.arange(key.shape[-1]) == 3, 16.0, 1.0).to(key.dtype)
    torch.testing.assert_close(attend(query / wide, key * wide, value, config), before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("late", [64, 67])
def test_a_head_whose_keys_begin_late_is_rounded_as_well(late: int) -> None:
    """Its frame is of its own keys, not of the absent ones before; of its first key alone, where a block has but one.

    In units of which float16 has no number.
    """
    query, key, value = qkv(**SIZES)
    key, value = key + 50, value * 2**-40
    config = MergedKV(4, LENGTH, bits=4)
    bias = torch.zeros(key.shape[:3])
    bias[:, 1, :late] = -torch.inf
    found = attend(query, key, value, config, key_bias=bias)
    groups = query.shape[1] // key.shape[1]
    alone = query[:, groups : 2 * groups, late:], key[:, 1:2, late:], value[:, 1:2, late:]
    truth = exactly(*alone)
    # Of the first block's four keys, or one, not of more as where all are there.
    error = relative_error(attend(query, key, value, config), exactly(query, key, value))
    assert relative_error(found[:, groups : 2 * groups, late:], truth) < 2 * error


def test_gradients_pass_rounding_by() -> None:
    """A row's weights, which its output's gradient in the values is made of, sum to 1; keys have gradients as well."""
    query, key, value = (x.requires_grad_() for x in qkv(**SIZES))
    out = attend(query, key, value, MergedKV(4, 24, bits=4))
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    torch.testing.assert_close(grads[2].sum(), out.new_tensor(float(out.numel())), rtol=1e-12, atol=0)
    # Keys that were merged and rounded long before the last row.
    early = torch.autograd.grad(attend(query, key, value, FEW[1])[:, :, -1].square().sum(), key)[0][:, :, :20]
    assert bool((early.abs().amax((0, 1, 3)) > 0).all())


def test_codes_of_earlier_calls_are_constants_for_gradients() -> None:
    """Of what a state holds in numbers, as its window, later calls have gradients."""
    config, cut = MergedKV(4, 24, bits=4, num_sinks=0), LENGTH - 5
    query, key, value = qkv(**SIZES)
    parts, state = [], None
    value.requires_grad_()
    for piece in (slice(0, cut), slice(cut, LENGTH)):
        given = query[:, :, piece], key[:, :, piece], value[:, :, piece]
        out, state = linattn.merged_attention_with_state(*given, config, state, enable_gqa=True)
        parts.append(out)
    size = torch.autograd.grad(parts[1].square().sum(), value)[0].abs().amax((0, 1, 3))
    assert not bool(size[: cut - 8].any())
    assert bool((size[cut - 4 :] > 0).all())


def test_the_state_is_small() -> None:
    """Codes and a scale a row, biases and frames: counted in the tensors that are kept."""
    config = MergedKV(4, 48, bits=4)
    given = qkv(**SIZES | {"head_dim": 64, "value_dim": 32, "dtype": torch.float32})
    state = linattn.merged_attention_with_state(*given, config, enable_gqa=True).state
    codes = [x for x in pytree.tree_leaves(state) if x.dtype in (torch.uint8, torch.float16)]
    bits = 2 + 1  # of the blocks of 32 numbers
    assert sum(x.nbytes for x in codes) == 2 * 2 * (48 * (coded_bytes(64, 4) + coded_bytes(32, 4)) + bits)
    assert coded_bytes(64, 4) == 32 + 2
    for x in pytree.tree_leaves(state):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


@pytest.mark.parametrize("bits", [None, 4, 2.5, (3, 4), (8, 2.5)], ids=str)
@pytest.mark.parametrize("num_sinks", [0, 4, 7])
def test_the_written_form(bits: object, num_sinks: int) -> None:
    for window in (None, 64):
        config = MergedKV(window, 512, bits, num_sinks)
        assert MergedKV.parse(config.label) == config
        assert parse_method(config.label).label == config.label


def test_the_written_form_says_what_is_kept() -> None:
    assert MergedKV(64, 512, bits=(3, 4)).label == "sinks 4 + window 64 + merged 512 in 3/4 bits"
    assert MergedKV(64, 512, bits=(4, 4.0), num_sinks=0).label == "window 64 + merged 512 in 4 bits"
    assert MergedKV.parse("Merged 512 in 3.5 bits + window 64 + SINKS 2") == MergedKV(64, 512, 3.5, 2)


def test_bits_mean_nothing_where_every_key_is_in_view() -> None:
    """Nothing is kept there: rows are the same to the bit."""
    given = qkv(**SIZES)
    for window in (None, 4):
        plain, few = (MergedKV(window, 9, bits=bits) for bits in (None, 4))
        found, wanted = (linattn.merged_attention(*given, config, enable_gqa=True) for config in (few, plain))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("bits", [1, 1.5, 3.25, 9, True, "4", (4,), (4, 9), (4, 4, 4), [4, 4], float("nan")], ids=repr)
def test_other_bits_are_refused(bits: object) -> None:
    with pytest.raises(ValueError, match=r"bits must be from 2 to 8 in halves, or two of these, .* got "):
        MergedKV(4, 8, bits=bits)


@pytest.mark.parametrize("num_sinks", [-1, 2.0, True, None, 2**31], ids=repr)
def test_other_sinks_are_refused(num_sinks: object) -> None:
    with pytest.raises(ValueError, match=r"num_sinks must be an integer from 0 to 2³¹ - 1, got "):
        MergedKV(4, 8, num_sinks=num_sinks)


def test_what_cannot_be_is_refused() -> None:
    for text, words in (
        ("window 4 in 4 bits + merged 8", "only tiers and merged keys are quantized; leave the bits out"),
        ("sinks 4 in 4 bits + merged 8", "only tiers and merged keys are quantized; leave the bits out"),
        ("window 4 + merged 8 in 9 bits", "bits must be from 2 to 8"),
        ("window 4 + merged 8 in 4/4/4 bits", "is no part of merged keys"),
        ("window 4 + merged 8 in 3..5 bits", "'merged 8 in 3..5 bits' is no part of merged keys"),
        ("merged 1" + 5000 * "0", "is no part of merged keys"),  # Python reads no int of so many digits.
    ):
        with pytest.raises(ValueError, match=words):
            MergedKV.parse(text)


@pytest.mark.parametrize("text", [None, 512, b"merged 8", MergedKV(4, 8)], ids=repr)
def test_a_written_form_is_a_str(text: object) -> None:
    with pytest.raises(TypeError, match="text must be a str, got "):
        MergedKV.parse(text)


def test_the_first_live_tokens_stay_exact() -> None:
    """Of each row, however far it is padded; in any units, and however many are merged."""
    query, key, value = qkv(**SIZES)
    config = MergedKV(4, 8, bits=2, num_sinks=3)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, :41] = False
    state = linattn.merged_attention_with_state(query, key, value, config, enable_gqa=True, key_mask=mask).state
    held, rows = state.tokens(), (0, 41)
    for row, first in enumerate(rows):
        assert torch.equal(held.key[row, :, :3], key[row, :, first : first + 3])
        assert torch.equal(held.value[row, :, :3], value[row, :, first : first + 3])
        assert (held.bias[row, :, :3] == 0).all()


def test_sinks_take_no_part_in_merges() -> None:
    """Rows are those of softmax over the first tokens, and of a stream that begins after them."""
    query, key, value = qkv(**SIZES)
    for bits in (None, 4):
        with_sinks, without = (MergedKV(4, 12, bits, num_sinks=number) for number in (4, 0))
        found = attend(query, key, value, with_sinks)[:, :, 4:]
        rest = linattn.merged_partial(
            *(x[:, :, 4:] for x in (query, key, value)), without, is_causal=True, enable_gqa=True
        )
        first = linattn.softmax_partial(query[:, :, 4:], key[:, :, :4], value[:, :, :4], enable_gqa=True)
        torch.testing.assert_close(found, linattn.combine(first, rest).out, rtol=1e-12, atol=1e-12)


def test_a_text_that_turns_keeps_its_digits() -> None:
    """Rows of another mean and of other deviations than those that codes began with: scales are a row's own."""
    query, key, value = qkv(**SIZES)
    turned = [x.clone() for x in (query, key, value)]
    wide = torch.where(torch.arange(key.shape[-1]) % 3 == 0, 3.0, 0.5).to(key.dtype)
    turned[1][:, :, 60:] = key[:, :, 60:] * wide + 1
    turned[0][:, :, 60:] = query[:, :, 60:] / wide
    config = MergedKV(4, LENGTH, bits=4)
    errors = [
        relative_error(attend(*x, config)[:, :, 60:], exactly(*x)[:, :, 60:]) for x in ((query, key, value), turned)
    ]
    assert errors[1] < 2.5 * errors[0]


@pytest.mark.parametrize("apart", [0.0, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_text_that_begins_with_one_value_keeps_its_digits(dtype: torch.dtype, apart: float) -> None:
    """One token again and again has one value in a model's first layer, and nearly one in others."""
    query, key, value = qkv(**SIZES, dtype=dtype)
    begun = value[:, :, :1] * (1 + apart * value[:, :, :50])
    turned, config = torch.cat((begun, value[:, :, 50:]), 2), MergedKV(4, LENGTH, bits=4)
    errors = [
        relative_error(attend(query, key, x, config)[:, :, 60:], exactly(query, key, x)[:, :, 60:])
        for x in (value, turned)
    ]
    assert errors[1] < 2.5 * errors[0]


def test_keys_that_stay_alone_keep_their_codes() -> None:
    """However often others are merged: rounding is not repeated."""
    given, config, state, before = qkv(**SIZES), MergedKV(2, 32, bits=3), None, None
    for token in range(LENGTH):
        piece = (x[:, :, token : token + 1] for x in given)
        state = linattn.merged_attention_with_state(*piece, config, state, enable_gqa=True).state
        held = state.keys.merged
        # Frames are taken once more at three times three keys.
        if token > 20:
            rows = torch.cat((held.key.code, held.key.scale.unsqueeze(-1).view(torch.uint8)), -1)[1, 0]
            after = {bytes(row.tolist()) for row in rows}
            # At most four keys are too many at once, each of which makes two places new at most.
            assert before is None or len(before - after) <= 8
            before = after
    assert before is not None
    assert len(before) >= 30
