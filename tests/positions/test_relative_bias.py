"""Relative biases by transforms equal the quadratic form, or are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grid import MAPS, build, qkv, relative_error, takes_statistics_from_the_call, tokens
from linattn.feature_maps import FeatureMap, Identity, features
from linattn.positions import FixedDecay, gated_attention_with_state, relative_bias_attention

LENGTH = 29
SERVED = tuple(name for name in MAPS if not name.startswith("Expansion"))


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMap,
    bias: Tensor,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """The definition: all weights, distances counting attended tokens."""
    (batch, heads, num_queries, _), (kv_heads, length) = q.shape, k.shape[1:3]
    groups = heads // kv_heads
    mask = torch.ones(batch, length, dtype=torch.bool) if key_mask is None else key_mask
    at = mask.cumsum(1) - 1
    own = at if is_causal else at.clamp(min=0)
    distance = own[:, length - num_queries :, None] - at[:, None]
    visible = mask[:, None] & (distance >= 0) if is_causal else mask[:, None].expand_as(distance)
    phi_k = features(feature_map, torch.where(mask[:, None, :, None], k, 0), "key")
    per_head = bias.expand(heads, -1) if bias.shape[0] in (1, heads) else bias.repeat_interleave(groups, 0)
    index = (distance if is_causal else distance + bias.shape[1] // 2).clamp(0, bias.shape[1] - 1)
    outs = []
    for head in range(heads):
        query = q[:, head : head + 1].expand(-1, kv_heads, -1, -1)
        weights = (features(feature_map, query, "query") @ phi_k.mT)[:, head // groups]
        weights = torch.where(visible, weights * per_head[head][index].exp(), 0)
        den = weights.sum(-1, keepdim=True)
        values = torch.where(mask[..., None], v[:, head // groups], 0)
        outs.append(weights @ values / torch.where(den == 0, 1, den))
    return torch.stack(outs, 1)


def biases(heads: int, longest: int, *, is_causal: bool, scale: float = 1.0) -> Tensor:
    """One number for each distance."""
    return tokens(heads, longest if is_causal else 2 * longest - 1, seed=9, scale=scale)


def attendable(name: str, is_causal: bool) -> FeatureMap | None:
    """The map, if it can be used so; means of the call are put in as the call would take them."""
    if takes_statistics_from_the_call(name) or (name == "Dpfp" and is_causal):
        return None
    return build(name)


@pytest.mark.parametrize("bias_heads", [1, 2, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_name", SERVED)
def test_the_quadratic_form(map_name: str, is_causal: bool, bias_heads: int) -> None:
    feature_map = attendable(map_name, is_causal)
    if feature_map is None:
        return
    q, k, v = qkv(num_queries=LENGTH, num_keys=LENGTH)
    bias = biases(bias_heads, LENGTH + 3, is_causal=is_causal)
    found = relative_bias_attention(q, k, v, feature_map, bias, is_causal=is_causal, enable_gqa=True)
    expected = dense(q, k, v, feature_map, bias, is_causal=is_causal)
    # Weights of signed maps cancel.
    bound = 1e-10 if feature_map.nonnegative else 1e-7
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_length_up_to_513(is_causal: bool) -> None:
    """To 1e-10 in float64, with a table of just the length and a longer one."""
    feature_map = build("FavorPlus")
    q, k, v = qkv(batch=1, heads=2, kv_heads=2, num_queries=513, num_keys=513, value_dim=2)
    long = biases(2, 520, is_causal=is_causal)
    # A weight depends on its two tokens and their distance: the longest text has those of all others.
    each = torch.eye(513, dtype=q.dtype).expand(1, 2, -1, -1)
    weights = dense(q, k, each, feature_map, long, is_causal=is_causal)
    for length in range(1, 514):
        part = [x[:, :, :length] for x in (q, k, v)]
        middle = long.shape[1] // 2
        short = long[:, :length] if is_causal else long[:, middle - length + 1 : middle + length]
        found = relative_bias_attention(*part, feature_map, short, is_causal=is_causal)
        among = weights[:, :, :length, :length]
        torch.testing.assert_close(found, among @ part[2] / among.sum(-1, keepdim=True), rtol=1e-10, atol=1e-10)
        again = relative_bias_attention(*part, feature_map, long, is_causal=is_causal)
        torch.testing.assert_close(again, found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_name", ["FavorPlus", "Taylor", "EluPlusOne", "FavorPlus-per-head", "Learned"])
def test_any_chunk_gives_the_same(map_name: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features in chunks of one, tokens in blocks of five, forward and backward."""
    from linattn.positions import relative_bias

    feature_map = build(map_name)
    bias = biases(2, LENGTH, is_causal=is_causal).requires_grad_()
    leaves = [x.requires_grad_() for x in qkv(num_queries=LENGTH, num_keys=LENGTH)]
    parameters = [p for p in feature_map.parameters() if p.requires_grad]
    results = []
    for chunk, block in ((2**22, 1024), (1, 5)):
        monkeypatch.setattr(relative_bias, "_CHUNK", chunk)
        monkeypatch.setattr(relative_bias, "_BLOCK", block)
        out = relative_bias_attention(*leaves, feature_map, bias, is_causal=is_causal, enable_gqa=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), [*leaves, bias, *parameters])))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_name", SERVED)
def test_gradients(map_name: str, is_causal: bool) -> None:
    """Of queries, keys, values and biases, grouped heads included."""
    feature_map = attendable(map_name, is_causal)
    if feature_map is None:
        return
    feature_map.requires_grad_(False)
    leaves = [*qkv(batch=1, heads=4, num_queries=4, num_keys=4, value_dim=2), biases(4, 4, is_causal=is_causal)]

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return relative_bias_attention(q, k, v, feature_map, bias, is_causal=is_causal, enable_gqa=True)

    torch.autograd.gradcheck(attend, [x.requires_grad_() for x in leaves], atol=1e-5, rtol=1e-4, fast_mode=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_name", SERVED)
def test_padding_and_batch_change_nothing(map_name: str, is_causal: bool) -> None:
    """On the left, inside and on the right, whatever it holds, forward and backward."""
    feature_map = attendable(map_name, is_causal)
    if feature_map is None:
        return
    q, k, v = qkv(batch=1, num_queries=LENGTH, num_keys=LENGTH)
    live = torch.tensor([3, 4, 5, 8, 9, 13, 14, 15, 16])
    bias = biases(2, LENGTH, is_causal=is_causal)
    options = {"is_causal": is_causal, "enable_gqa": True}
    alone = relative_bias_attention(*(x[:, :, live] for x in (q, k, v)), feature_map, bias, **options)
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[0, live], mask[1] = True, True
    q, k, v = (x.repeat(2, 1, 1, 1) for x in (q, k, v))
    k[0, :, ~mask[0]], v[0, :, ~mask[0]] = torch.nan, torch.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    padded = relative_bias_attention(*leaves, feature_map, bias, key_mask=mask, **options)
    torch.testing.assert_close(padded[:1, :, live], alone, rtol=1e-9, atol=1e-9)
    assert bool(padded.isfinite().all())
    for grad in torch.autograd.grad(padded.square().sum(), leaves):
        assert bool(grad.isfinite().all())
    torch.testing.assert_close(
        padded, dense(q, k, v, feature_map, bias, key_mask=mask, is_causal=is_causal), rtol=1e-7, atol=1e-7
    )


def test_rows_that_see_nothing_are_0() -> None:
    q, k, v = qkv(num_queries=5, num_keys=5)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 2:] = True
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for is_causal in (False, True):
        bias = biases(1, 5, is_causal=is_causal)
        out = relative_bias_attention(
            *leaves, build("FavorPlus"), bias, key_mask=mask, is_causal=is_causal, enable_gqa=True
        )
        assert not out[0].any()
        assert bool(out[1, :, :2].any()) != is_causal
        assert all(bool(grad.isfinite().all()) for grad in torch.autograd.grad(out.sum(), leaves))
    nothing = relative_bias_attention(q[:, :, :0], k[:, :, :0], v[:, :, :0], build("FavorPlus"), bias, enable_gqa=True)
    assert nothing.shape == (2, 4, 0, 5)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_rows_that_see_nothing_may_be_orthogonal_to_all_keys(is_mapped: bool) -> None:
    """Their normalisers are rounding, and are asked of nobody."""
    q, k, v = (torch.randn(1, 1, 12, 8, generator=torch.Generator().manual_seed(0)) for _ in range(3))
    mask = torch.arange(12)[None] >= 3
    q[:, :, :3] = 0
    q[:, :, :3, 0], q[:, :, :3, 1] = k[:, :, 3, 1], -k[:, :, 3, 0]

    def attend(query: Tensor) -> Tensor:
        return relative_bias_attention(query, k, v, Identity(8), torch.zeros(1, 12), key_mask=mask, is_causal=True)

    out = torch.func.vmap(attend)(q[None])[0] if is_mapped else attend(q)
    assert not out[:, :, :3].any()
    assert bool(out.isfinite().all())


def test_a_distance_may_be_hidden() -> None:
    """By a bias of -inf: with those beyond one a query sees its neighbours alone."""
    q, k, v = qkv(num_queries=6, num_keys=6)
    band = torch.where(torch.arange(-5, 6).abs() <= 1, 0.0, -torch.inf)[None]
    out = relative_bias_attention(q, k, v, build("FavorPlus"), band, enable_gqa=True)
    part = (x[:, :, :2] for x in (q, k, v))
    near = relative_bias_attention(*part, build("FavorPlus"), torch.zeros(1, 3), enable_gqa=True)
    torch.testing.assert_close(out[:, :, 0], near[:, :, 0])
    none = relative_bias_attention(q, k, v, build("FavorPlus"), torch.full_like(band, -torch.inf), enable_gqa=True)
    assert not none.any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_fewer_queries_are_the_last(is_causal: bool) -> None:
    q, k, v = qkv(num_queries=LENGTH, num_keys=LENGTH)
    bias, options = biases(2, LENGTH, is_causal=is_causal), {"is_causal": is_causal, "enable_gqa": True}
    whole = relative_bias_attention(q, k, v, build("FavorPlus"), bias, **options)
    part = relative_bias_attention(q[:, :, -4:], k, v, build("FavorPlus"), bias, **options)
    torch.testing.assert_close(part, whole[:, :, -4:], rtol=1e-12, atol=1e-12)


def test_a_linear_bias_is_a_decay() -> None:
    """b = -λ(i - j) by transforms and by gates."""
    q, k, v = qkv(num_queries=LENGTH, num_keys=LENGTH)
    decay, feature_map = FixedDecay([0.3, 0.05]), build("FavorPlus")
    bias = -decay.rates.unsqueeze(1) * torch.arange(LENGTH)
    found = relative_bias_attention(q, k, v, feature_map, bias, is_causal=True, enable_gqa=True)
    gates = decay(torch.zeros(2, LENGTH, 1))
    expected = gated_attention_with_state(q, k, v, feature_map, gates, enable_gqa=True).out
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_constant_changes_nothing() -> None:
    q, k, v = qkv(num_queries=LENGTH, num_keys=LENGTH)
    bias = biases(2, LENGTH, is_causal=False)
    found, moved = (
        relative_bias_attention(q, k, v, build("FavorPlus"), b, enable_gqa=True) for b in (bias, bias + 900)
    )
    torch.testing.assert_close(moved, found, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_are_float64(dtype: torch.dtype) -> None:
    """Only inputs and output are narrow: the result is the rounded one of the same inputs in float64."""
    q, k, v = qkv(num_queries=LENGTH, num_keys=LENGTH, dtype=dtype)
    bias = biases(2, LENGTH, is_causal=True)
    options = {"is_causal": True, "enable_gqa": True}
    found = relative_bias_attention(q, k, v, build("FavorPlus"), bias, **options)
    exact = relative_bias_attention(q.double(), k.double(), v.double(), build("FavorPlus"), bias, **options)
    assert found.dtype == dtype
    assert torch.equal(found, exact.to(dtype))


def test_lost_digits_are_refused_and_the_bound_holds() -> None:
    """Early rows beside a far larger later key: refused where the transforms round away their digits."""
    feature_map = build("EluPlusOne")
    q, k, v = qkv(batch=1, heads=1, kv_heads=1, num_queries=64, num_keys=64)
    bias = torch.zeros(1, 64, dtype=torch.float64)
    errors = []
    for factor in (1.0, 1e3, 1e5, 1e8, 1e16):
        key = k.clone()
        key[:, :, -1] = key[:, :, -1].abs() * factor
        try:
            found = relative_bias_attention(q, key, v, feature_map, bias, is_causal=True)
        except ValueError:
            errors.append(None)
            continue
        errors.append(relative_error(found[:, :, :32], dense(q, key, v, feature_map, bias, is_causal=True)[:, :, :32]))
    assert errors[-1] is None
    with pytest.raises(ValueError, match=r"rounding may change \d+ of 64 rows by .* of themselves.*FixedDecay"):
        relative_bias_attention(q, key, v, feature_map, bias, is_causal=True)
    kept = [error for error in errors if error is not None]
    assert len(kept) >= 3
    # Half of float64's digits is what a call may lose.
    assert max(kept) < 1.5e-8
    assert kept[0] < 1e-13 < kept[-1]


def test_a_compiled_call_marks_lost_rows() -> None:
    """It cannot raise: rows that would be wrong are NaN, the others as ever."""
    torch.compiler.reset()
    feature_map, bias = build("EluPlusOne"), torch.zeros(1, 24, dtype=torch.float64)
    q, k, v = qkv(batch=1, heads=1, kv_heads=1, num_queries=24, num_keys=24)

    def attend(key: Tensor) -> Tensor:
        return relative_bias_attention(q, key, v, feature_map, bias, is_causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(k), attend(k), rtol=1e-12, atol=1e-12)
    later = k.clone()
    later[:, :, -1] = later[:, :, -1].abs() * 1e16
    found = compiled(later)
    assert bool(found[:, :, :-1].isnan().all())
    expected = dense(q, later, v, feature_map, bias, is_causal=True)
    torch.testing.assert_close(found[:, :, -1], expected[:, :, -1], rtol=1e-10, atol=1e-10)


def test_memory_does_not_grow_with_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of a forward and backward pass is a chunk's, and what backward keeps the same, whatever R."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from linattn.feature_maps import FavorPlus
    from linattn.positions import relative_bias

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else (result,):
                if isinstance(x, Tensor):
                    self.numbers = max(self.numbers, x.numel())
            return result

    monkeypatch.setattr(relative_bias, "_CHUNK", 1)
    monkeypatch.setattr(relative_bias, "_BLOCK", 16)
    largest, kept = [], []
    for num_features in (8, 24):
        leaves = [x.requires_grad_() for x in qkv(batch=1, heads=1, kv_heads=1, num_queries=300, num_keys=300)]
        saved: dict[int, int] = {}

        def pack(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with Largest() as found:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                out = relative_bias_attention(*leaves, FavorPlus(8, num_features), biases(1, 300, is_causal=False))
            torch.autograd.grad(out.sum(), leaves)
        largest.append(found.numbers)
        kept.append(sum(saved.values()))
    assert largest[0] == largest[1]
    assert kept[0] == kept[1]


def refused(map_name: str = "FavorPlus", bias: object = None, num_queries: int = 5, **options: object) -> object:
    """Five keys with something wrong."""
    q, k, v = qkv(num_queries=num_queries, num_keys=5)
    given = torch.zeros(1, 9) if bias is None else bias
    return relative_bias_attention(q, k, v, build(map_name), given, **{"enable_gqa": True} | options)


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "groups": (lambda: refused("Expansion"), ValueError, "one sum over features, got Expansion.*FavorPlus"),
    "more queries": (lambda: refused(num_queries=6), ValueError, "no more queries than keys, got 6 and 5"),
    "a list": (lambda: refused(bias=[0.0]), TypeError, "bias must be a floating tensor.*got list"),
    "integers": (lambda: refused(bias=torch.zeros(1, 9).int()), TypeError, "bias must be a floating.*int32"),
    "one dimension": (
        lambda: refused(bias=torch.zeros(9)),
        ValueError,
        r"bias must be \(heads.*1, 2 or 4 heads, got \(9,\)",
    ),
    "three heads": (lambda: refused(bias=torch.zeros(3, 9)), ValueError, "with 1, 2 or 4 heads"),
    "no middle": (lambda: refused(bias=torch.zeros(1, 10)), ValueError, "2M - 1 of them"),
    "too few": (lambda: refused(bias=torch.zeros(1, 7)), ValueError, "5 tokens need biases for 9 distances, got 7"),
    "too few causal": (
        lambda: refused(bias=torch.zeros(1, 4), is_causal=True),
        ValueError,
        "5 tokens need biases for 5 distances, got 4",
    ),
    "an infinite one": (
        lambda: refused(bias=torch.tensor([[0.0] * 8 + [math.inf]])),
        ValueError,
        "must be numbers below infinity",
    ),
    "one that is no number": (
        lambda: refused(bias=torch.full((1, 9), math.nan)),
        ValueError,
        "must be numbers below infinity",
    ),
    "another mask": (lambda: refused(key_mask=torch.ones(2, 4, dtype=torch.bool)), ValueError, "key_mask must be"),
    "groups unasked": (lambda: refused(enable_gqa=False), ValueError, "pass enable_gqa=True"),
    "statistics of later tokens": (
        lambda: refused("Centred-call-Taylor", is_causal=True),
        ValueError,
        "leak the future",
    ),
    "a class": (
        lambda: relative_bias_attention(*qkv(), type(build("Taylor")), torch.zeros(1, 9)),
        TypeError,
        "feature_map must be an instance",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_words(name: str) -> None:
    call, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=message):
        call()
