"""Low-precision inputs, exact sums: exponents, sums and divisions run in at least float32, outside autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import linattn
from grid import BACKENDS, PAIRED_CASES, Case, build, qkv, relative_error, tokens
from linattn.feature_maps import FeatureMap, features
from linattn.positions import relative_bias_attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_name", ["FavorPlus", "EluPlusOne"])
def test_sums_over_65k_tokens_do_not_stagnate(map_name: str, is_causal: bool, dtype: torch.dtype) -> None:
    """The last output averages 65,536 values of mean 1 and deviation 1; a bfloat16 sum would stop at 256 of them."""
    length = 65_536
    x = tokens(1, 1, length, 8, scale=0.3, dtype=dtype)
    value = (tokens(1, 1, length, 1, seed=2) + 1).to(dtype)
    case = Case(map_name, "blocked", is_causal)
    found = case.attend(x, x, value, build(map_name))[:, :, -1:]
    truth = case.attend(x.double(), x.double(), value.double(), build(map_name))[:, :, -1:]
    assert relative_error(found, truth) <= torch.finfo(dtype).eps
    assert found.dtype == dtype


@pytest.mark.parametrize("case", PAIRED_CASES, ids=str)
def test_autocast_changes_nothing(case: Case) -> None:
    query, key, value = qkv(dtype=torch.float32)
    plain = case.attend(query, key, value, case.build())
    with torch.autocast("cpu", torch.bfloat16):
        cast = case.attend(query, key, value, case.build())
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_name", ["FavorPlus", "Expansion"])
def test_autocast_changes_no_window(map_name: str, is_causal: bool, backend: str) -> None:
    query, key, value = qkv(heads=2, dtype=torch.float32)
    feature_map, options = build(map_name), {"window": 4, "backend": backend}

    def everything() -> list[torch.Tensor]:
        out = linattn.linear_attention(query, key, value, feature_map, is_causal=is_causal, **options)
        state = linattn.linear_attention_with_state(query, key, value, feature_map, **options).state
        return [out, *state.read(feature_map, query), *linattn.softmax_partial(query, key, value)]

    plain = everything()
    with torch.autocast("cpu", torch.bfloat16):
        cast = everything()
    assert all(torch.equal(x, y) for x, y in zip(plain, cast, strict=True))


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("name", ["FavorPlus", "LearnedExponential", "Expansion", "Balanced-Oprf"])
def test_autocast_changes_no_features(name: str, side: str) -> None:
    feature_map, x = build(name), qkv(heads=2, dtype=torch.float32)[1]
    plain = features(feature_map, x, side)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(features(feature_map, x, side), plain)


@pytest.mark.parametrize("num_queries", [37, 5])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_masked", [False, True])
def test_autocast_changes_no_exact_attention(num_queries: int, is_causal: bool, is_masked: bool) -> None:
    query, key, value = qkv(heads=2, dtype=torch.float32)
    mask = torch.arange(key.shape[2]).expand(len(key), -1) > 2 if is_masked else None
    options = {"key_mask": mask, "is_causal": is_causal}
    plain = linattn.softmax_attention(query[:, :, -num_queries:], key, value, **options)
    with torch.autocast("cpu", torch.bfloat16):
        cast = linattn.softmax_attention(query[:, :, -num_queries:], key, value, **options)
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("case", PAIRED_CASES, ids=str)
def test_autocast_takes_mixed_dtypes_in_the_widest(case: Case) -> None:
    """Rotary positions leave queries and keys in float32 beside values in bfloat16."""
    query, key, value = qkv(dtype=torch.float32)
    value = value.bfloat16()
    with pytest.raises(TypeError, match="share one dtype"):
        case.attend(query, key, value, case.build())
    with torch.autocast("cpu", torch.bfloat16):
        found = case.attend(query, key, value, case.build())
        exact = linattn.softmax_attention(query, key, value, enable_gqa=True, is_causal=case.is_causal)
    assert torch.equal(found, case.attend(query, key, value.float(), case.build()))
    wanted = linattn.softmax_attention(query, key, value.float(), enable_gqa=True, is_causal=case.is_causal)
    assert torch.equal(exact, wanted)


def test_autocast_takes_mixed_dtypes_in_states_and_rows() -> None:
    query, key, value = qkv(heads=2, dtype=torch.float32)
    half, feature_map = value.bfloat16(), build("FavorPlus")
    state = linattn.State.empty(feature_map, batch_size=2, num_heads=2, value_dim=5)
    with torch.autocast("cpu", torch.bfloat16):
        found = state.absorb(feature_map, key, half)
        rows = linattn.attention_rows(query, key.bfloat16(), feature_map, torch.tensor([0]))
        out, after = linattn.linear_attention_with_state(query, key, half, feature_map, state)
    assert torch.equal(found.S, state.absorb(feature_map, key, half.float()).S)
    assert torch.equal(after.S, linattn.linear_attention_with_state(query, key, half.float(), feature_map).state.S)
    assert (rows.dtype, out.dtype) == (torch.float32, torch.float32)


def test_states_are_kept_in_float32() -> None:
    for dtype, kept in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        q, k, v = qkv(dtype=dtype)
        out, state = linattn.linear_attention_with_state(q, k, v, build("FavorPlus"), enable_gqa=True)
        assert (out.dtype, state.S.dtype, state.z.dtype, state.m.dtype) == (dtype, kept, kept, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_rounds_no_bias_of_exact_attention(dtype: torch.dtype) -> None:
    """16 bits have steps of 4 at 1,000, and float16 has no 1e5."""
    query, key, value = qkv(heads=2, dtype=torch.float32)
    bias = tokens(2, 1, 37, 1)[..., 0].float() + 1e5
    wanted = linattn.softmax_attention(query, key, value, key_bias=bias, enable_gqa=True)
    with torch.autocast("cpu", dtype):
        found = linattn.softmax_attention(query, key, value, key_bias=bias, enable_gqa=True)
    assert torch.equal(found, wanted)


def rows(query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap) -> Tensor:
    """All rows of the attention matrix."""
    index = torch.arange(query.shape[2])
    return linattn.attention_rows(query, key, feature_map, index, enable_gqa=True)


def near_and_far(query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap) -> Tensor:
    """Keys of three blocks by softmax, the others by the map."""
    return linattn.linear_attention(query, key, value, feature_map, window=1, enable_gqa=True)


def biased(query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap) -> Tensor:
    """A bias of the distance between tokens."""
    bias = tokens(query.shape[1], 2 * key.shape[2] - 1)
    return relative_bias_attention(query, key, value, feature_map, bias, enable_gqa=True)


def partial(backend: str) -> Callable[..., tuple[Tensor, ...]]:
    """Outputs and log-normalisers."""
    return lambda *tokens: tuple(linattn.linear_partial(*tokens, enable_gqa=True, backend=backend))


CALLS: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    **{backend: Case("", backend, is_causal=False).attend for backend in BACKENDS},
    **{f"{backend}-partial": partial(backend) for backend in BACKENDS},
    "window": near_and_far,
    "rows": rows,
    "relative-bias": biased,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["Centred-call-FavorPlus", "Centred-call-Taylor"])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_through_a_calls_means_are_rounded_once(call: str, name: str, dtype: torch.dtype) -> None:
    """Those of float32 tokens, rounded: beside its mean a token's gradients may cancel, and leave what was rounded."""
    for half, wide in gradients(CALLS[call], name, dtype):
        assert torch.equal(half, wide.to(dtype))


def stream(query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap) -> list[Tensor]:
    """Three tokens, and two beside the state after them."""
    pieces = [[x.narrow(2, *at) for x in (query, key, value)] for at in ((0, 3), (3, 2))]
    first, state = linattn.linear_partial_with_state(*pieces[0], feature_map, enable_gqa=True)
    return [*first, *linattn.linear_partial_with_state(*pieces[1], feature_map, state, enable_gqa=True).partial]


def windowed_stream(query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap) -> Tensor:
    """All tokens with a window of one."""
    return linattn.linear_attention_with_state(query, key, value, feature_map, window=1, enable_gqa=True).out


def state(query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap) -> tuple[Tensor, ...]:
    """A state with a window, read."""
    after = linattn.linear_attention_with_state(query, key, value, feature_map, window=1, enable_gqa=True).state
    return tuple(after.detach().read(feature_map, query))


WEIGHED = {
    **{f"{backend}-partial": partial(backend) for backend in BACKENDS},
    "window": near_and_far,
    "windowed-stream": windowed_stream,
    "stream": stream,
    "state": state,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["Centred-Taylor", "Expansion", "Expansion-2"])
@pytest.mark.parametrize("call", WEIGHED)
def test_gradients_of_weighed_queries_are_rounded_once(call: str, name: str, dtype: torch.dtype) -> None:
    """A weight holds the mean key, which features leave out: its gradient and theirs may cancel."""
    half, wide = gradients(WEIGHED[call], name, dtype)[0]
    assert torch.equal(half, wide.to(dtype))


def gradients(call: Callable[..., Any], name: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Gradients of queries and keys of this dtype, and of the same in float32."""
    *given, value = qkv(num_queries=5, num_keys=5, dtype=dtype)
    both = []
    for width in (dtype, torch.float32):
        leaves = [x.to(width).requires_grad_() for x in given]
        found = call(*leaves, value.to(width), build(name))
        parts = (found,) if isinstance(found, Tensor) else found
        total = sum((x.double() * tokens(*x.shape, seed=9, dtype=dtype)).sum() for x in parts)
        both.append(torch.autograd.grad(total, leaves, materialize_grads=True))
        assert parts[0].dtype == (torch.float32 if call is rows else width)
    return list(zip(*both, strict=True))


class Wide(FeatureMap):
    """A user's map, whose features or exponents, or its weights, are in float64 whatever it is given."""

    def __init__(self, kind: str) -> None:
        super().__init__(8, 8)
        self.kind, self.exponential = kind, kind == "exponents"

    def query(self, x: Tensor) -> Tensor:
        features = x if self.exponential else torch.nn.functional.elu(x) + 1
        return features if self.kind == "weights" else features.double()

    def query_log_weight(self, x: Tensor) -> Tensor | None:
        return x.double().square().sum(-1) / 4 if self.kind == "weights" else None

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return features(self, q, "query") @ features(self, k, "key").mT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["features", "exponents", "weights"])
def test_features_in_another_dtype_are_taken_in_that_of_the_sums(kind: str, backend: str) -> None:
    feature_map, given = Wide(kind), qkv(num_queries=9, num_keys=9, heads=2, dtype=torch.float32)
    exact, options = [x.double() for x in given], {"backend": backend}
    for is_causal in (False, True):
        leaves = [x.clone().requires_grad_() for x in given]
        part = linattn.linear_partial(*leaves, feature_map, is_causal=is_causal, **options)
        wanted = linattn.linear_partial(*exact, feature_map, is_causal=is_causal, **options)
        for found, truth in zip(part, wanted, strict=True):
            assert found.dtype == torch.float32
            assert relative_error(found.detach(), truth) <= 1e-5
        assert all(x.dtype == torch.float32 for x in torch.autograd.grad(part.out.sum(), leaves))
        rows = linattn.attention_rows(*given[:2], feature_map, torch.tensor([3]), is_causal=is_causal)
        assert rows.dtype == torch.float32
    state = None
    for place in range(9):
        token = (x[:, :, place : place + 1] for x in given)
        out, state = linattn.linear_attention_with_state(*token, feature_map, state, **options)
    assert state is not None
    assert {x.dtype for x in (out, *state.sums)} == {torch.float32}
    assert relative_error(out, linattn.linear_attention(*exact, feature_map, is_causal=True)[:, :, -1:]) <= 1e-5
