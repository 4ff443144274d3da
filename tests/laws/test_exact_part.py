"""Exact keys beside the map: the parts' keys are disjoint and together all, whatever the cut, the mask and the map.

Laws that take a `rule` hold for every rule of eviction; test_exact_rule.py runs them on one of its own.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import linattn
from grid import HEAD_DIM, NONNEGATIVE_MAPS, SOFTMAX_MAPS, build, qkv, relative_error, takes_statistics_from_the_call
from linattn import Exact
from linattn.feature_maps import Expansion, FavorPlus, FeatureMap, features

# Every map that may have an exact part.
MAPS = tuple(n for n in SOFTMAX_MAPS if n in NONNEGATIVE_MAPS or isinstance(build(n), Expansion))
CAUSAL_MAPS = tuple(n for n in MAPS if not takes_statistics_from_the_call(n))
PARTS = {
    "heavy": (None, 3),
    "window": (4, 0),
    "both": (4, 3),
    "wide": (8, 5),
    "single": (1, 2),
    "narrow": (1, 0),
    "all": (64, 2),
}
RULES = pytest.mark.parametrize("rule", [Exact])
# Which keys a rule holds on to, the best first: from their numbers, older ones first, and their scores.
ORDERS: dict[type[Exact], Callable[[list[int], list[float]], list[int]]] = {
    Exact: lambda keys, score: sorted(keys, key=lambda j: -score[j])
}


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


def heavy_everywhere(exact: Exact, feature_map: FeatureMap, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """(B, Hkv, L): the keys that the rule puts first by the column mass of the map's own attention matrix."""
    rows = linattn.attention_rows(
        query, key, feature_map, torch.arange(query.shape[2]), key_mask=mask, enable_gqa=True, is_causal=False
    )
    mass = rows.sum(2).unflatten(1, (key.shape[1], -1)).sum(2)
    found = torch.zeros(mass.shape, dtype=torch.bool)
    for b, h in itertools.product(*map(range, mass.shape[:2])):
        live = mask[b].nonzero().flatten().tolist()
        found[b, h, ORDERS[type(exact)](live, mass[b, h].tolist())[: exact.num_heavy]] = True
    return found


def heavy_so_far(exact: Exact, query: Tensor, key: Tensor, mask: Tensor, near: Tensor) -> Tensor:
    """(B, Hkv, L, L): each row's heavy keys by the running rule, key by key."""
    groups, length, window = query.shape[1] // key.shape[1], query.shape[2], exact.window
    logits = query @ key.repeat_interleave(groups, 1).mT * HEAD_DIM**-0.5
    p = torch.softmax(torch.where(near & mask[:, None, None], logits, -torch.inf), -1).nan_to_num()
    p = p.unflatten(1, (key.shape[1], groups)).sum(2)
    found = torch.zeros(*key.shape[:2], length, length, dtype=torch.bool)
    block = torch.arange(length) // window
    for b, h in itertools.product(*map(range, key.shape[:2])):
        score = [float(p[b, h, :, j].sum()) / (2 * window - j % window) for j in range(length)]
        heavy: list[int] = []
        for number in range(2, int(block[-1]) + 1):
            leaving = [j for j in range(length) if block[j] == number - 2 and mask[b, j]]
            heavy = ORDERS[type(exact)](heavy + leaving, score)[: exact.num_heavy]
            for i in (block == number).nonzero().flatten().tolist():
                found[b, h, i, heavy] = True
    return found


def by_hand(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    part: Exact,
    causal: bool,
) -> Tensor:
    """Every weight formed: exact ones near and heavy, the map's elsewhere, before and after apart."""
    window = part.window
    feature_map, length = fitted(name, query, key, mask), query.shape[2]
    groups = query.shape[1] // key.shape[1]
    mask = torch.ones(key.shape[0], length, dtype=torch.bool) if mask is None else mask
    key, value = (torch.where(mask[:, None, :, None], x, 0) for x in (key, value))
    i, j = torch.arange(length).unsqueeze(-1), torch.arange(length)
    seen = (j <= i) if causal else torch.ones(length, length, dtype=torch.bool)
    near = (((i // window) - (j // window)).abs() <= 1) & seen if window else torch.zeros_like(seen)
    exact = near.expand(*key.shape[:2], -1, -1)
    if part.num_heavy and causal:
        exact = exact | heavy_so_far(part, query, key, mask, near)
    elif part.num_heavy:
        exact = exact | heavy_everywhere(part, feature_map, query, key, mask).unsqueeze(2)
    visible = (seen & mask[:, None, None]).expand(exact.shape)
    exact, rest = ((x & visible).repeat_interleave(groups, 1) for x in (exact, ~exact))
    logits = torch.where(exact, query @ key.repeat_interleave(groups, 1).mT * HEAD_DIM**-0.5, -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0, peak)
    parts = [(torch.exp(logits - peak), peak)]
    sides = (rest & (j < i), rest & (j > i)) if window and not causal else (rest,)
    parts += [map_weights(feature_map, query, key, side) for side in sides]
    top = torch.stack([log for _, log in parts]).amax(0)
    weights = sum(w * torch.exp(log - top) for w, log in parts)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1, total) @ value.repeat_interleave(groups, 1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [2, 3, 37, 64])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", MAPS)
@RULES
def test_float64_equals_the_definition(
    rule: type[Exact], name: str, part: str, length: int, masked: bool, blocks_of
) -> None:
    blocks_of(8 if PARTS[part][0] in (None, 1, 4, 8) else 64)
    query, key, value = qkv(num_queries=length, num_keys=length, scale=1.5)
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) > 0.3 if masked else None
    exact = rule(*PARTS[part])
    for causal in (False, True):
        if causal and (exact.window is None or name not in CAUSAL_MAPS):
            continue
        found = linattn.linear_attention(
            query,
            key,
            value,
            build(name),
            key_mask=mask,
            is_causal=causal,
            enable_gqa=True,
            exact=exact,
        )
        truth = by_hand(name, query, key, value, mask, exact, causal)
        torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["FavorPlus", "Expansion", "Expansion-2"])
@RULES
def test_gradients_are_those_of_the_reference(rule: type[Exact], name: str, is_causal: bool, blocks_of) -> None:
    blocks_of(8)
    results = []
    for backend in ("reference", "blocked"):
        leaves = [x.requires_grad_() for x in qkv(num_queries=45, num_keys=45)]
        part = linattn.linear_partial(
            *leaves, build(name), is_causal=is_causal, enable_gqa=True, exact=rule(4, 2), backend=backend
        )
        loss = part.out.square().sum() + part.log_normalizer.sum()
        results.append((part.out, *torch.autograd.grad(loss, leaves)))
    for truth, found in zip(*results, strict=True):
        assert relative_error(found, truth) < 1e-11


@pytest.mark.parametrize("cuts", [[1], [8], [16], [5, 6, 7, 30], list(range(1, 45)), [44]], ids=str)
@pytest.mark.parametrize("name", ["FavorPlus", "Expansion", "Expansion-2"])
@RULES
def test_a_stream_may_be_cut_anywhere(rule: type[Exact], name: str, cuts: list[int]) -> None:
    query, key, value = qkv(num_queries=45, num_keys=45)
    mask = torch.rand(2, 45, generator=torch.Generator().manual_seed(2)) > 0.2
    feature_map, state, outs = build(name), None, []
    options = {"enable_gqa": True, "exact": rule(4, 3)}
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
@pytest.mark.parametrize("num_heavy", [0, 3])
@pytest.mark.parametrize("name", ["FavorPlus", "Expansion"])
@RULES
def test_the_masks_of_a_stream_come_and_go(
    rule: type[Exact], name: str, num_heavy: int, masked: tuple[bool, ...], cuts: list[int]
) -> None:
    """A masked token stays unseen when it leaves the window in a later call, which has no mask."""
    query, key, value = qkv(num_queries=45, num_keys=45)
    mask = torch.rand(2, 45, generator=torch.Generator().manual_seed(2)) > 0.5
    mask[:, 0] = False
    pieces = [slice(*pair) for pair in itertools.pairwise([0, *cuts, 45])]
    for piece, given in zip(pieces, masked, strict=True):
        mask[:, piece] |= not given
    feature_map, state, outs = build(name), None, []
    options = {"enable_gqa": True, "exact": rule(4, num_heavy)}
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


@RULES
def test_the_size_of_a_stream_s_state_does_not_grow(rule: type[Exact]) -> None:
    feature_map, state, sizes = FavorPlus(8, 12), None, set()
    query, key, value = qkv(num_queries=100, num_keys=100)
    for t in range(100):
        piece = (x[:, :, t : t + 1] for x in (query, key, value))
        state = linattn.linear_attention_with_state(*piece, feature_map, state, enable_gqa=True, exact=rule(4, 3)).state
        sizes.add(state.exact.tokens()[0].shape[2])
    assert max(sizes) == 2 * 4 + 3
    whole = linattn.linear_attention_with_state(query, key, value, feature_map, enable_gqa=True, exact=rule(4, 3)).state
    for x in torch.utils._pytree.tree_leaves(whole):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


@pytest.mark.parametrize("name", ["FavorPlus", "Expansion"])
@RULES
def test_later_tokens_change_nothing_before_them(rule: type[Exact], name: str) -> None:
    query, key, value = qkv(num_queries=45, num_keys=45)
    options = {"is_causal": True, "enable_gqa": True, "exact": rule(4, 3)}
    before = linattn.linear_attention(query, key, value, build(name), **options)
    for x in (query, key, value):
        x[:, :, 30:] = 1e3 * x[:, :, 30:].flip(1)
    after = linattn.linear_attention(query, key, value, build(name), **options)
    torch.testing.assert_close(after[:, :, :30], before[:, :, :30], rtol=1e-12, atol=1e-12)


def test_a_heavy_key_far_away_is_exact() -> None:
    """One key that all queries attend to: the map alone misses it, with one heavy key nothing is missed."""
    query, key, value = qkv(1, 2, 2, 64, 64)
    query += 2.0
    key[:, :, 7] = 4.0
    exact = linattn.softmax_attention(query, key, value)
    options = {"feature_map": build("Expansion-0")}
    alone = relative_error(linattn.linear_attention(query, key, value, **options), exact)
    with_it = relative_error(linattn.linear_attention(query, key, value, **options, exact=Exact(num_heavy=1)), exact)
    streamed = linattn.linear_attention(query, key, value, **options, is_causal=True, exact=Exact(4, 1))
    causal = linattn.softmax_attention(query, key, value, is_causal=True)
    assert with_it < 1e-4 < alone
    assert relative_error(streamed[:, :, 8:], causal[:, :, 8:]) < 1e-4


@pytest.mark.parametrize("name", CAUSAL_MAPS)
@RULES
def test_a_flushed_state_holds_the_same_keys_and_merges(rule: type[Exact], name: str) -> None:
    feature_map = build(name)
    query, key, value = qkv(num_queries=30, num_keys=30)
    options = {"enable_gqa": True, "exact": rule(4, 3)}
    state = linattn.linear_attention_with_state(query, key, value, feature_map, **options).state
    empty = linattn.State.empty(feature_map, batch_size=2, num_heads=2, value_dim=5, dtype=torch.float64)
    plain = empty.absorb(feature_map, key, value)
    flushed = state.flush(feature_map)
    assert flushed.exact is None
    assert plain.flush(feature_map) is plain
    for found, truth in ((flushed, plain), (flushed.merge(flushed), plain.merge(plain))):
        torch.testing.assert_close(
            found.read(feature_map, query).out, truth.read(feature_map, query).out, rtol=1e-9, atol=1e-9
        )


@RULES
def test_a_stream_s_state_is_a_value(rule: type[Exact]) -> None:
    feature_map, options = build("Expansion"), {"enable_gqa": True, "exact": rule(4, 3)}
    state = linattn.linear_attention_with_state(*qkv(), feature_map, **options).state
    frozen, later = copy.deepcopy(state), qkv(num_queries=9, num_keys=9, seed=4)
    once = linattn.linear_attention_with_state(*later, feature_map, state, **options).out
    twice = linattn.linear_attention_with_state(*later, feature_map, state.detach().to("cpu"), **options).out
    assert torch.equal(once, twice)
    for x, y in zip(torch.utils._pytree.tree_leaves(state), torch.utils._pytree.tree_leaves(frozen), strict=True):
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
            exact=Exact(4, 3),
        )
        for kept in (torch.float64, dtype)
    )
    assert relative_error(found, truth) <= 4 * torch.finfo(dtype).eps


def test_what_cannot_be_is_refused() -> None:
    query, key, value = qkv(heads=2)
    favor = build("FavorPlus")
    for sizes, words in (
        ((3,), "power of two"),
        ((0,), "power of two"),
        ((2.0,), "non-negative integer"),
        ((None, -1), "non-negative integer"),
        ((4, True), "non-negative integer"),
        ((), r"Exact\(window=None, num_heavy=0, .*\), which attends to no key exactly; give a size, or exact=None"),
    ):
        with pytest.raises(ValueError, match=words):
            Exact(*sizes)

    def attend(exact, feature_map=favor, q=query, **options):
        return linattn.linear_attention(q, key, value, feature_map, exact=exact, **options)

    for exact, options, words in (
        (Exact(num_heavy=2), {"is_causal": True}, "give window too"),
        (Exact(4), {"feature_map": build("EluPlusOne")}, "got EluPlusOne"),
        (Exact(num_heavy=4), {"feature_map": build("Trigonometric")}, "got Trigonometric"),
        (Exact(4), {"q": query[:, :, :5]}, "as many queries as keys"),
    ):
        with pytest.raises(ValueError, match=words):
            attend(exact, **options)
    with pytest.raises(TypeError, match=r"exact must be a linattn.Exact or None, got 4; write exact=Exact\(window"):
        attend(4)
    with pytest.raises(ValueError, match="no more queries than keys"):
        linattn.linear_attention(query, key[:, :, :5], value[:, :, :5], favor, is_causal=True, exact=Exact(4))
    state = linattn.linear_attention_with_state(query, key, value, favor, exact=Exact(4, 2)).state
    for change in (None, Exact(4), Exact(8, 2)):
        with pytest.raises(ValueError, match=r"built with exact=Exact\(window=4, num_heavy=2, .*\), got exact="):
            linattn.linear_attention_with_state(query, key, value, favor, state, exact=change)
    with pytest.raises(ValueError, match="flush"):
        state.merge(state)
    with pytest.raises(ValueError, match="flush the state first"):
        state.absorb(favor, key, value)
