"""A weight for every key: w_ij = φ(q_i)·φ(k_j)·exp(b_j), in sums, streams, windows and rows alike."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import linattn
from grid import (
    ADDITIVE_MAPS,
    BACKENDS,
    CASES,
    CAUSAL_MAPS,
    PAIRED_CASES,
    Case,
    build,
    qkv,
    takes_statistics_from_the_call,
    tokens,
    total,
)

LENGTH = 21
WINDOW_MAPS = ("FavorPlus", "Expansion", "Expansion-0", "Expansion-2", "Centred-Balanced-FavorPlus")
WINDOWS = (4, 1)
# Maps of each kind of fold with a window, and every map without one.
WINDOW_PARTS = [
    (Case(name, backend, is_causal), {"window": window})
    for name in WINDOW_MAPS
    for backend in BACKENDS
    for is_causal in (False, True)
    for window in WINDOWS
]
PARTS = [*((case, {}) for case in PAIRED_CASES), *WINDOW_PARTS]
STREAMED = [(case, options) for case, options in [*((case, {}) for case in CASES), *WINDOW_PARTS] if case.is_causal]


def named(part: Case | dict[str, int]) -> str:
    """A part of a test's name."""
    return "-".join(f"{k}{v}" for k, v in part.items()) if isinstance(part, dict) else str(part)


def inputs(**sizes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, and biases of each key/value head."""
    query, key, value = qkv(**{"num_queries": LENGTH, "num_keys": LENGTH} | sizes)
    return query, key, value, tokens(*key.shape[:3], seed=5)


@pytest.mark.parametrize(("case", "options"), PARTS, ids=named)
def test_a_constant_changes_the_log_normaliser_alone(case: Case, options: dict[str, int]) -> None:
    query, key, value, bias = inputs()
    constant = torch.tensor([[300.0, -700.0]]).unsqueeze(-1)  # of each key/value head
    call = {"is_causal": case.is_causal, "enable_gqa": True, "backend": case.backend, **options}
    found, moved = (
        linattn.linear_partial(query, key, value, case.build(), key_bias=b, **call) for b in (bias, bias + constant)
    )
    # Logits of some hundreds are rounded to 1e-13; weights of signed maps cancel.
    torch.testing.assert_close(moved.out, found.out, rtol=1e-9, atol=1e-9)
    expected = found.log_normalizer + constant.repeat_interleave(2, 1)
    torch.testing.assert_close(moved.log_normalizer, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("case", "options"), PARTS, ids=named)
def test_minus_infinity_is_a_masked_key(case: Case, options: dict[str, int]) -> None:
    """Whatever it holds, forward and backward."""
    fillings = torch.tensor([1e4, math.nan, math.inf]).repeat_interleave(2)
    query, key, value, bias = inputs(batch=len(fillings))
    mask = torch.ones(len(fillings), LENGTH, dtype=torch.bool)
    mask[::2, :6], mask[1::2, 9:13] = False, False
    hidden = ~mask[:, None, :, None]
    results = []
    for given in ({"key_mask": mask, "key_bias": bias}, {"key_bias": bias.masked_fill(~mask.unsqueeze(1), -math.inf)}):
        filled = (torch.where(hidden, fillings.view(-1, 1, 1, 1).to(x.dtype), x) for x in (key, value))
        leaves = [x.clone().requires_grad_() for x in (query, *filled)]
        out = case.attend(*leaves, case.build(), **given, **options)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
        assert found.isfinite().all()


@pytest.mark.parametrize("case", [c for c in PAIRED_CASES if takes_statistics_from_the_call(c.map_name)], ids=str)
def test_a_key_too_faint_for_the_tokens_dtype_takes_part_in_no_statistics(case: Case) -> None:
    """In a bias of float64 beside tokens of float32 its weight is 0, as that of a masked key is."""
    query, key, value, bias = inputs()
    tokens = (query.float(), torch.where(torch.arange(LENGTH).view(-1, 1) < 6, 50 * key, key).float(), value.float())
    faint, masked = (bias.index_fill(2, torch.arange(6), least) for least in (-1e300, -math.inf))
    found, expected = (case.attend(*tokens, case.build(), key_bias=given) for given in (faint, masked))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("case", [c for c in PAIRED_CASES if not takes_statistics_from_the_call(c.map_name)], ids=str)
def test_a_bias_of_log_n_is_n_copies(case: Case) -> None:
    query, key, value, bias = inputs()
    number, at = 3, 8
    weighted = bias.clone()
    weighted[:, :, at] += math.log(number)
    index = torch.tensor([j for j in range(LENGTH) for _ in range(number if j == at else 1)])
    found = case.attend(query, key, value, case.build(), key_bias=weighted)
    copied = (query[:, :, index], key[:, :, index], value[:, :, index])
    # The last of each key's copies is the row that sees them all.
    last = torch.tensor([i for i, j in enumerate(index) if i + 1 == len(index) or index[i + 1] != j])
    expected = case.attend(*copied, case.build(), key_bias=bias[:, :, index])[:, :, last]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("case", "options"), PARTS, ids=named)
def test_gradients_reach_the_bias(case: Case, options: dict[str, int]) -> None:
    """Each derivative is that of finite differences; rows of a batch stand for the calls."""
    query, key, value, bias = inputs(batch=1, heads=2, kv_heads=2, num_queries=7, num_keys=7, value_dim=2)
    bias[:, :, 2] = -math.inf
    live = torch.arange(7) != 2
    feature_map, step = case.build().requires_grad_(False), 1e-6

    def attend(free: Tensor) -> Tensor:
        given = bias.repeat(len(free), 1, 1)
        given[:, :, live] = free.unflatten(1, (2, -1))
        rows = (x.expand(len(free), -1, -1, -1) for x in (query, key, value))
        return case.attend(*rows, feature_map, key_bias=given, **options).flatten(1)

    free = bias[:, :, live].flatten(1)
    moved = step * torch.eye(free.shape[1], dtype=free.dtype)
    differences = (attend(free + moved) - attend(free - moved)) / (2 * step)
    each = free.repeat(differences.shape[1], 1).requires_grad_()
    (found,) = torch.autograd.grad(attend(each).diagonal().sum(), each)
    torch.testing.assert_close(found, differences.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", PAIRED_CASES, ids=str)
def test_one_bias_for_all_heads_is_that_of_each(case: Case) -> None:
    """Its gradient is the sum over the heads'."""
    query, key, value, bias = inputs()
    results = []
    for given in (bias[:, :1].clone().requires_grad_(), bias[:, :1].repeat(1, 2, 1).requires_grad_()):
        out = case.attend(query, key, value, case.build(), key_bias=given)
        (grad,) = torch.autograd.grad(out.square().sum(), given)
        results.append((out, grad.sum(1)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("case", "options"), STREAMED, ids=named)
def test_any_cut_gives_the_same(case: Case, options: dict[str, int]) -> None:
    """Biases that come and go: a chunk without one has bias 0."""
    *leaves, bias = inputs()
    query, key, value = (x.requires_grad_() for x in leaves)
    bias[:, :, 5:9] = 0
    bias[0, :, 12:14] = -math.inf
    whole = case.attend(query, key, value, case.build(), key_bias=bias, **options)
    expected = torch.autograd.grad(whole.square().sum(), (query, key, value))
    feature_map = case.build()
    for cuts in ((0, 5, 9, LENGTH), (0, 1, 2, 5, 9, 9, 13, 20, LENGTH)):
        state, outs = None, []
        for a, b in itertools.pairwise(cuts):
            chunk = (x[:, :, a:b] for x in (query, key, value))
            part = None if (a, b) == (5, 9) else bias[:, :, a:b]
            call = {"enable_gqa": True, "backend": case.backend, **options}
            out, state = linattn.linear_attention_with_state(*chunk, feature_map, state, key_bias=part, **call)
            outs.append(out)
        found = torch.cat(outs, 2)
        torch.testing.assert_close(found, whole, rtol=1e-10, atol=1e-10)
        grads = torch.autograd.grad(found.square().sum(), (query, key, value))
        torch.testing.assert_close(grads, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("case", [c for c in CASES if c.map_name in ADDITIVE_MAPS], ids=str)
def test_weights_are_those_of_the_definition(case: Case) -> None:
    """In rows of the attention matrix too."""
    query, key, value, bias = inputs(heads=2)
    feature_map = case.build()
    call = {"key_bias": bias, "is_causal": case.is_causal}
    rows = linattn.attention_rows(query, key, feature_map, torch.arange(LENGTH), **call)
    found = case.attend(query, key, value, case.build(), key_bias=bias)
    torch.testing.assert_close(rows @ value, found, rtol=1e-10, atol=1e-10)
    if takes_statistics_from_the_call(case.map_name):
        return
    phi_q, phi_k = (linattn.feature_maps.features(feature_map, x, s) for x, s in ((query, "query"), (key, "key")))
    weights = phi_q @ phi_k.mT * bias.exp().unsqueeze(-2)
    weights = weights.tril() if case.is_causal else weights
    # Rows that give no weight to any key are 0.
    expected = (weights @ value / weights.sum(-1, keepdim=True)).nan_to_num()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_exact_softmax_takes_the_same_bias(is_causal: bool, dtype: torch.dtype) -> None:
    """Biases keep their digits beside 16-bit tokens: rounded to 8 bits, 300.5 would be 300 or 302."""
    query, key, value, bias = inputs(num_queries=13)
    bias += 300
    bias[:, 1, :4] = -math.inf
    query, key, value = (x.to(dtype) for x in (query, key, value))
    call = {"key_bias": bias, "is_causal": is_causal, "enable_gqa": True}
    found, part = (
        linattn.softmax_attention(query, key, value, **call),
        linattn.softmax_partial(query, key, value, **call),
    )
    k, v, b = (x.double().repeat_interleave(2, 1) for x in (key, value, bias))
    logits = query.double() @ k.mT * 8**-0.5 + b.unsqueeze(-2)
    if is_causal:
        logits = logits.masked_fill(~torch.ones(13, LENGTH, dtype=torch.bool).tril(LENGTH - 13), -math.inf)
    expected = logits.softmax(-1) @ v
    band = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    for out in (found, part.out):
        torch.testing.assert_close(out.double(), expected, rtol=band, atol=band)
    torch.testing.assert_close(part.log_normalizer.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4], ids=str)
@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_decay_is_a_bias_on_all_keys(map_name: str, window: int | None) -> None:
    feature_map = build(map_name)
    if window and not (feature_map.softmax_kernel and feature_map.positive_normalizer):
        return
    query, key, value, bias = inputs()
    factor = torch.tensor([[-3.0, 0.5]])
    options = {"enable_gqa": True, "window": window}
    states = [
        linattn.linear_attention_with_state(query, key, value, feature_map, key_bias=b, **options).state
        for b in (bias, bias + factor.unsqueeze(-1))
    ]
    later = qkv(num_queries=6, num_keys=6, seed=40)
    found, expected = (
        linattn.linear_attention_with_state(*later, feature_map, state, **options)
        for state in (states[0].decay(factor), states[1])
    )
    torch.testing.assert_close(found.out, expected.out, rtol=1e-10, atol=1e-10)
    twice = states[0].decay(1.5).decay(factor - 1.5)
    reads = (state.read(feature_map, query) for state in (twice, states[1]))
    torch.testing.assert_close(*reads, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_decay_distributes_over_merge(map_name: str) -> None:
    feature_map = build(map_name)
    _, key, value, bias = inputs()
    empty = linattn.State.empty(feature_map, batch_size=2, num_heads=2, value_dim=5, dtype=torch.float64)
    first = empty.absorb(feature_map, key[:, :, :9], value[:, :, :9], key_bias=bias[:, :, :9])
    second = empty.absorb(feature_map, key[:, :, 9:], value[:, :, 9:], key_bias=bias[:, :, 9:])
    whole = empty.absorb(feature_map, key, value, key_bias=bias)
    factor = torch.tensor([[-2.0], [7.0]], dtype=torch.float64)
    found, expected = first.merge(second).decay(factor), first.decay(factor).merge(second.decay(factor))
    m = found.m
    torch.testing.assert_close(total(found, m), total(expected, m), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total(whole.decay(factor), m), total(found, m), rtol=1e-10, atol=1e-10)
    nothing = empty.decay(-5.0).merge(whole)
    torch.testing.assert_close(total(nothing, whole.m), total(whole, whole.m), rtol=0, atol=0)


def test_gradients_reach_the_decay() -> None:
    feature_map = build("FavorPlus")
    query, key, value, _ = inputs(batch=1, heads=2, kv_heads=2, num_queries=5, num_keys=5)
    state = linattn.linear_attention_with_state(query, key, value, feature_map, window=2).state

    def attend(factor: Tensor) -> Tensor:
        later = qkv(1, 2, 2, 3, 3, seed=9)
        return linattn.linear_attention_with_state(*later, feature_map, state.decay(factor), window=2).out

    torch.autograd.gradcheck(attend, torch.tensor([[-0.4, 0.3]], dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize(
    ("map_name", "is_causal"),
    [
        ("FavorPlus", False),
        ("FavorPlus", True),
        ("Taylor", True),
        ("Expansion", False),
        ("Expansion", True),
        ("Centred-Taylor", False),
    ],
)
def test_biases_compile_and_vmap(map_name: str, is_causal: bool) -> None:
    """Forward and backward, mapped and shared."""
    torch.compiler.reset()
    feature_map = build(map_name)

    def loss(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        out = linattn.linear_attention(
            query, key, value, feature_map, key_bias=bias, is_causal=is_causal, enable_gqa=True
        )
        return out.square().sum()

    given = inputs()
    eager = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    leaves = [x.clone().requires_grad_() for x in given]
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    for found, expected in zip(compiled, eager(*given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    stacked = [torch.stack((x, x + 0.1)) for x in given]
    for found, *alone in zip(
        torch.func.vmap(eager)(*stacked), *(eager(*(x[i] for x in stacked)) for i in (0, 1)), strict=True
    ):
        torch.testing.assert_close(found, torch.stack(alone), rtol=1e-11, atol=1e-11)


BIASES: dict[str, tuple[object, type[Exception], str]] = {
    "a mask": (torch.ones(2, 2, LENGTH, dtype=torch.bool), TypeError, "key_bias must be a floating.*key_mask"),
    "a list": ([0.0], TypeError, "key_bias must be a floating tensor.*got list"),
    "two dimensions": (torch.zeros(2, LENGTH), ValueError, r"key_bias must be \(B, Hkv or 1, Lk\).*unsqueeze\(1\)"),
    "one per query head": (torch.zeros(2, 4, LENGTH), ValueError, r"key_bias must be .*got \(2, 4, 21\)"),
    "another device": (torch.zeros(2, 2, LENGTH, device="meta"), ValueError, "key_bias is on meta, the keys on cpu"),
}


@pytest.mark.parametrize("name", BIASES)
def test_refused_with_words(name: str) -> None:
    bias, kind, message = BIASES[name]
    query, key, value, _ = inputs()
    state = linattn.State.empty(build("FavorPlus"), batch_size=2, num_heads=2, value_dim=5, dtype=torch.float64)
    for call in (
        lambda: linattn.linear_attention(query, key, value, build("FavorPlus"), key_bias=bias, enable_gqa=True),
        lambda: linattn.softmax_attention(query, key, value, key_bias=bias, enable_gqa=True),
        lambda: state.absorb(build("FavorPlus"), key, value, key_bias=bias),
    ):
        with pytest.raises(kind, match=message):
            call()


def test_a_decay_of_another_shape_is_refused() -> None:
    state = linattn.State.empty(build("FavorPlus"), batch_size=2, num_heads=3, value_dim=5)
    with pytest.raises(ValueError, match=r"log_factor must be a number or \(B or 1, H or 1\) with \(B, H\) = \(2, 3\)"):
        state.decay(torch.zeros(3))
