"""Biases that rise along a text without end, as gates make them: kept apart from features, however strong they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import linattn
from linattn.attention.backends.blocked import blocks
from linattn.attention.backends.blocked.causal import sweep
from linattn.attention.backends.blocked.records import Causal
from linattn.feature_maps import EluPlusOne, Exponential, FavorPlus, FeatureMap, LearnedExponential, Relu
from linattn.feature_maps.base import features

LENGTH, WIDTH = 300, 8
MAPS = (
    FavorPlus(WIDTH, 16),
    LearnedExponential(WIDTH, 16).requires_grad_(False),
    Exponential(WIDTH),
    EluPlusOne(WIDTH),
    Relu(WIDTH, floor=0.0),
)
LARGE = LearnedExponential(WIDTH, 16).requires_grad_(False)
LARGE.of_key.bias += 40  # features of keys e^40 times larger, above what begins
# Exponents of up to 2^7 are rounded to 2^-17, and gradients are differences of a few such terms.
ERROR = 2.0**-14


def biases(kind: str) -> Tensor:
    """(1, H, L) of four heads."""
    place, draws = torch.arange(float(LENGTH)), torch.rand(1, 4, LENGTH, generator=torch.Generator().manual_seed(1))
    slopes = torch.tensor([0.02, 3.0, 0.3, 0.001]).view(1, 4, 1)
    kinds = {
        "zero": 0 * draws,
        "weak": 0.05 * draws.cumsum(-1),
        "strong": 8 * draws.cumsum(-1),
        "every strength": slopes * place,
        "falling": -slopes * place,
        "wild": 80 * draws,
        "masked": (slopes * place).masked_fill((place < 5) | (place % 7 == 3) | (place > 250), -torch.inf),
    }
    return kinds[kind]


def tokens(size: float) -> list[Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, 4, LENGTH, WIDTH, generator=generator) for _ in range(3))
    return [size * query, size * key, value]


def followed(inputs: list[Tensor], feature_map: FeatureMap, backend: str, pieces: tuple[int, ...]) -> list[Tensor]:
    """The causal output, piece by piece with a state, and the gradients of queries, keys, values and biases."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
    outs, state = [], None
    for parts in zip(*(x.split(pieces, 2) for x in leaves), strict=True):
        out, state = linattn.linear_attention_with_state(
            *parts[:3], feature_map, state, key_bias=parts[3], backend=backend
        )
        outs.append(out)
    whole = torch.cat(outs, 2)
    (whole * torch.linspace(-1, 1, WIDTH, dtype=dtype)).sum().backward()
    return [whole.detach(), *(x.grad for x in leaves)]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Each by its own norm."""
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() <= ERROR * y.norm()


@pytest.mark.parametrize("pieces", [(LENGTH,), (140, 160)], ids=str)
@pytest.mark.parametrize("size", [1.0, 4.0])
@pytest.mark.parametrize("kind", ["zero", "weak", "strong", "every strength", "falling", "wild", "masked"])
@pytest.mark.parametrize("feature_map", MAPS, ids=lambda x: type(x).__name__)
def test_as_exact_as_in_float64(feature_map: FeatureMap, kind: str, size: float, pieces: tuple[int, ...]) -> None:
    inputs = [*tokens(size), biases(kind)]
    found, expected = (followed(inputs, feature_map, backend, pieces) for backend in ("blocked", "reference"))
    assert_close(found, expected)


@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("feature_map", MAPS, ids=lambda x: type(x).__name__)
def test_rows_that_see_no_key_are_0_and_have_no_gradient_however_large(feature_map: FeatureMap, size: float) -> None:
    """As queries of padding on the left are; nor do they change what others get."""
    inputs, found = [*tokens(1.0), biases("masked")], []
    for factor in (1.0, size):
        query = inputs[0].clone()
        query[:, :, :5] *= factor
        found.append(followed([query, *inputs[1:]], feature_map, "blocked", (LENGTH,)))
    assert not found[1][0][:, :, :5].any()
    assert not found[1][1][:, :, :5].any()
    assert_close(found[1], found[0])


@pytest.mark.parametrize("constant", [-1e10, -1e30])
@pytest.mark.parametrize("feature_map", MAPS, ids=lambda x: type(x).__name__)
def test_a_vast_constant_that_hides_every_key_hides_none(feature_map: FeatureMap, constant: float) -> None:
    """As a mask of large numbers does where a text is padding alone."""
    query, key, value = tokens(1.0)
    query[:, :, ::7] *= 40.0
    bias = torch.full((1, 4, LENGTH), constant)
    plain, biased = (
        linattn.linear_attention(query, key, value, feature_map, key_bias=x, is_causal=True) for x in (0 * bias, bias)
    )
    assert_close([biased], [plain])


@pytest.mark.parametrize("place", [3, 64, 100])
@pytest.mark.parametrize("feature_map", [x for x in MAPS if x.exponential], ids=lambda x: type(x).__name__)
def test_keys_are_read_once_larger_ones_have_faded(
    feature_map: FeatureMap, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features e^70 and more times larger were before them, and fade in one block of tokens, or in several."""
    monkeypatch.setattr(blocks, "_CPU_BLOCK", 1)
    query, key, value = tokens(1.0)
    key[:, :, place:] -= 10
    bias = torch.arange(float(LENGTH)).expand(1, 4, -1) * torch.tensor([0.05, 0.4, 1.0, 4.0]).view(1, 4, 1)
    inputs = [query, key, value, bias]
    found, expected = (followed(inputs, feature_map, backend, (LENGTH,)) for backend in ("blocked", "reference"))
    assert_close(found, expected)
    assert_close([x[:, :, 200:] for x in found], [x[:, :, 200:] for x in expected])


@pytest.mark.parametrize("growth", [1.0, 12.0])
@pytest.mark.parametrize("feature_map", MAPS, ids=lambda x: type(x).__name__)
def test_as_exact_far_along_a_text(feature_map: FeatureMap, growth: float) -> None:
    """Biases of 2^16 have steps of 2^-8 in float32; what they are beside each other is as exact as near 0.

    Where keys grow, exponents jump within a block, and biases are within them.
    """
    query, key, value = tokens(1.0)
    key[:, :2, 200:] *= growth
    if isinstance(feature_map, Exponential):
        key[:, :, 50] += 24 * WIDTH**0.5  # features e^24 times larger, to which exponents move
    inputs = [query, key, value, biases("every strength") + 2.0**16]
    found, expected = (followed(inputs, feature_map, backend, (140, 160)) for backend in ("blocked", "reference"))
    assert_close(found, expected)


def test_rows_read_sums_far_below_the_keys_after_them() -> None:
    """Masked keys begin the second block; the first one's have a feature of e^-100, which queries weigh by e^150."""
    query, key, value = tokens(1.0)
    query[..., 0] += 150 * WIDTH**0.5
    key[:, :, :128, 0] -= 100 * WIDTH**0.5
    bias = biases("weak")
    bias[..., 128:134] = -torch.inf
    found, expected = (
        followed([query, key, value, bias], Exponential(WIDTH), backend, (LENGTH,))
        for backend in ("blocked", "reference")
    )
    assert_close([found[0][:, :, 128:134]], [expected[0][:, :, 128:134]])


@pytest.mark.parametrize("kind", ["weak", "strong", "every strength", "falling"])
@pytest.mark.parametrize("feature_map", [*MAPS[:2], LARGE], ids=["FavorPlus", "LearnedExponential", "large"])
def test_as_exact_where_rows_see_earlier_spans_alone(feature_map: FeatureMap, kind: str) -> None:
    """As beside a window, by the definition: w_ij = φ(q_i)·φ(k_j)·exp(b_j), relative to the largest b_j that i sees."""
    query, key, value = tokens(1.0)
    key[:, 3] *= 6  # far from its exponents, which other heads are not
    bias, span = 5 * biases(kind), torch.arange(LENGTH) // 8
    sums = linattn.State.empty(feature_map, batch_size=1, num_heads=4, value_dim=WIDTH).sums
    found, _ = sweep(feature_map, Causal(query.unsqueeze(2), key, value, *sums, bias), 8)
    phi_q, phi_k = (features(feature_map, x.double(), side) for x, side in ((query, "query"), (key, "key")))
    seen = torch.where(span.unsqueeze(-1) > span, bias.double().unsqueeze(-2), -torch.inf)[..., 8:, :]
    weights = (phi_q[..., 8:, :] @ phi_k.mT) * (seen - seen.amax(-1, keepdim=True)).exp()
    expected = weights @ value.double() / weights.sum(-1, keepdim=True)
    assert_close([found.out[:, :, 0, 8:].double()], [expected])


def test_values_may_have_no_width() -> None:
    query, key, value = tokens(1.0)
    inputs = query, key, value[..., :0]
    for kind in ("weak", "strong", "every strength"):
        out = linattn.linear_attention(*inputs, MAPS[0], is_causal=True, key_bias=biases(kind))
        assert out.shape == inputs[2].shape
