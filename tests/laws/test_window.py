"""A window beside the map: the parts' keys are disjoint and together all, whatever the cut, the mask and the map."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import linattn
from damaged_states import read_again
from grid import (
    BACKENDS,
    HEAD_DIM,
    NONNEGATIVE_MAPS,
    SOFTMAX_MAPS,
    build,
    in_turns,
    qkv,
    relative_error,
    takes_statistics_from_the_call,
)
from linattn.feature_maps import Expansion, FavorPlus, FeatureMap, features

# Every map that may have a window.
MAPS = tuple(n for n in SOFTMAX_MAPS if n in NONNEGATIVE_MAPS or isinstance(build(n), Expansion))
CAUSAL_MAPS = tuple(n for n in MAPS if not takes_statistics_from_the_call(n))
WINDOWS = (1, 4, 8, 64)


def fitted(name: str, query: Tensor, key: Tensor, mask: Tensor | None) -> FeatureMap:
    """A map of the grid, with what it would take from the call."""
    feature_map = build(name)
    for buffer, x in feature_map.call_tensors(query, key, key_mask=mask, is_causal=False).items():
        setattr(feature_map, buffer, x)
    return feature_map


def map_weights(feature_map: FeatureMap, query: Tensor, key: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The map's weights (B, H, Lq, Lk) of visible keys and the logarithm (B, H, Lq, 1) of their scale."""
    groups = query.shape[1] // key.shape[1]
    if not isinstance(feature_map, Expansion):
        phi_q = torch.stack([features(feature_map, query[:, g::groups], "query") for g in range(groups)], 2)
        weights = phi_q @ features(feature_map, key, "key").mT.unsqueeze(2)
        return weights.flatten(1, 2) * visible, torch.zeros(*query.shape[:3], 1, dtype=query.dtype)
    wide = key.repeat_interleave(groups, 1)
    centres, probes, mean, spread = (
        x.expand(query.shape[0], key.shape[1], -1, -1).repeat_interleave(groups, 1)
        for x in (feature_map.centres, feature_map.probes, feature_map.key_mean, feature_map.spread)
    )
    nearest = ((centres * probes).sum(-1).unsqueeze(-2) - 2 * query @ probes.mT).argmin(-1)
    centre = torch.take_along_dim(centres, nearest.unsqueeze(-1), -2)
    logits = torch.where(visible, feature_map.scale * centre @ wide.mT, -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0, peak)
    p = torch.exp(logits - peak)
    total = p.sum(-1, keepdim=True)
    step = feature_map.scale * (query - centre)
    products = step @ wide.mT
    u = (p * products).sum(-1, keepdim=True) / torch.where(total == 0, 1, total)
    t = products - u
    if feature_map.order == 0:
        # Nothing is known of the keys but their number: the mean that the map was fitted with stands for them.
        return p, peak + step @ mean.mT
    if feature_map.order == 1:
        t = t * (1.5 / (step.norm(dim=-1, keepdim=True) * spread)).clamp(max=1)
    return p * (1 + t + t**2 / 2 * (feature_map.order > 1)), peak + u


def by_hand(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    window: int,
    causal: bool,
) -> Tensor:
    """Every weight formed, of rows turned to begin with their first live token; causally earlier ones see none."""
    feature_map = fitted(name, query, key, mask)
    if mask is None:
        return in_place(feature_map, query, key, value, mask, window, causal)
    first, length = (~mask).long().cumprod(-1).sum(-1), mask.shape[1]
    there, back = ((torch.arange(length) + x.unsqueeze(-1)) % length for x in (first, -first))
    tokens = (torch.take_along_dim(x, there[:, None, :, None], 2) for x in (query, key, value))
    rows = in_place(feature_map, *tokens, mask.gather(1, there), window, causal)
    blind = causal & (torch.arange(length) < first.unsqueeze(-1))
    return torch.take_along_dim(rows, back[:, None, :, None], 2).masked_fill(blind[:, None, :, None], 0)


def in_place(
    feature_map: FeatureMap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    window: int,
    causal: bool,
) -> Tensor:
    """Every weight formed: exact ones near, the map's elsewhere, before and after apart."""
    length = query.shape[2]
    groups = query.shape[1] // key.shape[1]
    mask = torch.ones(key.shape[0], length, dtype=torch.bool) if mask is None else mask
    key, value = (torch.where(mask[:, None, :, None], x, 0) for x in (key, value))
    i, j = torch.arange(length).unsqueeze(-1), torch.arange(length)
    seen = (j <= i) if causal else torch.ones(length, length, dtype=torch.bool)
    near = (((i // window) - (j // window)).abs() <= 1) & seen
    exact = near.expand(*key.shape[:2], -1, -1)
    visible = (seen & mask[:, None, None]).expand(exact.shape)
    exact, rest = ((x & visible).repeat_interleave(groups, 1) for x in (exact, ~exact))
    logits = torch.where(exact, query @ key.repeat_interleave(groups, 1).mT * HEAD_DIM**-0.5, -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0, peak)
    parts = [(torch.exp(logits - peak), peak)]
    sides = (rest,) if causal else (rest & (j < i), rest & (j > i))
    parts += [map_weights(feature_map, query, key, side) for side in sides]
    top = torch.stack([log for _, log in parts]).amax(0)
    weights = sum(w * torch.exp(log - top) for w, log in parts)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1, total) @ value.repeat_interleave(groups, 1)


# Numbers of tokens, and whether some are masked: in turns, so that any two of map, window and text meet.
TEXTS = ((2, True), (3, False), (37, True), (64, False))


@pytest.mark.parametrize(("name", "window", "text"), in_turns(MAPS, WINDOWS, TEXTS), ids=str)
def test_float64_equals_the_definition(name: str, window: int, text: tuple[int, bool], blocks_of) -> None:
    blocks_of(min(max(window, 8), 64))
    length, masked = text
    query, key, value = qkv(num_queries=length, num_keys=length, scale=1.5)
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) > 0.3 if masked else None
    for causal in (False, True):
        if causal and name not in CAUSAL_MAPS:
            continue
        found = linattn.linear_attention(
            query,
            key,
            value,
            build(name),
            key_mask=mask,
            is_causal=causal,
            enable_gqa=True,
            window=window,
        )
        truth = by_hand(name, query, key, value, mask, window, causal)
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["FavorPlus", "Expansion", "Expansion-2"])
def test_gradients_are_those_of_the_reference(name: str, is_causal: bool, blocks_of) -> None:
    blocks_of(8)
    results = []
    for backend in ("reference", "blocked"):
        leaves = [x.requires_grad_() for x in qkv(num_queries=45, num_keys=45)]
        part = linattn.linear_partial(
            *leaves, build(name), is_causal=is_causal, enable_gqa=True, window=4, backend=backend
        )
        loss = part.out.square().sum() + part.log_normalizer.sum()
        results.append((part.out, *torch.autograd.grad(loss, leaves)))
    for truth, found in zip(*results, strict=True):
        assert relative_error(found, truth) < 1e-11


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [3.0, 10.0, 30.0])
def test_gradients_keep_their_digits_beside_large_logits(size: float, is_causal: bool) -> None:
    """What all near keys share is in every logit and in no weight: logits' own rounding is all that may be lost."""
    query, key, value = qkv(1, 2, 2, 12, 12, scale=0.1, dtype=torch.float32)
    query, key, results = query + size, key + size, []
    largest = float((query @ key.mT).max()) / HEAD_DIM**0.5
    for backend, dtype in (("reference", torch.float64), ("blocked", torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = linattn.linear_attention(*leaves, build("FavorPlus"), is_causal=is_causal, window=8, backend=backend)
        results.append(torch.autograd.grad(out, leaves, value.flip(2).to(dtype)))
    for truth, found in zip(*results, strict=True):
        assert relative_error(found, truth) <= 2 * torch.finfo(torch.float32).eps * largest


@pytest.mark.parametrize("cuts", [[1], [8], [16], [5, 6, 7, 30], list(range(1, 45)), [44]], ids=str)
@pytest.mark.parametrize("name", ["FavorPlus", "Expansion", "Expansion-2"])
def test_a_stream_may_be_cut_anywhere(name: str, cuts: list[int]) -> None:
    query, key, value = qkv(num_queries=45, num_keys=45)
    mask = torch.rand(2, 45, generator=torch.Generator().manual_seed(2)) > 0.2
    feature_map, state, outs = build(name), None, []
    options = {"enable_gqa": True, "window": 4}
    whole = linattn.linear_attention(query, key, value, feature_map, key_mask=mask, is_causal=True, **options)
    for start, stop in zip([0, *cuts], [*cuts, 45], strict=True):
        piece = (x[:, :, start:stop] for x in (query, key, value))
        out, state = linattn.linear_attention_with_state(
            *piece, feature_map, state, key_mask=mask[:, start:stop], **options
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-11, atol=1e-11)
    once = linattn.linear_attention_with_state(query, key, value, feature_map, key_mask=mask, **options).state
    later = qkv(num_queries=6, num_keys=6, seed=9)[0]
    torch.testing.assert_close(
        state.read(feature_map, later).out, once.read(feature_map, later).out, rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize(
    ("masked", "cuts"),
    [((True, False), [22]), ((False, True), [22]), ((True, False), [1]), ((True, False, True, False), [7, 9, 30])],
    ids=str,
)
@pytest.mark.parametrize("name", ["FavorPlus", "Expansion"])
def test_the_masks_of_a_stream_come_and_go(name: str, masked: tuple[bool, ...], cuts: list[int]) -> None:
    """A masked token stays unseen when it leaves the window in a later call, which has no mask."""
    query, key, value = qkv(num_queries=45, num_keys=45)
    mask = torch.rand(2, 45, generator=torch.Generator().manual_seed(2)) > 0.5
    mask[:, 0] = False
    pieces = [slice(*pair) for pair in itertools.pairwise([0, *cuts, 45])]
    for piece, given in zip(pieces, masked, strict=True):
        mask[:, piece] |= not given
    feature_map, state, outs = build(name), None, []
    options = {"enable_gqa": True, "window": 4}
    whole = linattn.linear_attention(query, key, value, feature_map, key_mask=mask, is_causal=True, **options)
    for piece, given in zip(pieces, masked, strict=True):
        out, state = linattn.linear_attention_with_state(
            *(x[:, :, piece] for x in (query, key, value)),
            feature_map,
            state,
            key_mask=mask[:, piece] if given else None,
            **options,
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-11, atol=1e-11)


def test_the_size_of_a_stream_s_state_does_not_grow() -> None:
    feature_map, state, sizes = FavorPlus(8, 12), None, set()
    query, key, value = qkv(num_queries=100, num_keys=100)
    for t in range(100):
        piece = (x[:, :, t : t + 1] for x in (query, key, value))
        state = linattn.linear_attention_with_state(*piece, feature_map, state, enable_gqa=True, window=4).state
        sizes.add(state.window.tokens()[0].shape[2])
    assert max(sizes) == 2 * 4
    whole = linattn.linear_attention_with_state(query, key, value, feature_map, enable_gqa=True, window=4).state
    for x in pytree.tree_leaves(whole):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


@pytest.mark.parametrize("name", ["FavorPlus", "Expansion"])
def test_later_tokens_change_nothing_before_them(name: str) -> None:
    query, key, value = qkv(num_queries=45, num_keys=45)
    options = {"is_causal": True, "enable_gqa": True, "window": 4}
    before = linattn.linear_attention(query, key, value, build(name), **options)
    for x in (query, key, value):
        x[:, :, 30:] = 1e3 * x[:, :, 30:].flip(1)
    after = linattn.linear_attention(query, key, value, build(name), **options)
    torch.testing.assert_close(after[:, :, :30], before[:, :, :30], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CAUSAL_MAPS)
def test_a_flushed_state_holds_the_same_keys_and_merges(name: str) -> None:
    feature_map = build(name)
    query, key, value = qkv(num_queries=30, num_keys=30)
    options = {"enable_gqa": True, "window": 4}
    state = linattn.linear_attention_with_state(query, key, value, feature_map, **options).state
    empty = linattn.State.empty(feature_map, batch_size=2, num_heads=2, value_dim=5, dtype=torch.float64)
    plain = empty.absorb(feature_map, key, value)
    flushed = state.flush(feature_map)
    assert flushed.window is None
    assert plain.flush(feature_map) is plain
    for found, truth in ((flushed, plain), (flushed.merge(flushed), plain.merge(plain))):
        torch.testing.assert_close(
            found.read(feature_map, query).out, truth.read(feature_map, query).out, rtol=1e-9, atol=1e-9
        )


def test_a_stream_s_state_is_a_value() -> None:
    feature_map, options = build("Expansion"), {"enable_gqa": True, "window": 4}
    state = linattn.linear_attention_with_state(*qkv(), feature_map, **options).state
    frozen, later = copy.deepcopy(state), qkv(num_queries=9, num_keys=9, seed=4)
    leaves, spec = pytree.tree_flatten(state)
    spec = pytree.treespec_loads(pytree.treespec_dumps(spec))
    once = linattn.linear_attention_with_state(*later, feature_map, state, **options).out
    for other in (state.detach().to("cpu"), read_again(state), pytree.tree_unflatten(leaves, spec)):
        assert torch.equal(once, linattn.linear_attention_with_state(*later, feature_map, other, **options).out)
    for x, y in zip(pytree.tree_leaves(state), pytree.tree_leaves(frozen), strict=True):
        assert torch.equal(x, y)
    swapped = linattn.linear_attention_with_state(
        *(x.flip(0) for x in later), feature_map, state.select(torch.tensor([1, 0])), **options
    ).out
    torch.testing.assert_close(swapped.flip(0), once, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_stays_near(dtype: torch.dtype) -> None:
    """Parts are rounded to the dtype before they meet: at most as many units in the last place as there are parts."""
    truth, found = (
        linattn.linear_attention(
            *(x.to(kept) for x in qkv(num_queries=64, num_keys=64, dtype=dtype)),
            build("Expansion-0"),
            enable_gqa=True,
            window=4,
        )
        for kept in (torch.float64, dtype)
    )
    assert relative_error(found, truth) <= 4 * torch.finfo(dtype).eps


def test_what_cannot_be_is_refused() -> None:
    query, key, value = qkv(heads=2)
    favor = build("FavorPlus")

    def attend(window: object, feature_map: FeatureMap = favor, q: Tensor = query, **options: object) -> None:
        linattn.linear_attention(q, key, value, feature_map, window=window, **options)

    for window in (0, -4, 3, 48, 2**31):
        with pytest.raises(
            ValueError, match=rf"the window must be a power of two below 2³¹, .*, got {window}; None is"
        ):
            attend(window)
    for other in (4.0, True, "4", linattn.MergedKV(4, 2, None)):
        with pytest.raises(TypeError, match=r"window must be an integer or None, got .*; write window=32"):
            attend(other)
    for options, words in (
        ({"feature_map": build("EluPlusOne")}, "got EluPlusOne"),
        ({"feature_map": build("Trigonometric")}, "got Trigonometric"),
        ({"q": query[:, :, :5]}, "as many queries as keys"),
    ):
        with pytest.raises(ValueError, match=words):
            attend(4, **options)
    with pytest.raises(ValueError, match="no more queries than keys"):
        linattn.linear_attention(query, key[:, :, :5], value[:, :, :5], favor, is_causal=True, window=4)
    state = linattn.linear_attention_with_state(query, key, value, favor, window=4).state
    for change in (None, 8):
        with pytest.raises(ValueError, match=rf"the state was built with window=4, got window={change}; give the same"):
            linattn.linear_attention_with_state(query, key, value, favor, state, window=change)
    without = linattn.linear_attention_with_state(query, key, value, favor).state
    with pytest.raises(ValueError, match="the state was built with window=None, got window=4; give the same one"):
        linattn.linear_attention_with_state(query, key, value, favor, without, window=4)
    with pytest.raises(ValueError, match="flush"):
        state.merge(state)
    with pytest.raises(ValueError, match="flush the state first"):
        state.absorb(favor, key, value)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_reference_has_second_derivatives_beside_a_window(is_causal: bool) -> None:
    feature_map = FavorPlus(2, 3)
    leaves = [torch.randn(1, 1, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    options = {"is_causal": is_causal, "window": 1, "backend": "reference"}
    assert torch.autograd.gradgradcheck(lambda *x: linattn.linear_attention(*x, feature_map, **options), leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seed", [1, 6])
def test_a_part_beyond_a_narrow_dtype_leaves_rows_within_it(seed: int, is_causal: bool, backend: str) -> None:
    """Weights of large keys have both signs: rows over far ones reach 1e5, and count nothing beside near ones."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 2, 40, 4, generator=generator) for _ in range(3))
    feature_map = Expansion(4, 3, order=1).fit(query, key)
    narrow = [x.half() for x in (query, 300 * key, 1000 * value)]
    options = {"is_causal": is_causal, "window": 2, "backend": backend}
    wide = linattn.linear_attention(*(x.float() for x in narrow), feature_map, **options)
    assert wide.abs().max() < torch.finfo(torch.float16).max
    assert torch.equal(linattn.linear_attention(*narrow, feature_map, **options), wide.half())
    if is_causal:
        _, state = linattn.linear_attention_with_state(*narrow, feature_map, window=2, backend=backend)
        state_wide = linattn.linear_attention_with_state(
            *(x.float() for x in narrow), feature_map, window=2, backend=backend
        ).state
        found, truth = state.read(feature_map, narrow[0]), state_wide.read(feature_map, narrow[0].float())
        finite = truth.out.abs() <= torch.finfo(torch.float16).max
        assert torch.equal(found.out[finite], truth.out.half()[finite])
