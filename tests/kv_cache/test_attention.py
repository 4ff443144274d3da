"""Attention with merged keys is exact where there are enough of them, and the same however a stream is cut."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from damaged_states import read_again
from differences import check_gradients
from grid import qkv, relative_error, tokens
from linattn import MergedKV

LENGTH = 61
PARTS = (
    MergedKV(4, 6, bits=None),
    MergedKV(1, 3, bits=None),
    MergedKV(7, 20, bits=None),
    MergedKV(8, 1, bits=None),
    MergedKV(1, 19, bits=None),
)
EVERYWHERE = (
    MergedKV(None, 6, bits=None),
    MergedKV(4, 6, bits=None),
    MergedKV(1, 5, bits=None),
    MergedKV(7, 20, bits=None),
)


def attend(query: Tensor, key: Tensor, value: Tensor, config: MergedKV, **options: object) -> Tensor:
    """Merged attention, heads grouped."""
    return linattn.merged_attention(query, key, value, config, enable_gqa=True, **options)


def streamed(pieces: list[slice], config: MergedKV, mask: Tensor | None = None, length: int = LENGTH) -> Tensor:
    """The same piece by piece."""
    query, key, value = qkv(num_queries=length, num_keys=length)
    state, outs = None, []
    for piece in pieces:
        out, state = linattn.merged_attention_with_state(
            *(x[:, :, piece] for x in (query, key, value)),
            config,
            state,
            enable_gqa=True,
            key_mask=None if mask is None else mask[:, piece],
        )
        outs.append(out)
    return torch.cat(outs, 2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "config", [MergedKV(4, 64, bits=None), MergedKV(16, 37, bits=None), MergedKV(64, 1, bits=None)], ids=str
)
def test_enough_keys_are_softmax_attention(config: MergedKV, masked: bool) -> None:
    query, key, value = qkv(num_queries=LENGTH, num_keys=LENGTH, scale=1.5)
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.3 if masked else None
    for is_causal in (True, False):
        if not is_causal and config.num_merged < LENGTH:
            continue
        options = {"key_mask": mask, "is_causal": is_causal}
        truth = linattn.softmax_attention(query, key, value, enable_gqa=True, **options)
        torch.testing.assert_close(attend(query, key, value, config, **options), truth, rtol=1e-12, atol=1e-12)


def test_enough_keys_are_softmax_attention_in_any_cut() -> None:
    truth = linattn.softmax_attention(*qkv(num_queries=LENGTH, num_keys=LENGTH), enable_gqa=True, is_causal=True)
    for cuts in ([1], [5, 6, 7, 30], list(range(1, LENGTH))):
        pieces = [slice(*pair) for pair in itertools.pairwise([0, *cuts, LENGTH])]
        torch.testing.assert_close(streamed(pieces, MergedKV(4, LENGTH, bits=None)), truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("config", PARTS, ids=str)
def test_a_stream_may_be_cut_anywhere(config: MergedKV, masked: bool) -> None:
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(2)) > 0.2 if masked else None
    whole = streamed([slice(None)], config, mask)
    for cuts in ([1], [8], [16], [5, 6, 7, 30], list(range(1, LENGTH)), [44]):
        pieces = [slice(*pair) for pair in itertools.pairwise([0, *cuts, LENGTH])]
        torch.testing.assert_close(streamed(pieces, config, mask), whole, rtol=1e-11, atol=1e-11)
    assert torch.equal(whole, attend(*qkv(num_queries=LENGTH, num_keys=LENGTH), config, key_mask=mask, is_causal=True))


@pytest.mark.parametrize("config", [MergedKV(70, 9, bits=None), MergedKV(129, 30, bits=None)], ids=str)
def test_windows_of_several_blocks_may_be_cut_anywhere(config: MergedKV) -> None:
    """Keys leave block by block: each row sees the window before its block, and with enough merged keys all."""
    length = 331
    for cuts in ([1, 35, 70, 71, 140], [43, 44, 172, 173, 215, 216], [330]):
        pieces = [slice(*pair) for pair in itertools.pairwise([0, *cuts, length])]
        whole = streamed([slice(None)], config, length=length)
        torch.testing.assert_close(streamed(pieces, config, length=length), whole, rtol=1e-11, atol=1e-11)
    query, key, value = qkv(num_queries=length, num_keys=length)
    merging = 2 * config.blocks.size + config.blocks.window
    truth = linattn.softmax_attention(query, key, value, is_causal=True, enable_gqa=True)
    out = attend(query, key, value, dataclasses.replace(config, num_merged=1), is_causal=True)
    first = config.blocks.window + config.blocks.size
    torch.testing.assert_close(out[:, :, :first], truth[:, :, :first], rtol=1e-12, atol=1e-12)
    assert relative_error(out[:, :, first:merging], truth[:, :, first:merging]) > 1e-6
    enough = dataclasses.replace(config, num_merged=length)
    out = attend(query, key, value, enough, is_causal=True)
    torch.testing.assert_close(out, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("soft_cap", [None, 0.8])
@pytest.mark.parametrize("config", [*PARTS, MergedKV(2, 20, bits=4, coded=((12, 4), (10, 2)))], ids=str)
def test_later_tokens_change_nothing_before_them(config: MergedKV, soft_cap: float | None) -> None:
    query, key, value = qkv(num_queries=LENGTH, num_keys=LENGTH)
    before = attend(query, key, value, config, is_causal=True, soft_cap=soft_cap)
    for x in (query, key, value):
        x[:, :, 30:] = 1e3 * x[:, :, 30:].flip(1)
    after = attend(query, key, value, config, is_causal=True, soft_cap=soft_cap)
    torch.testing.assert_close(after[:, :, :30], before[:, :, :30], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("config", EVERYWHERE, ids=str)
def test_masked_tokens_are_inert(config: MergedKV, is_causal: bool) -> None:
    """Whatever they hold, forward and backward; forward that goes for their queries too, which are not counted."""
    if is_causal and config.window is None:
        pytest.skip("refused")
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[0, :9] = False
    seen, results = mask[:, None, :, None], []
    for filling in (0.0, torch.nan, torch.inf, 1e4):
        given = [x.masked_fill(~seen, filling) for x in qkv(num_queries=LENGTH, num_keys=LENGTH)]
        outs = [torch.where(seen, attend(*given, config, key_mask=mask, is_causal=is_causal), 0)]
        leaves = [x.requires_grad_() for x in (given[0].nan_to_num(1.0, 1.0), *given[1:])]
        out = torch.where(seen, attend(*leaves, config, key_mask=mask, is_causal=is_causal), 0)
        results.append((*outs, *torch.autograd.grad(out.square().sum(), leaves[1:])))
    for found in results[1:]:
        for x, y in zip(found, results[0], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert (results[0][1].masked_select(~seen) == 0).all()


@pytest.mark.parametrize("config", EVERYWHERE, ids=str)
def test_left_padding_is_as_if_absent_but_for_the_blocks(config: MergedKV) -> None:
    """Whole blocks of it, on either side of an encoder's text."""
    width = 4 * (config.window or 3)
    query, key, value = qkv(num_queries=LENGTH, num_keys=LENGTH)
    alone = attend(query, key, value, config)
    padded = [torch.nn.functional.pad(x, (0, 0, width, 11), value=3.0) for x in (query, key, value)]
    mask = torch.zeros(2, LENGTH + width + 11, dtype=torch.bool)
    mask[:, width : width + LENGTH] = True
    found = attend(*padded, config, key_mask=mask)[:, :, width : width + LENGTH]
    torch.testing.assert_close(found, alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("config", [*EVERYWHERE[1:], MergedKV(2, 1, bits=None)], ids=str)
def test_outputs_lie_in_the_hull_of_the_values(config: MergedKV, is_causal: bool) -> None:
    for scale in (0.7, 30.0, 300.0):
        query, key, value = qkv(num_queries=LENGTH, num_keys=LENGTH, scale=scale)
        out = attend(query, key, value, config, is_causal=is_causal)
        value = value.repeat_interleave(2, 1)
        low, high = value.amin(2, keepdim=True), value.amax(2, keepdim=True)
        assert (out >= low - 1e-9).all()
        assert (out <= high + 1e-9).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("config", EVERYWHERE, ids=str)
def test_rows_and_heads_are_alone(config: MergedKV, is_causal: bool) -> None:
    if is_causal and config.window is None:
        pytest.skip("refused")
    query, key, value = qkv(num_queries=LENGTH, num_keys=LENGTH)
    together = attend(query, key, value, config, is_causal=is_causal)
    for b, h in itertools.product(range(2), range(2)):
        own = slice(2 * h, 2 * h + 2)
        alone = attend(
            query[b : b + 1, own], key[b : b + 1, h : h + 1], value[b : b + 1, h : h + 1], config, is_causal=is_causal
        )
        torch.testing.assert_close(together[b : b + 1, own], alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("config", [MergedKV(4, 3, bits=None), MergedKV(None, 4, bits=None)], ids=str)
def test_gradients_are_those_of_finite_differences(config: MergedKV, is_causal: bool) -> None:
    """In queries, through their mean too, keys, values and biases; a difference of 1e-6 changes no choice."""
    if is_causal and config.window is None:
        pytest.skip("refused")
    row = qkv(batch=1, heads=2, kv_heads=1, num_queries=13, num_keys=13, head_dim=2, value_dim=1)

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        part = linattn.merged_partial(*x[:3], config, key_bias=x[3], is_causal=is_causal, enable_gqa=True)
        fused = attend(*x[:3], config, key_bias=x[3], is_causal=is_causal)
        return part.log_normalizer, fused

    check_gradients(call, (*row, tokens(1, 1, 13, seed=8)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("config", EVERYWHERE, ids=str)
def test_the_fused_kernel_and_the_formed_weights_agree(config: MergedKV, is_causal: bool) -> None:
    if is_causal and config.window is None:
        pytest.skip("refused")
    given = qkv(num_queries=LENGTH, num_keys=LENGTH)
    part = linattn.merged_partial(*given, config, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(part.out, attend(*given, config, is_causal=is_causal), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_merge_of_many_keys_serves_several_blocks(bits: int | None) -> None:
    """Of 40 keys and blocks of one, two more than must be are merged, and the next two blocks fit."""
    config, state, sizes = MergedKV(1, 40, bits=bits, num_sinks=0), None, []
    for t in range(61):
        piece = (x[:, :, t : t + 1] for x in qkv(num_queries=61, num_keys=61))
        state = linattn.merged_attention_with_state(*piece, config, state, enable_gqa=True).state
        sizes.append(state.keys.merged.bias.shape[2])
    assert config.num_left == 38
    # The window and the current token are not merged.
    assert sizes == [max(t - 1, 0) if t < 42 else 38 + (t - 42) % 3 for t in range(61)]


def test_the_size_of_a_stream_s_state_does_not_grow() -> None:
    query, key, value = qkv(num_queries=100, num_keys=100)
    state, sizes = None, set()
    for t in range(100):
        piece = (x[:, :, t : t + 1] for x in (query, key, value))
        state = linattn.merged_attention_with_state(*piece, MergedKV(4, 6, bits=None), state, enable_gqa=True).state
        sizes.add(state.tokens().key.shape[2])
    assert max(sizes) == 4 + 2 * 4 + 6
    whole = linattn.merged_attention_with_state(query, key, value, MergedKV(4, 6, bits=None), enable_gqa=True).state
    for x in pytree.tree_leaves(whole):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


@pytest.mark.parametrize("config", [MergedKV(4, 6, bits=None), MergedKV(4, 16, bits=4)], ids=str)
def test_a_stream_s_state_is_a_value(config: MergedKV) -> None:
    """Stepped twice, forked, selected, saved and read."""
    options = {"config": config, "enable_gqa": True}
    state = linattn.merged_attention_with_state(*qkv(), **options).state
    frozen, later = copy.deepcopy(state), qkv(num_queries=9, num_keys=9, seed=4)
    leaves, spec = pytree.tree_flatten(state)
    spec = pytree.treespec_loads(pytree.treespec_dumps(spec))
    once = linattn.merged_attention_with_state(*later, state=state, **options).out
    others = (state.detach().to("cpu"), read_again(state), pytree.tree_unflatten(leaves, spec))
    for other in others:
        found = linattn.merged_attention_with_state(*later, state=other, **options).out
        torch.testing.assert_close(found, once, rtol=1e-12, atol=1e-12)
    for x, y in zip(pytree.tree_leaves(state), pytree.tree_leaves(frozen), strict=True):
        assert torch.equal(x, y)
    swapped = state.select(torch.tensor([1, 0, 0]))
    found = linattn.merged_attention_with_state(*(x[[1, 0, 0]] for x in later), state=swapped, **options).out
    torch.testing.assert_close(found, once[[1, 0, 0]], rtol=1e-12, atol=1e-12)
    assert repr(config.label) in repr(state)
    assert state.read(later[0]).out.shape == (2, 4, 9, 5)


def test_a_stream_of_few_tokens_reads_what_it_saw() -> None:
    query, key, value = qkv()
    state = linattn.merged_attention_with_state(query, key, value, MergedKV(4, 64, bits=None), enable_gqa=True).state
    truth = linattn.softmax_partial(query, key, value, enable_gqa=True)
    found = state.read(query)
    torch.testing.assert_close(found.out, truth.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.log_normalizer, truth.log_normalizer, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_low_precision_loses_its_own_digits(dtype: torch.dtype, is_causal: bool) -> None:
    """Sums and merged keys are kept in at least float32: with enough of them the output is rounded once."""
    given = qkv(num_queries=64, num_keys=64, dtype=dtype)
    truth = linattn.softmax_attention(*(x.double() for x in given), enable_gqa=True, is_causal=is_causal)
    found = attend(*given, MergedKV(4, 64, bits=None), is_causal=is_causal)
    assert found.dtype == dtype
    assert relative_error(found, truth) <= 2 * torch.finfo(dtype).eps
    long = attend(
        *(x.to(dtype) for x in qkv(num_queries=64, num_keys=64)[:2]),
        torch.ones_like(given[2]),
        MergedKV(2, 3, bits=None),
        is_causal=is_causal,
    )
    # The output's rounding, and one in float32 for each block that joined the merged keys.
    assert (long - 1).abs().max() <= torch.finfo(dtype).eps + 32 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_stream_keeps_tokens_as_they_came_and_merges_them_in_at_least_float32(dtype: torch.dtype) -> None:
    tokens = qkv(num_queries=20, num_keys=20, dtype=dtype)
    keys = linattn.merged_attention_with_state(*tokens, MergedKV(2, 3, bits=None), enable_gqa=True).state.keys
    wide = torch.promote_types(dtype, torch.float32)
    assert [x.dtype for x in keys.merged] == [wide] * 3
    assert [x.dtype for x in keys.recent] == [dtype, dtype, wide]


def test_errors_fall_as_keys_are_added() -> None:
    """Less than uniform averaging's with a sixteenth of the keys, and less with each doubling."""
    query, key, value = qkv(1, 2, 1, 256, 256)
    truth = linattn.softmax_attention(query, key, value, enable_gqa=True)
    mean = value.mean(2, keepdim=True).expand_as(truth)
    errors = [relative_error(attend(query, key, value, MergedKV(None, c, bits=None)), truth) for c in (16, 32, 64, 128)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < relative_error(mean, truth)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("config", EVERYWHERE, ids=str)
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"num_queries": 0, "num_keys": 0}, {"value_dim": 0}], ids=str)
def test_nothing_is_a_legal_amount(config: MergedKV, is_causal: bool, sizes: dict[str, int]) -> None:
    if is_causal and config.window is None:
        pytest.skip("refused")
    leaves = [x.requires_grad_() for x in qkv(**sizes)]
    out = attend(*leaves, config, is_causal=is_causal)
    assert out.shape == (*leaves[0].shape[:3], leaves[2].shape[-1])
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape


def test_rows_without_keys_are_0() -> None:
    query, key, value = qkv()
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0] = False
    for config, is_causal in ((MergedKV(4, 6, bits=None), True), *((config, False) for config in EVERYWHERE)):
        assert (attend(query, key, value, config, is_causal=is_causal, key_mask=mask)[0] == 0).all()
    assert (attend(query, key[:, :, :0], value[:, :, :0], MergedKV(None, 3, bits=None)) == 0).all()


@pytest.mark.parametrize(
    ("is_causal", "bits"), [(False, None), (True, None), (True, 4)], ids=["bidirectional", "causal", "4 bits"]
)
def test_compiled_and_mapped_calls_are_those_of_eager(is_causal: bool, bits: int | None) -> None:
    """The search for pairs is one operator, since its rounds depend on the data."""
    given = qkv(num_queries=13, num_keys=13)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, MergedKV(4, 6, bits=bits), is_causal=is_causal)

    leaves = [x.requires_grad_() for x in given]
    truth = call(*leaves)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, truth, rtol=1e-12, atol=1e-12)
    grads = (torch.autograd.grad(out.square().sum(), leaves) for out in (compiled, truth))
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    query, key, value = (x.detach() for x in given)
    mapped = torch.vmap(call, in_dims=(None, 1, None))(query, torch.stack((key, key + 1), 1), value)
    for found, wanted in zip(mapped, (call(query, key, value), call(query, key + 1, value)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_cannot_be_is_refused() -> None:
    query, key, value = qkv(heads=2)
    for sizes, words in (
        ((0, 4), "window must be an integer from 1 to 2³¹ - 1, got 0"),
        ((4.0, 4), "window must be an integer from 1 to 2³¹ - 1, got 4.0"),
        ((True, 4), "window must be an integer from 1 to 2³¹ - 1, got True"),
        ((4, 0), "num_merged must be an integer from 1 to 2³¹ - 1, got 0"),
        ((4, 2**31), "num_merged must be an integer from 1 to 2³¹ - 1, got 2147483648"),
        ((4, None), "num_merged must be an integer from 1 to 2³¹ - 1, got None"),
    ):
        with pytest.raises(ValueError, match=words):
            MergedKV(*sizes)
    config = MergedKV(4, 2, bits=None)
    for given, options, words in (
        (MergedKV(None, 2, bits=None), {"is_causal": True}, "give window too"),
        (config, {"backend": "triton"}, "backend must be one of 'auto', 'torch', 'compiled', got 'triton'"),
        (config, {"backend": "fast"}, "got 'fast'"),
    ):
        with pytest.raises(ValueError, match=words):
            attend(query, key, value, given, **options)
    for given in (None, linattn.feature_maps.FavorPlus(8, 12), 4, config.label):
        with pytest.raises(TypeError, match=r"config must be a linattn\.MergedKV, got .*; write MergedKV"):
            attend(query, key, value, given)
    with pytest.raises(ValueError, match="as many queries as keys"):
        attend(query[:, :, :5], key, value, config)
    with pytest.raises(ValueError, match="no more queries than keys"):
        attend(query, key[:, :, :5], value[:, :, :5], config, is_causal=True)


def test_another_state_is_refused() -> None:
    query, key, value = qkv(heads=2)
    config, favor = MergedKV(4, 2, bits=None), linattn.feature_maps.FavorPlus(8, 12)
    state = linattn.merged_attention_with_state(query, key, value, config).state
    with pytest.raises(ValueError, match=r"the state was built with MergedKV\(window=4, .* got MergedKV\(window=8"):
        linattn.merged_attention_with_state(query, key, value, MergedKV(8, 2, bits=None), state)
    sums = linattn.linear_attention_with_state(query, key, value, favor).state
    with pytest.raises(TypeError, match=r"state must be a linattn\.MergedState or None, got State"):
        linattn.merged_attention_with_state(query, key, value, config, sums)
    with pytest.raises(TypeError, match="State"):
        linattn.linear_attention_with_state(query, key, value, favor, state)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_stream_that_goes_on_without_gradients_keeps_no_graph(bits: int | None) -> None:
    """Its sinks, and tiers that nothing has entered, come from calls that gradients followed."""
    (q, k, v), config = (x.requires_grad_() for x in qkv(num_queries=30, num_keys=30)), MergedKV(4, 6, bits, 2)
    _, state = linattn.merged_attention_with_state(q, k, v, config, enable_gqa=True)
    assert any(x.requires_grad for x in pytree.tree_leaves(state))
    with torch.no_grad():
        _, state = linattn.merged_attention_with_state(
            q[:, :, :3], k[:, :, :3], v[:, :, :3], config, state, enable_gqa=True
        )
    assert not any(x.requires_grad for x in pytree.tree_leaves(state))
