"""The compiled step of one token: float64 attention token by token, to float32's rounding, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import linattn
from grid import MAPS, build, qkv, tokens
from linattn.attention.backends.compiled import Compiled
from linattn.feature_maps import FavorPlus, FeatureMap

pytest.importorskip("linattn_compiled")

COMPILED_MAPS = tuple(name for name in MAPS if build(name).powers(torch.float32) is not None)
# Exponents of at most 8 are sums of D = 8 products and a handful of terms: 32 roundings move a weight by 32·8 units at
# most, and an output of Σ w·v / Σ w by twice that.
TOLERANCE = 2 * 32 * 8 * torch.finfo(torch.float32).eps / 2

Stream = Iterator[tuple[Tensor, linattn.State]]


def steps(inputs: tuple[Tensor, ...], feature_map: FeatureMap, backend: str, **weights: Tensor | None) -> Stream:
    """A stream, token by token: rows and states."""
    state = None
    for i in range(inputs[1].shape[2]):
        token = (x[:, :, i : i + 1] for x in inputs)
        own = {name: None if x is None else x[..., i : i + 1] for name, x in weights.items()}
        out, state = linattn.linear_attention_with_state(
            *token, feature_map, state, enable_gqa=True, backend=backend, **own
        )
        yield out, state


def outputs(inputs: tuple[Tensor, ...], feature_map: FeatureMap, backend: str, **weights: Tensor | None) -> Tensor:
    """All rows of a stream."""
    return torch.cat([out for out, _ in steps(inputs, feature_map, backend, **weights)], 2)


def truth(inputs: tuple[Tensor, ...], feature_map: FeatureMap, **weights: Tensor | None) -> Tensor:
    """One pass in float64."""
    doubled = {name: x.double() if x is not None and x.is_floating_point() else x for name, x in weights.items()}
    return linattn.linear_attention(
        *(x.double() for x in inputs), feature_map, is_causal=True, enable_gqa=True, backend="reference", **doubled
    )


def test_there_are_maps_to_run() -> None:
    assert {"FavorPlus", "FavorPlus-per-head", "Hyperbolic"} <= set(COMPILED_MAPS)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("name", COMPILED_MAPS)
def test_a_stream_is_attention_over_the_past(name: str, groups: int) -> None:
    """Masks and biases included; widths that fill no vector, and a head whose every key is masked."""
    feature_map, inputs = build(name), qkv(heads=2 * groups, dtype=torch.float32)
    mask, bias = tokens(2, 37, seed=5) > -0.5, tokens(2, 2, 37, seed=6, dtype=torch.float32)
    bias[1, 1] = -torch.inf
    for weights in ({}, {"key_mask": mask}, {"key_bias": bias}, {"key_bias": bias[:, :1]}):
        found = outputs(inputs, feature_map, "compiled", **weights)
        expected = truth(inputs, feature_map, **weights)
        torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert (outputs(inputs, feature_map, "compiled", key_bias=bias)[1, groups:] == 0).all()


@pytest.mark.parametrize(("head_dim", "num_features", "value_dim"), [(64, 256, 64), (72, 200, 70), (1, 1, 1)])
def test_widths_fill_vectors_or_not(head_dim: int, num_features: int, value_dim: int) -> None:
    feature_map = FavorPlus(head_dim, num_features)
    inputs = qkv(head_dim=head_dim, value_dim=value_dim, scale=0.3, dtype=torch.float32)
    # Exponents of at most 16 are sums of D products.
    bound = 2 * 32 * 16 * torch.finfo(torch.float32).eps
    found = outputs(inputs, feature_map, "compiled")
    torch.testing.assert_close(found.double(), truth(inputs, feature_map), rtol=bound, atol=bound)


@pytest.mark.parametrize("name", COMPILED_MAPS)
def test_the_normaliser_of_one_key_has_its_digits(name: str) -> None:
    """log Σ φ(q)φ(k) of a query and a key for 400 pairs; |W·x| is below 8 here, and R = 12 powers are added."""
    feature_map, (query, key, value) = build(name), qkv(200, 2, 2, 1, 1, dtype=torch.float32)
    found = linattn.linear_partial(query, key, value, feature_map, is_causal=True, backend="compiled").log_normalizer
    tokens = (x.double() for x in (query, key, value))
    expected = linattn.linear_partial(*tokens, feature_map, is_causal=True, backend="reference").log_normalizer
    bound = (2 * 8 + 12) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_of_16_bits_lose_no_more_than_their_own_rounding(dtype: torch.dtype) -> None:
    feature_map, inputs = build("FavorPlus"), qkv(dtype=dtype)
    found, unit = outputs(inputs, feature_map, "compiled"), torch.finfo(dtype).eps / 2
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), truth(inputs, feature_map), rtol=unit + TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("rise", [30.0, 300.0, 1e4])
def test_a_key_far_above_the_others_moves_the_exponents(rise: float) -> None:
    """Up, where it is the later; and it drowns nobody before it."""
    feature_map, inputs = build("FavorPlus"), qkv(dtype=torch.float32)
    bias = torch.zeros(2, 2, 37)
    bias[0, 1, 20], bias[1, 0, 30] = rise, -rise
    found = outputs(inputs, feature_map, "compiled", key_bias=bias)
    # A bias is rounded to its own last place, and with it the logarithm of all weights.
    bound = TOLERANCE + rise * torch.finfo(torch.float32).eps * 4
    torch.testing.assert_close(found.double(), truth(inputs, feature_map, key_bias=bias), rtol=bound, atol=bound)


def test_long_tokens_keep_their_digits() -> None:
    """Exponents of hundreds, powers that underflow and overflow without their shift."""
    feature_map, inputs = FavorPlus(8, 24, seed=1), qkv(scale=9.0, dtype=torch.float32)
    found, expected = outputs(inputs, feature_map, "compiled"), truth(inputs, feature_map)
    # An exponent p is rounded to p units; W·x and its shift are at most |w||x| + |x|²/2 with |w| <= 8, |x| <= 40.
    bound = 2 * 8 * (8 * 40 + 40**2 / 2) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


def test_what_a_masked_key_holds_goes_nowhere() -> None:
    feature_map, inputs = build("Hyperbolic"), qkv(dtype=torch.float32)
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[:, [0, 7, 8]] = False
    clean = outputs(inputs, feature_map, "compiled", key_mask=mask)
    for x in inputs[1:]:
        x[:, :, [0, 7, 8]] = torch.nan
    assert torch.equal(outputs(inputs, feature_map, "compiled", key_mask=mask), clean)
    assert (clean[:, :, 0] == 0).all()


def test_nan_stays_in_its_head() -> None:
    feature_map, (query, key, value) = build("FavorPlus"), qkv(heads=2, dtype=torch.float32)
    clean = outputs((query, key, value), feature_map, "compiled")
    key[0, 1, 5, 0] = torch.nan
    query[1, 0, 9, 0] = torch.nan
    found = outputs((query, key, value), feature_map, "compiled")
    assert found[0, 1, 5:].isnan().all()
    assert found[1, 0, 9].isnan().all()
    kept = ~found.isnan()
    assert torch.equal(found[kept], clean[kept])
    assert int((~kept).sum()) == (37 - 5 + 1) * 5


def test_a_stream_may_change_backends() -> None:
    """The states are those of any backend: logarithms of the normaliser, forks and strides that lie apart included."""
    feature_map, inputs = build("FavorPlus"), qkv(dtype=torch.float32)
    *_, (_, ours) = steps(inputs, feature_map, "compiled")
    *_, (_, theirs) = steps(inputs, feature_map, "blocked")
    query = inputs[0]
    for x, y in zip(ours.read(feature_map, query), theirs.read(feature_map, query), strict=True):
        torch.testing.assert_close(x, y, rtol=TOLERANCE, atol=TOLERANCE)
    apart = linattn.State(ours.S.mT.contiguous().mT, ours.z, ours.m, ours.built_with)
    token = tuple(torch.stack((x, x), -1)[..., 0][:, :, :1] for x in inputs)
    rows = [
        linattn.linear_attention_with_state(*token, feature_map, state, enable_gqa=True, backend="compiled").out
        for state in (apart, ours)
    ]
    assert torch.equal(*rows)


def test_a_state_is_not_written_to() -> None:
    feature_map, inputs = build("FavorPlus"), qkv(dtype=torch.float32)
    kept = [(state.sums, [x.clone() for x in state.sums]) for _, state in steps(inputs, feature_map, "compiled")]
    assert all(torch.equal(x, y) for sums, copies in kept for x, y in zip(sums, copies, strict=True))


def test_gradients_of_a_state_go_through_plain_torch() -> None:
    """A named backend runs or raises."""
    feature_map, inputs = build("FavorPlus"), qkv(dtype=torch.float32)
    *_, (_, state) = steps(inputs, feature_map, "compiled")
    leaf = state.S.clone().requires_grad_()
    followed = linattn.State(leaf, state.z, state.m, state.built_with)
    token = tuple(x[:, :, :1] for x in inputs)

    def out(backend: str) -> torch.Tensor:
        return linattn.linear_attention_with_state(*token, feature_map, followed, enable_gqa=True, backend=backend).out

    assert torch.equal(*(torch.autograd.grad(out(backend).sum(), leaf)[0] for backend in ("auto", "blocked")))
    with pytest.raises(ValueError, match="gradients follow this call"):
        out("compiled")


def test_it_has_no_window() -> None:
    feature_map, token = build("FavorPlus"), tuple(x[:, :, :1] for x in qkv(dtype=torch.float32))
    state = linattn.linear_attention_with_state(*token, feature_map, enable_gqa=True, window=4).state
    for before in (None, state):
        with pytest.raises(ValueError, match="no exact window"):
            linattn.linear_attention_with_state(
                *token, feature_map, before, enable_gqa=True, window=4, backend="compiled"
            )


def test_auto_takes_it_for_one_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    attend = Compiled.attend

    def counted(self: Compiled, *call: Any, **options: int) -> Any:
        used.append(1)
        return attend(self, *call, **options)

    monkeypatch.setattr(Compiled, "attend", counted)
    feature_map, inputs = build("FavorPlus"), qkv(dtype=torch.float32)
    first = tuple(x[:, :, :1] for x in inputs)
    linattn.linear_attention_with_state(*first, feature_map, enable_gqa=True)
    assert len(used) == 1
    for other in (inputs, tuple(x.double() for x in first)):
        linattn.linear_attention_with_state(*other, feature_map, enable_gqa=True)
    linattn.linear_attention(*first, feature_map, enable_gqa=True)
    linattn.linear_attention_with_state(*first, build("Relu"), enable_gqa=True)
    linattn.linear_attention_with_state(first[0].clone().requires_grad_(), *first[1:], feature_map, enable_gqa=True)
    assert len(used) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.double(), "takes float32, bfloat16 and float16"),
        (lambda x: x[:, :, :0], "0 queries and 0 keys"),
        (lambda x: x.clone().requires_grad_(), "gradients follow this call"),
        (torch.nn.Parameter, "plain tensors"),
    ],
)
def test_it_says_why_not(change: object, words: str) -> None:
    inputs = tuple(change(x[:, :, :1]) for x in qkv(dtype=torch.float32))
    with pytest.raises(ValueError, match=words):
        linattn.linear_attention_with_state(*inputs, build("FavorPlus"), enable_gqa=True, backend="compiled")


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_it_says_which_map_and_direction_it_leaves_to_others() -> None:
    token = tuple(x[:, :, :1] for x in qkv(dtype=torch.float32))
    with pytest.raises(ValueError, match="exponential maps that are one product"):
        linattn.linear_attention_with_state(*token, build("Relu"), enable_gqa=True, backend="compiled")
    with pytest.raises(ValueError, match="not causal"):
        linattn.linear_attention(*token, build("FavorPlus"), enable_gqa=True, backend="compiled")


def test_a_map_that_learns_is_refused_for_what_it_is() -> None:
    token = tuple(x[:, :, :1] for x in qkv(dtype=torch.float32))
    with torch.no_grad(), pytest.raises(ValueError, match="one product of W and a token; not LearnedExp") as refused:
        linattn.linear_attention_with_state(*token, build("LearnedExponential"), enable_gqa=True, backend="compiled")
    assert "gradients" not in str(refused.value)


@pytest.mark.usefixtures("_two_threads")
def test_auto_leaves_large_states_to_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name it runs whatever the number of threads."""
    many = qkv(1, 32, 32, 1, 1, value_dim=256, dtype=torch.float32)
    feature_map = FavorPlus(8, 128)
    plain, found = (
        linattn.linear_attention_with_state(*many, feature_map, backend=backend).out
        for backend in ("blocked", "compiled")
    )
    assert (plain - found).abs().max() <= 1e-5 * plain.abs().max()
    monkeypatch.setattr(Compiled, "attend", None)
    linattn.linear_attention_with_state(*many, feature_map)


def test_it_is_left_to_plain_torch_where_operations_are_watched() -> None:
    """A counter sees the products of plain torch."""
    feature_map, token = build("FavorPlus"), tuple(x[:, :, :1] for x in qkv(dtype=torch.float32))
    with FlopCounterMode(display=False) as counted:
        linattn.linear_attention_with_state(*token, feature_map, enable_gqa=True)
    assert counted.get_total_flops() > 0
    with FlopCounterMode(display=False), pytest.raises(ValueError, match="looks at every operation"):
        linattn.linear_attention_with_state(*token, feature_map, enable_gqa=True, backend="compiled")
