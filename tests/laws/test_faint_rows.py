"""Rows whose weights are far below 1 have the gradients of any others: on the way to these nothing overflows.

Of coordinates below 0 EluPlusOne's features are exp(x): queries or keys lower by c have weights exp(c) times as small,
and the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import linattn
from grid import BACKENDS, relative_error
from linattn.feature_maps import EluPlusOne, FeatureMap, TensorPolynomial
from linattn.softmax import Partial

Tokens = Sequence[Tensor]
LENGTH, WIDTH = 6, 3
# Far enough that a gradient over a denominator, times values, is beyond float32 and float64.
FALL = {torch.float32: 82.0, torch.bfloat16: 82.0, torch.float16: 82.0, torch.float64: 700.0}
LARGE = 4096.0


def tokens(dtype: torch.dtype) -> Tokens:
    """Queries and keys below 0, in numbers that every dtype has, some after a fall; large values."""
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(1, 2, LENGTH, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3))
    query, key, value = (x.half().bfloat16().to(dtype) for x in (-query.abs(), -key.abs(), LARGE * value))
    return query, key, value


def lowered(x: Tensor, which: slice, fall: float) -> Tensor:
    """Some tokens lower."""
    x = x.clone()
    x[:, :, which] -= fall
    return x


def whole(tokens: Tokens, feature_map: FeatureMap, backend: str) -> Partial:
    return linattn.linear_partial(*tokens, feature_map, backend=backend)


def causal(tokens: Tokens, feature_map: FeatureMap, backend: str) -> Partial:
    return linattn.linear_partial(*tokens, feature_map, is_causal=True, backend=backend)


def padded(tokens: Tokens, feature_map: FeatureMap, backend: str) -> Partial:
    """Beside masked keys, and rows that see no key at all."""
    mask = torch.arange(LENGTH).unsqueeze(0) > 1
    return linattn.linear_partial(*tokens, feature_map, key_mask=mask, is_causal=True, backend=backend)


def biased(tokens: Tokens, feature_map: FeatureMap, backend: str) -> Partial:
    """Each key's weight has a factor."""
    bias = torch.linspace(-2, 2, LENGTH, dtype=tokens[0].dtype).view(1, 1, -1)
    return linattn.linear_partial(*tokens, feature_map, key_bias=bias, is_causal=True, backend=backend)


def parts(tokens: Tokens, feature_map: FeatureMap, backend: str) -> Partial:
    """Combined from a part for every key."""
    query, key, value = tokens
    each = zip(key.split(1, 2), value.split(1, 2), strict=True)
    return linattn.combine(*(linattn.linear_partial(query, *pair, feature_map, backend=backend) for pair in each))


def stream(tokens: Tokens, feature_map: FeatureMap, backend: str) -> Partial:
    """In two chunks."""
    first, second = zip(*(x.split(LENGTH // 2, 2) for x in tokens), strict=True)
    early, state = linattn.linear_partial_with_state(*first, feature_map, backend=backend)
    late, _ = linattn.linear_partial_with_state(*second, feature_map, state, backend=backend)
    return Partial(*(torch.cat(pair, 2) for pair in zip(early, late, strict=True)))


def merged(tokens: Tokens, feature_map: FeatureMap, backend: str) -> Partial:
    """Read from merged states, one of which faded."""
    query, key, value = tokens
    empty = linattn.State.empty(feature_map, batch_size=1, num_heads=2, value_dim=WIDTH, dtype=query.dtype)
    early, late = (
        empty.absorb(feature_map, *pair)
        for pair in zip(key.split(LENGTH // 2, 2), value.split(LENGTH // 2, 2), strict=True)
    )
    return early.decay(-3.0).merge(late).read(feature_map, query)


def sinks(tokens: Tokens, feature_map: FeatureMap, backend: str) -> Partial:
    """Beside a sink that weighs about as much as the keys of some rows."""
    part = causal(tokens, feature_map, backend)
    sink = part.log_normalizer.detach().mean((0, 2))
    return part._replace(out=part.with_sink(sink))


WAYS = (whole, causal, padded, biased, parts, stream, merged, sinks)
Way = Callable[[Tokens, FeatureMap, str], Partial]


def gradients(way: Way, tokens: Tokens, feature_map: FeatureMap, backend: str) -> Tokens:
    """Gradients of outputs and log-normalisers."""
    leaves = tuple(x.detach().requires_grad_() for x in tokens)
    part = way(leaves, feature_map, backend)
    generator = torch.Generator().manual_seed(5)
    # Such numbers have few digits.
    of_out, of_log = (torch.randn(x.shape, generator=generator).half().bfloat16().to(x.dtype) for x in part)
    seen = part.log_normalizer.isfinite()
    total = (part.out * of_out).sum() + torch.where(seen, part.log_normalizer, 0).mul(of_log).sum()
    return torch.autograd.grad(total, leaves)


def check(found: Tokens, truth: Tokens, dtype: torch.dtype) -> None:
    """Within the rounding of exponents as large as the fall in sums' precision, and of the result in its own."""
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for x, y in zip(found, truth, strict=True):
        assert x.isfinite().all()
        assert relative_error(x, y) <= 4 * FALL[dtype] * eps + 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("fallen", ["queries", "keys"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lower_tokens_have_the_same_gradients(
    dtype: torch.dtype, way: Way, backend: str, fallen: str, blocks_of: Callable[[int], None]
) -> None:
    blocks_of(2)
    query, key, value = tokens(torch.float64)
    every, feature_map = slice(None), EluPlusOne(WIDTH)
    falls = (FALL[dtype], 0.0) if fallen == "queries" else (0.0, FALL[dtype])
    low = (lowered(query, every, falls[0]), lowered(key, every, falls[1]), value)
    truth = gradients(way, (query, key, value), feature_map, "reference")
    check(gradients(way, tuple(x.to(dtype) for x in low), feature_map, backend), truth, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", [whole, causal, padded, biased, stream], ids=lambda way: way.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_some_tokens_are_lower(dtype: torch.dtype, way: Way, backend: str, blocks_of: Callable[[int], None]) -> None:
    """Beside float64's gradients, which have room: one query in the middle, or the first keys, or their coordinates."""
    blocks_of(2)
    (query, key, value), fall = tokens(dtype), FALL[dtype]
    apart = query.clone(), key.clone(), value
    # Products of one feature's small query and another one's small key.
    apart[0][..., 0] -= fall
    apart[1][..., 1:] -= fall
    feature_map = EluPlusOne(WIDTH)
    for case in ((lowered(query, slice(3, 4), fall), key, value), (query, lowered(key, slice(3), fall), value), apart):
        found = gradients(way, case, feature_map, backend)
        if case is apart and way in (whole, stream):
            # Those of sums, between keys and queries, are beyond the dtype: the largest numbers stand for them.
            assert all(x.isfinite().all() for x in found)
            continue
        truth = gradients(way, tuple(x.double() for x in case), feature_map, "reference")
        check(found, truth, dtype)


class Powers(FeatureMap):
    """A user's own map with a parameter: exp(w x), one factor w for each feature."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.linspace(0.99, 1.01, WIDTH))

    def query(self, x: Tensor) -> Tensor:
        return torch.exp(x * self.weight.to(x.dtype))

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return self.query(q) @ self.query(k).mT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", [whole, causal], ids=lambda way: way.__name__)
def test_other_maps_and_their_parameters(way: Way, backend: str, blocks_of: Callable[[int], None]) -> None:
    """Fourth powers of small tokens, and exponentials with a parameter."""
    blocks_of(2)
    query, key, value = tokens(torch.float32)
    power, own = TensorPolynomial(WIDTH, degree=4, constant=0.0), Powers()
    for feature_map, small in ((power, query * 2.0**-29), (own, query - 80.0)):
        leaves, found = [x.requires_grad_() for x in feature_map.parameters()], []
        for dtype, chosen in ((torch.float64, "reference"), (torch.float32, backend)):
            inputs = [x.to(dtype).requires_grad_() for x in (small, key, value)]
            found.append(torch.autograd.grad(way(tuple(inputs), feature_map, chosen).out.sum(), (*inputs, *leaves)))
        check(found[1], found[0], torch.float32)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("fallen", ["queries", "keys"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rows_of_the_attention_matrix_have_the_same_gradients(dtype: torch.dtype, fallen: str, is_causal: bool) -> None:
    query, key, value = tokens(torch.float64)
    every, found, index = slice(None), [], torch.arange(LENGTH)
    falls = (FALL[dtype], 0.0) if fallen == "queries" else (0.0, FALL[dtype])
    low = lowered(query, every, falls[0]).to(dtype), lowered(key, every, falls[1]).to(dtype)
    truth = low if dtype is torch.bfloat16 else (query, key)
    for width, given in ((torch.float64, truth), (dtype, low)):
        leaves = [x.detach().to(width).requires_grad_() for x in given]
        rows = linattn.attention_rows(*leaves, EluPlusOne(WIDTH), index, is_causal=is_causal)
        found.append(torch.autograd.grad((rows.double() @ value).sum(), leaves))
    check(found[1], found[0], dtype)
