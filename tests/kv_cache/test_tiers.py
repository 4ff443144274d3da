"""Tokens in tiers, of bits that fall with age: what is where, in any cut, and the bytes that are promised."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from grid import qkv, relative_error
from linattn import MergedKV, MergedState
from linattn.kv_cache.budget import RECALLS, Sizes, kept_bytes, within_budget

LENGTH = 85
SIZES = {"num_queries": LENGTH, "num_keys": LENGTH, "head_dim": 16, "value_dim": 12}
TIERS = (
    MergedKV(2, 16, bits=4, coded=((10, 4), (20, 2))),
    # The oldest are evicted.
    MergedKV(3, 0, coded=((17, 3.5),)),
    # Blocks are larger than the tier.
    MergedKV(5, 9, None, 2, coded=((3, (2, 3)),)),
    # The second tier is the newest of the merged keys.
    MergedKV(2, 16, bits=(4, 3), coded=((10, 6), (12, (4, 3)))),
)


def streamed(given: tuple[Tensor, ...], config: MergedKV, cuts: list[int], mask: Tensor | None = None) -> MergedState:
    state, outs = None, []
    for start, stop in itertools.pairwise([0, *cuts, given[1].shape[2]]):
        piece = (x[:, :, start:stop] for x in given)
        part = None if mask is None else mask[:, start:stop]
        out, state = linattn.merged_attention_with_state(*piece, config, state, enable_gqa=True, key_mask=part)
        outs.append(out)
    return torch.cat(outs, 2), state


def attend(given: tuple[Tensor, ...], config: MergedKV, **options: object) -> Tensor:
    return linattn.merged_attention(*given, config, is_causal=True, enable_gqa=True, **options)


CUTS = ([1], [5, 6, 7, 30], list(range(1, LENGTH)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("number", range(len(TIERS)), ids=lambda number: TIERS[number].label)
def test_a_stream_may_be_cut_anywhere(number: int, masked: bool) -> None:
    """Tokens are masked or not in turns, so that each cut meets both, and every setting."""
    config = TIERS[number]
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(2)) > 0.2 if masked else None
    whole, other = streamed(qkv(**SIZES), config, [], mask)
    for cuts in CUTS[(number + masked) % 2 :: 2]:
        out, state = streamed(qkv(**SIZES), config, cuts, mask)
        torch.testing.assert_close(out, whole, rtol=1e-11, atol=1e-11)
        for x, y in zip(pytree.tree_leaves(state), pytree.tree_leaves(other), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("config", TIERS, ids=lambda config: config.label)
def test_a_row_is_as_it_is_alone(config: MergedKV) -> None:
    """Beside others, and padded on the left."""
    given = qkv(**SIZES)
    whole = attend(given, config)
    torch.testing.assert_close(attend(tuple(x[1:] for x in given), config), whole[1:], rtol=1e-11, atol=1e-11)
    padded = tuple(torch.nn.functional.pad(x, (0, 0, 23, 0), value=torch.nan) for x in given)
    mask = torch.arange(23 + LENGTH).ge(23).expand(2, -1)
    torch.testing.assert_close(attend(padded, config, key_mask=mask)[:, :, 23:], whole, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("config", TIERS, ids=lambda config: config.label)
def test_later_tokens_change_nothing_before_them(config: MergedKV) -> None:
    given = qkv(**SIZES)
    before = attend(given, config)
    for x in given:
        x[:, :, 60:] = 1e3 * x[:, :, 60:].flip(1)
    torch.testing.assert_close(attend(given, config)[:, :, :60], before[:, :, :60], rtol=1e-12, atol=1e-12)


def test_as_many_places_as_tokens_are_softmax_in_the_bits_of_each_tier() -> None:
    """Errors are those of the far tiers' bits, and none where every tier's tokens still fit as they are."""
    given = qkv(**SIZES)
    truth = linattn.softmax_attention(*given, is_causal=True, enable_gqa=True)
    errors = [
        relative_error(attend(given, MergedKV(4, 8, bits=4, coded=((20, 8), (LENGTH, bits)))), truth)
        for bits in (2, 3, 4, 6)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 4 * errors[-1]
    wide = MergedKV(4, 18 * LENGTH, bits=None, coded=((16 * LENGTH, 4),))
    torch.testing.assert_close(attend(given, wide), truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [(12, 8), (3, 17)], ids=str)
def test_tokens_pass_through_the_tiers_in_their_order(sizes: tuple[int, int]) -> None:
    """A window of 4 in blocks of 4, then two tiers, one smaller than a block; the oldest but the sinks are gone."""
    query, key, value = qkv(**SIZES)
    value = torch.arange(float(LENGTH)).double().view(1, 1, -1, 1).expand(*key.shape[:3], 8)
    config = MergedKV(4, 0, num_sinks=2, coded=tuple((size, 8) for size in sizes))
    state = linattn.merged_attention_with_state(query, key, value, config, enable_gqa=True).state
    # Their mean is one number of the code.
    found = state.tokens().value[0, 0].mean(-1).round()
    # 85 tokens are 21 blocks and one token: the 21st block and the token are near.
    assert state.keys.recent.bias.shape[2] == 5
    wanted = [0, 1, *range(80 - 20, 85)]
    assert found.shape == (len(wanted),)
    assert (found - torch.tensor(wanted)).abs().max() <= 1
    held = [tier.bias.shape[2] for tier in state.keys.coded]
    assert held == list(sizes)


def test_tokens_of_a_tier_in_the_merged_keys_bits_keep_their_codes_until_they_are_merged() -> None:
    """The newest of all merged keys stand alone, as many as the tier has, and none is rounded twice."""
    given, config = qkv(**SIZES), MergedKV(4, 30, bits=4, coded=((24, 4),))
    # Of blocks of 4 tokens, at each of which some are merged.
    before, after = (
        streamed(tuple(x[:, :, :stop] for x in given), config, [])[1].keys.merged for stop in (LENGTH - 5, LENGTH - 1)
    )
    assert before.bias.shape[2] == config.num_left + config.num_newest == 54
    for rows, later in zip((*before.key, *before.value), (*after.key, *after.value), strict=True):
        assert torch.equal(rows[:, :, -20:], later[:, :, -24:-4])
    for tier in (before, after):
        assert (tier.bias[..., -24:] == 0).all()
        assert (tier.bias[..., :-24] != 0).any(-1).all()


@pytest.mark.parametrize("blocks", [5, 12, 20])
def test_a_full_tier_keeps_its_codes_as_tokens_pass_through(blocks: int) -> None:
    """Of blocks that are a third of the tier: without those that leave it holds few enough to be quantized anew."""
    # In float32, of which a tier begins with more exact tokens than of wider numbers.
    given, config = [x.float() for x in qkv(**SIZES)], MergedKV(4, 16, bits=4, coded=((12, 8),))
    stops = 4 * blocks + 1, 4 * blocks + 5
    before, after = (streamed(tuple(x[:, :, :stop] for x in given), config, [])[1].keys.coded[0] for stop in stops)
    assert before.bias.shape == after.bias.shape == (*before.bias.shape[:2], 12)
    for rows, later in zip((*before.key, *before.value), (*after.key, *after.value), strict=True):
        assert torch.equal(rows[:, :, 4:], later[:, :, :-4])


@pytest.mark.parametrize("recall", RECALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bytes_that_are_promised_are_held(recall: str, dtype: torch.dtype) -> None:
    """To the byte, and no more than the budget at any length; a block is full as the text ends, tiers long before."""
    sizes = Sizes(32, 16, dtype.itemsize, 2)
    config = within_budget(64, sizes, recall=recall)
    assert len(config.tiers) == (2 if recall == "far" else 1)
    block, state = config.blocks.size, None
    generator = torch.Generator().manual_seed(0)
    for _ in range(330 // block):
        given = (torch.randn(1, h, block, w, generator=generator).to(dtype) for h, w in ((2, 32), (1, 32), (1, 16)))
        state = linattn.merged_attention_with_state(*given, config, state, enable_gqa=True).state
        held = sum(x.untyped_storage().nbytes() for x in pytree.tree_leaves(state))
        assert (
            held
            <= kept_bytes(config, sizes, state.num_tokens)
            <= kept_bytes(config, sizes, 10**6)
            <= 64 * sizes.key_bytes
        )
    # Between merges there are places to spare.
    tier = state.keys.merged
    spare, width = config.merged_tier.number - state.keys.merged.bias.shape[2], tier.key.code.shape[-1]
    token = width + 2 + tier.value.code.shape[-1] + 2 + 4
    assert held + spare * token == kept_bytes(config, sizes, 10**6)


@pytest.mark.parametrize("config", TIERS, ids=lambda config: config.label)
def test_states_are_values(config: MergedKV) -> None:
    """Saved, read, taken apart, selected."""
    given = qkv(**SIZES)
    state = streamed(tuple(x[:, :, :70] for x in given), config, [])[1]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    leaves, spec = pytree.tree_flatten(state)
    again = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    later = tuple(x[:, :, 70:] for x in given)
    wanted = linattn.merged_attention_with_state(*later, config, state, enable_gqa=True).out
    for other in (torch.load(file, weights_only=True), again, state.detach().to("cpu")):
        assert torch.equal(linattn.merged_attention_with_state(*later, config, other, enable_gqa=True).out, wanted)
    turned = state.select(torch.tensor([1, 0]))
    rows = linattn.merged_attention_with_state(*(x.flip(0) for x in later), config, turned, enable_gqa=True).out
    torch.testing.assert_close(rows, wanted.flip(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("change", [lambda x: x[..., :-1], lambda x: torch.cat((x, x)), lambda x: x.to(torch.int32)])
def test_every_tensor_of_a_tier_is_checked(change: object) -> None:
    given, config = qkv(**SIZES), TIERS[0]
    leaves, tree = pytree.tree_flatten(streamed(given, config, [])[1])
    for number in range(3, 3 + 2 * 13):
        wrong = pytree.tree_unflatten([*leaves[:number], change(leaves[number]), *leaves[number + 1 :]], tree)
        with pytest.raises(ValueError, match=r"the state's coded\[[01]\]\.[\w.]* must be .*, got "):
            linattn.merged_attention_with_state(*(x[:, :, :1] for x in given), config, wrong, enable_gqa=True)


def test_the_written_form() -> None:
    config = MergedKV(32, 826, 4, coded=((800, 4), (3400, (2, 2.5))))
    assert config.label == "sinks 4 + window 32 + 800 in 4 bits + 3400 in 2/2.5 bits + merged 826 in 4 bits"
    for each in (config, MergedKV(32, 0, coded=((3456, 4),)), MergedKV(32, 9, None, 0, coded=[[7, (3, 3)]])):
        assert MergedKV.parse(each.label) == each
    assert MergedKV(32, 0, coded=((3456, 4),)).label == "sinks 4 + window 32 + 3456 in 4 bits"


@pytest.mark.parametrize("coded", [4, (4,), ((4,),), ((0, 4),), ((4, None),), ((4.0, 4),), ((True, 4),), (("4", 4),)])
def test_other_tiers_are_refused(coded: object) -> None:
    with pytest.raises(ValueError, match=r"coded must be tiers of a positive number of tokens and their bits"):
        MergedKV(4, 8, coded=coded)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="bits must be from 2 to 8"):
        MergedKV(4, 8, coded=((4, 9),))
    with pytest.raises(ValueError, match="num_merged must be an integer from 1 to"):
        MergedKV(4, 0)
    with pytest.raises(ValueError, match="tiers are those of a stream"):
        linattn.merged_attention(*qkv(**SIZES), TIERS[1], enable_gqa=True)
    with pytest.raises(ValueError, match="recall must be one of 'near', 'middle', 'far', got 'all'"):
        within_budget(512, Sizes(64, 64), recall="all")
    with pytest.raises(ValueError, match=r"bits must be left out beside recall='far', which has its own, got 8"):
        within_budget(512, Sizes(64, 64), bits=8, recall="far")
