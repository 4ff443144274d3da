"""Features whose size is bounded beforehand take one exponent per head, and everything else the running maxima."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import linattn
from grid import build, relative_error, tokens
from linattn.attention.backends.blocked import absorbing, bounded, causal, reading
from linattn.feature_maps import FavorPlus, FeatureMap

HEAD_DIM, LENGTH, HEADS = 8, 150, 2
MAPS = ("FavorPlus", "Hyperbolic", "Oprf", "Sderf")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The heads that were bounded, stretch by stretch, as the calls of a test go."""
    found, original = [], bounded.by_head

    def by_head(*arguments: object) -> Tensor:
        found.append(original(*arguments))
        return found[-1]

    for module in (absorbing, reading, causal):
        monkeypatch.setattr(module, "by_head", by_head)
    return found


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have every call take running maxima from now on."""

    def switch() -> None:
        for module in (absorbing, reading, causal):
            monkeypatch.setattr(module, "bounded_powers", lambda *_: None)

    return switch


def inputs(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values of one batch row and two heads."""
    shape = (1, HEADS, LENGTH, HEAD_DIM)
    scales = (scale, scale, 1.0)
    return [tokens(*shape, scale=s, dtype=dtype, seed=i + 1).requires_grad_() for i, s in enumerate(scales)]


def run(leaves: list[Tensor], feature_map: FeatureMap, **options: object) -> list[Tensor]:
    """Output and gradients."""
    out = linattn.linear_attention(*leaves, feature_map, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def at_the_limit(factor: float, dtype: torch.dtype = torch.float32) -> tuple[FavorPlus, list[Tensor]]:
    """A map and inputs whose longest query and key make a bound of `factor` times the largest allowed."""
    feature_map = FavorPlus(HEAD_DIM, 32, seed=3)
    leaves = [x.detach() for x in inputs(0.1, dtype)]
    longest = bounded.LIMIT / float(feature_map.projection.norm(dim=-1).max()) / math.sqrt(feature_map.scale)
    for x in leaves[:2]:
        x[:, :, 7] *= factor * longest / x[:, :, 7].norm(dim=-1, keepdim=True)
    return feature_map, [x.requires_grad_() for x in leaves]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_bounded_features_give_what_maxima_give(name: str, is_causal: bool, held, unbounded, blocks_of) -> None:
    """In float64, masks, biases, blocks and segments included."""
    blocks_of(16)
    feature_map, leaves = build(name, HEAD_DIM), inputs(dtype=torch.float64)
    options = {
        "key_mask": torch.rand(1, LENGTH, generator=torch.Generator().manual_seed(4)) > 0.3,
        "key_bias": tokens(1, 1, LENGTH, 1, seed=5).squeeze(-1),
        "is_causal": is_causal,
    }
    found = run(leaves, feature_map, **options)
    assert torch.cat(held).all()
    unbounded()
    held.clear()
    for x, y in zip(found, run(leaves, feature_map, **options), strict=True):
        assert relative_error(x, y) <= 1e-12
    assert not held


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_heads", [None, HEADS])
def test_groups_of_bounded_queries_read_their_own_key_head(num_heads, is_causal: bool, held, unbounded) -> None:
    """As many query heads per key head as key heads, which a map of one set per head must not mistake for them."""
    query, key, value = inputs(0.5, torch.float64)
    query = torch.cat((query, 0.7 * query.flip(1)), 1).detach().requires_grad_()
    feature_map = FavorPlus(HEAD_DIM, 32, seed=3, num_heads=num_heads)
    options = {"is_causal": is_causal, "enable_gqa": True}
    found = run([query, key, value], feature_map, **options)
    assert all(bool(heads.all()) for heads in held)
    unbounded()
    for x, true in zip(found, run([query, key, value], feature_map, **options), strict=True):
        assert relative_error(x, true) < 1e-10


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("factor", "fits"), [(0.999, True), (1.001, False), (1e3, False), (1e6, False)])
def test_the_bound_decides(factor: float, fits: bool, is_causal: bool, held) -> None:
    """A token in each head whose power may reach exp(80): either form is right, and finite."""
    feature_map, leaves = at_the_limit(factor)
    found = run(leaves, feature_map, is_causal=is_causal)
    assert held
    assert fits or not torch.cat(held).any()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    truth = run(exact, feature_map, is_causal=is_causal, backend="reference")
    # Exponents of at most 80 and their terms |x|²/2 are rounded to γ·|x|·max|w| = 8·2^-24·80 and a few 2^-24·|x|²/2.
    assert relative_error(found[0], truth[0]) <= (4e-4 if factor < 2 else torch.inf)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", [0, 1, 2])
@pytest.mark.parametrize("factor", [60.0, 1e15])
def test_no_head_changes_a_bit_of_its_neighbours(factor: float, side: int, is_causal: bool, held) -> None:
    """One head's queries, keys or values grow: the other's outputs and gradients keep their bits."""
    feature_map, leaves = FavorPlus(HEAD_DIM, 32), inputs()
    before = run(leaves, feature_map, is_causal=is_causal)
    assert torch.cat(held).all()
    held.clear()
    with torch.no_grad():
        leaves[side][:, 1] *= factor
    after = run(leaves, feature_map, is_causal=is_causal)
    if side < 2 or factor > bounded.MAX_VALUE:
        assert not torch.stack(held)[:, :, 1].all()
    assert torch.stack(held)[:, :, 0].all()
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:, 0], y[:, 0])
        assert y.isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_values_beyond_what_sums_of_powers_hold(is_causal: bool, held) -> None:
    """Outputs are averages: of values of 1e30 too, which long queries' powers make infinite before the division."""
    feature_map, (query, key, value) = FavorPlus(HEAD_DIM, 32), (x.detach() for x in inputs())
    small = linattn.linear_attention(4 * query, key, value, feature_map, is_causal=is_causal)
    assert torch.cat(held).all()
    large = linattn.linear_attention(4 * query, key, 1e30 * value, feature_map, is_causal=is_causal)
    # Two forms, each right to the rounding of exponents of order 50.
    torch.testing.assert_close(large / 1e30, small, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, 16])
def test_rows_that_see_no_key_do_not_unbound_the_others(window: int | None, held) -> None:
    """Padding on the left, and rows of a window's first spans, have denominators of 0 by right."""
    mask = torch.ones(1, LENGTH, dtype=torch.bool)
    mask[:, :10] = False
    exact = None if window is None else linattn.Exact(window)
    feature_map, leaves = FavorPlus(HEAD_DIM, 32), inputs()
    options = {"key_mask": mask, "exact": exact, "is_causal": True}
    found = run(leaves, feature_map, **options)
    # A window's first rows also read a state of no keys, which is no bounded one.
    assert torch.cat(held).all() if window is None else torch.cat(held).any()
    truth = run([x.detach().double().requires_grad_() for x in leaves], feature_map, backend="reference", **options)
    for x, y in zip(found, truth, strict=True):
        assert relative_error(x, y) <= 1e-5


@pytest.mark.parametrize("name", MAPS)
def test_a_state_of_bounded_keys_goes_on_anyhow(name: str, held) -> None:
    """One exponent for all features; single steps, long prefills and much larger keys follow it."""
    feature_map, (query, key, value) = build(name, HEAD_DIM), (x.detach().double() for x in inputs())
    key[:, :, 120:] *= 12
    whole = linattn.linear_attention(query, key, value, feature_map, is_causal=True, backend="reference")
    state, outs, cuts = None, [], (0, 50, 51, 52, 100, LENGTH)
    for start, stop in itertools.pairwise(cuts):
        piece = (x[:, :, start:stop] for x in (query, key, value))
        out, state = linattn.linear_attention_with_state(*piece, feature_map, state)
        outs.append(out)
        if stop == 50:
            assert held[-1].all()
            assert (state.m == state.m[..., :1]).all()
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-10, atol=1e-10)


def test_sums_far_below_one_are_no_bounded_sums(held) -> None:
    """Keys all on one side of every row of W: a state with z < exp(-20) would cost later rows their digits."""
    feature_map = FavorPlus(HEAD_DIM, 32, seed=1)
    direction = feature_map.projection[5].float()
    key = (-12 * direction / direction.norm()).expand(1, 1, LENGTH, HEAD_DIM)
    value = tokens(1, 1, LENGTH, HEAD_DIM, dtype=torch.float32)
    found = linattn.linear_attention(-key, key, value, feature_map)
    assert not held[0].any()
    torch.testing.assert_close(found, value.mean(2, keepdim=True).expand_as(found), rtol=1e-5, atol=1e-5)
