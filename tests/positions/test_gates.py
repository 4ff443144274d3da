"""Gates: a bias on keys and a decay of the state, whatever the stream's length and however it is cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import linattn
from grid import BACKENDS, CAUSAL_MAPS, FOLDED, build, qkv, relative_error, tokens
from linattn.positions import Gates, gate_bias, gated_attention_with_state

LENGTH = 23
WINDOWS = (None, 4)


def gates(*shape: int, scale: float = 1.0) -> Gates:
    """Forget gates between 0 and 1, input gates of either side of 1."""
    return Gates(torch.nn.functional.logsigmoid(tokens(*shape, seed=5)) * scale, tokens(*shape, seed=6))


def cut(given: Gates, a: int, b: int) -> Gates:
    """The gates of some tokens."""
    return Gates(*(None if x is None else x[..., a:b] for x in given))


def dense(q: Tensor, k: Tensor, v: Tensor, feature_map: linattn.feature_maps.FeatureMap, given: Gates) -> Tensor:
    """The definition: every weight with its product of gates, formed row by row in float64."""
    groups = q.shape[1] // k.shape[1]
    features = linattn.feature_maps.features
    F = given.log_forget.cumsum(-1)
    log_gate = F.unsqueeze(-1) - F.unsqueeze(-2)
    if given.log_input is not None:
        log_gate = log_gate + given.log_input.unsqueeze(-2)
    log_gate = torch.where(torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril(), log_gate, -torch.inf)
    gate = torch.exp(log_gate - log_gate.amax(-1, keepdim=True))
    outs = []
    for head in range(q.shape[1]):
        # A map of several heads wants all key heads beside each query head.
        phi_q = features(feature_map, q[:, head : head + 1].expand(-1, k.shape[1], -1, -1), "query")
        weights = (phi_q @ features(feature_map, k, "key").mT * gate)[:, head // groups]
        den = weights.sum(-1, keepdim=True)
        outs.append(weights @ v[:, head // groups] / torch.where(den == 0, 1, den))
    return torch.stack(outs, 1)


def step_by_step(
    q: Tensor, k: Tensor, v: Tensor, feature_map: linattn.feature_maps.FeatureMap, given: Gates, **options
):
    """One token a call."""
    state, outs = None, []
    for t in range(q.shape[2]):
        at = (x[:, :, t : t + 1] for x in (q, k, v))
        out, state = gated_attention_with_state(
            *at, feature_map, cut(given, t, t + 1), state, enable_gqa=True, **options
        )
        outs.append(out)
    return torch.cat(outs, 2), state


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_the_definition(map_name: str, backend: str) -> None:
    q, k, v = qkv(num_queries=LENGTH, num_keys=LENGTH)
    given, feature_map = gates(2, 2, LENGTH), build(map_name)
    found = gated_attention_with_state(q, k, v, feature_map, given, enable_gqa=True, backend=backend).out
    if isinstance(feature_map, linattn.feature_maps.GroupedFeatureMap):
        expected = linattn.linear_attention(
            q,
            k,
            v,
            feature_map,
            key_bias=gate_bias(given).key_bias,
            is_causal=True,
            enable_gqa=True,
            backend="reference",
        )
    else:
        expected = dense(q, k, v, feature_map, given)
    signed = not feature_map.nonnegative
    torch.testing.assert_close(found, expected, rtol=1e-7 if signed else 1e-10, atol=1e-7 if signed else 1e-10)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_no_gate_is_the_plain_op(map_name: str, window: int | None) -> None:
    """f = 1, forward and backward, and the state's next call."""
    feature_map = build(map_name)
    if window and not (feature_map.softmax_kernel and feature_map.positive_normalizer):
        return
    leaves = [x.requires_grad_() for x in qkv(num_queries=LENGTH, num_keys=LENGTH)]
    one, options = Gates(torch.zeros(2, 2, LENGTH)), {"enable_gqa": True, "window": window}
    results = []
    for call in (
        lambda state: linattn.linear_attention_with_state(*leaves, feature_map, state, **options),
        lambda state: gated_attention_with_state(*leaves, feature_map, one, state, **options),
    ):
        first = call(None)
        second = call(first.state)
        results.append((first.out, second.out, *torch.autograd.grad(second.out.square().sum(), leaves)))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_any_cut_gives_the_same(map_name: str, window: int | None) -> None:
    """Prefill, chunks and steps, outputs and gradients of gates."""
    feature_map = build(map_name).requires_grad_(False)
    if window and not (feature_map.softmax_kernel and feature_map.positive_normalizer):
        return
    q, k, v = qkv(num_queries=LENGTH, num_keys=LENGTH)
    given = Gates(*(x.requires_grad_() for x in gates(2, 2, LENGTH)))
    options = {"enable_gqa": True, "window": window}
    whole = gated_attention_with_state(q, k, v, feature_map, given, **options).out
    expected = torch.autograd.grad(whole.square().sum(), given)
    ways = [(0, 9, 9, 10, 16, LENGTH), *([tuple(range(LENGTH + 1))] if map_name in FOLDED else [])]
    for cuts in ways:
        state, outs = None, []
        for a, b in itertools.pairwise(cuts):
            tokens_of = (x[:, :, a:b] for x in (q, k, v))
            out, state = gated_attention_with_state(*tokens_of, feature_map, cut(given, a, b), state, **options)
            outs.append(out)
        joined = torch.cat(outs, 2)
        torch.testing.assert_close(joined, whole, rtol=1e-9, atol=1e-9)
        found = torch.autograd.grad(joined.square().sum(), given)
        # Weights of the identity cancel, and gradients with them.
        assert all(relative_error(*pair) < 1e-7 for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_gate_of_0_is_exact_where_nothing_was_before(window: int | None) -> None:
    """At a row's first token, after padding: float32 keeps all of its digits."""
    q, k, v = qkv(num_queries=LENGTH, num_keys=LENGTH, dtype=torch.float32)
    feature_map, given, options = build("FavorPlus"), gates(2, 2, LENGTH), {"enable_gqa": True, "window": window}
    given.log_forget[..., 0] = -torch.inf
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    state = linattn.linear_attention_with_state(q, k, v, feature_map, key_mask=padding, **options).state
    found, wanted = (gated_attention_with_state(q, k, v, feature_map, given, x, **options).out for x in (state, None))
    torch.testing.assert_close(found, wanted, rtol=2**-17, atol=2**-17)


def forgetful(kind: str, length: int) -> Gates:
    """Gates whose logarithms sum to about -10⁶, in even steps, in few leaps, or in one."""
    generator = torch.Generator().manual_seed(3)
    log_forget = -torch.rand(2, 2, length, generator=generator, dtype=torch.float64)
    if kind == "even":
        log_forget *= 2e6 / length
    else:
        leap = torch.rand(2, 2, length, generator=generator) < (0.05 if kind == "leaps" else 0.0)
        leap[..., length // 2] |= kind == "one leap"
        log_forget = torch.where(leap, -1e6 / leap.sum(-1, keepdim=True), log_forget * 0.2)
    return Gates(log_forget, tokens(2, 2, length, seed=6))


@pytest.mark.parametrize("kind", ["even", "leaps", "one leap"])
@pytest.mark.parametrize("map_name", ["FavorPlus", "EluPlusOne", "Taylor"])
def test_a_million_nats_of_forgetting(map_name: str, kind: str) -> None:
    """Step by step equals the whole to 1e-12 in float64; float32 keeps its digits."""
    length, feature_map = 150, build(map_name)
    q, k, v = qkv(num_queries=length, num_keys=length)
    given = forgetful(kind, length)
    assert -1.3e6 < float(given.log_forget.sum(-1).min()) < -0.9e6
    whole = gated_attention_with_state(q, k, v, feature_map, given, enable_gqa=True)
    steps, state = step_by_step(q, k, v, feature_map, given)
    assert relative_error(steps, whole.out) < 1e-12
    assert float((steps - whole.out).abs().max()) < 1e-12
    reads = [s.read(feature_map, q[:, :, :5]).out for s in (state, whole.state)]
    torch.testing.assert_close(*reads, rtol=1e-12, atol=1e-12)
    single = [x.float() for x in (q, k, v)]
    narrow = gated_attention_with_state(*single, feature_map, given, enable_gqa=True).out
    torch.testing.assert_close(narrow.double(), whole.out, rtol=0, atol=2e-4)
    torch.testing.assert_close(step_by_step(*single, feature_map, given)[0].double(), whole.out, rtol=0, atol=2e-4)


def test_a_stream_of_many_calls_keeps_its_exponents() -> None:
    """The state's exponent stays at the keys' own, however much was forgotten."""
    feature_map, state = build("FavorPlus"), None
    for seed in range(40):
        q, k, v = qkv(num_queries=8, num_keys=8, seed=seed, dtype=torch.float32)
        given = Gates(torch.full((2, 2, 8), -3125.0))
        _, state = gated_attention_with_state(q, k, v, feature_map, given, state, enable_gqa=True)
    assert float(state.m.abs().max()) < 50


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("map_name", ["FavorPlus", "EluPlusOne", "Taylor", "Hedgehog"])
def test_the_op_carries_biases_that_span_a_million(map_name: str, backend: str, is_causal: bool) -> None:
    """One call of the plain op, its running maximum alone: outputs and gradients are those of nearby biases."""
    length, feature_map = 150, build(map_name).requires_grad_(False)
    q, k, v = (x.requires_grad_() for x in qkv(num_queries=length, num_keys=length))
    # Multiples of 64 are exact at this size, so that only weights are rounded.
    near = torch.round(tokens(2, 2, length, seed=3) * 2**20) / 2**20
    steps = torch.arange(length) // 10
    bias = (near + steps * 2.0**16).requires_grad_()
    assert float(bias.detach().max() - bias.detach().min()) > 9e5
    call = {"is_causal": is_causal, "enable_gqa": True, "backend": backend}
    out = linattn.linear_attention(q, k, v, feature_map, key_bias=bias, **call)
    # A key of an earlier step has no weight beside those of the row's own.
    last = steps[-1] if not is_causal else None
    rows = [(steps == (s if last is None else last)) for s in range(15)]
    expected = torch.zeros_like(out)
    for s, keys in enumerate(rows):
        seen = (x[:, :, keys] for x in (k, v))
        query = q[:, :, steps == s]
        part = linattn.linear_attention(
            query, *seen, feature_map, key_bias=near[..., keys], **call | {"backend": "reference"}
        )
        expected = expected.index_add(2, torch.nonzero(steps == s).flatten(), part)
    torch.testing.assert_close(out, expected, rtol=1e-8, atol=1e-8)
    found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7)
    (of_bias,) = torch.autograd.grad(
        linattn.linear_attention(q, k, v, feature_map, key_bias=bias, **call).square().sum(), bias
    )
    assert bool(of_bias.isfinite().all())
    assert float(of_bias.sum().abs()) < 1e-7  # A constant added to all biases changes nothing.


@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_padding_and_batch_change_nothing(map_name: str) -> None:
    """Masked tokens neither enter nor make others fade, whatever they and their gates hold."""
    feature_map = build(map_name)
    q, k, v = qkv(batch=1, num_queries=LENGTH, num_keys=LENGTH)
    given, live = gates(1, 2, LENGTH), torch.tensor([3, 4, 5, 8, 9, 13, 14, 15, 16])
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[0, live], mask[1] = True, True
    alone = gated_attention_with_state(
        *(x[:, :, live] for x in (q, k, v)), feature_map, Gates(*(x[..., live] for x in given)), enable_gqa=True
    )
    q, k, v = (x.repeat(2, 1, 1, 1) for x in (q, k, v))
    given = Gates(*(x.repeat(2, 1, 1) for x in given))
    for x in given:
        x[0, :, ~mask[0]] = torch.nan
        x.requires_grad_()
    k[0, :, ~mask[0]] = torch.inf
    padded = gated_attention_with_state(q, k, v, feature_map, given, key_mask=mask, enable_gqa=True)
    torch.testing.assert_close(padded.out[:1, :, live], alone.out, rtol=1e-10, atol=1e-10)
    for grad in torch.autograd.grad(padded.out[:, :, live].square().sum(), given):
        assert bool(grad.isfinite().all())
        assert float(grad[0, :, ~mask[0]].abs().max()) == 0
    later = qkv(batch=1, num_queries=3, num_keys=3, seed=60)
    found, expected = (
        gated_attention_with_state(*later, feature_map, gates(1, 2, 3), state, enable_gqa=True).out
        for state in (padded.state.select(torch.tensor([0])), alone.state)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 2], ids=str)
@pytest.mark.parametrize("map_name", CAUSAL_MAPS)
def test_gradients(map_name: str, window: int | None) -> None:
    feature_map = build(map_name).requires_grad_(False)
    if window and not (feature_map.softmax_kernel and feature_map.positive_normalizer):
        return
    q, k, v = qkv(batch=1, heads=2, kv_heads=2, num_queries=5, num_keys=5, value_dim=2)
    leaves = [x.requires_grad_() for x in (q, k, v, *gates(1, 2, 5))]

    def attend(q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor, log_input: Tensor) -> Tensor:
        given, state = Gates(log_forget, log_input), None
        outs = []
        for a, b in ((0, 3), (3, 5)):
            part = (x[:, :, a:b] for x in (q, k, v))
            out, state = gated_attention_with_state(*part, feature_map, cut(given, a, b), state, window=window)
            outs.append(out)
        return torch.cat(outs, 2)

    torch.autograd.gradcheck(attend, leaves, atol=1e-5, rtol=1e-4, fast_mode=True)


def test_gradients_across_spans() -> None:
    """Leaps within one call: the gates' gradients are those of the calls that it is cut into."""
    q, k, v = qkv(batch=1, heads=2, kv_heads=2, num_queries=6, num_keys=6, value_dim=2)
    log_forget = gates(1, 2, 6).log_forget
    log_forget[..., 3] -= 2000
    feature_map = build("FavorPlus")

    def attend(q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor) -> Tensor:
        return gated_attention_with_state(q, k, v, feature_map, Gates(log_forget)).out

    torch.autograd.gradcheck(attend, [x.requires_grad_() for x in (q, k, v, log_forget)], atol=1e-5, rtol=1e-4)


def test_a_forget_gate_of_0_starts_anew() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(num_queries=LENGTH, num_keys=LENGTH))
    given = gates(2, 2, LENGTH)
    starts = (0, 11, 12, 17, LENGTH)
    given.log_forget[..., starts[:-1]] = -torch.inf
    feature_map = build("FavorPlus")
    whole = gated_attention_with_state(q, k, v, feature_map, given, enable_gqa=True).out
    parts = []
    for a, b in itertools.pairwise(starts):
        alone = (x[:, :, a:b] for x in (q, k, v))
        parts.append(gated_attention_with_state(*alone, feature_map, cut(given, a, b), enable_gqa=True).out)
    expected = torch.cat(parts, 2)
    torch.testing.assert_close(whole, expected, rtol=1e-11, atol=1e-11)
    found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (whole, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_the_window_is_the_forgetting_transformers() -> None:
    """A window over everything is softmax attention with F_t - F_j on its logits."""
    q, k, v = qkv(num_queries=LENGTH, num_keys=LENGTH)
    given, feature_map = gates(2, 2, LENGTH), build("FavorPlus")
    found = gated_attention_with_state(q, k, v, feature_map, given, enable_gqa=True, window=32).out
    F = given.log_forget.cumsum(-1)
    logits = feature_map.scale * (q @ k.repeat_interleave(2, 1).mT)
    logits += (F.unsqueeze(-1) - F.unsqueeze(-2) + given.log_input.unsqueeze(-2)).repeat_interleave(2, 1)
    logits = torch.where(torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), logits, -torch.inf)
    torch.testing.assert_close(found, logits.softmax(-1) @ v.repeat_interleave(2, 1), rtol=1e-10, atol=1e-10)


def test_the_mlstm_recurrence() -> None:
    """(S, z, m) of xLSTM with the identity map and without its floor."""
    q, k, v = (x.abs() + 0.1 for x in qkv(heads=2, kv_heads=2, num_queries=LENGTH, num_keys=LENGTH))
    given = gates(2, 2, LENGTH, scale=4.0)
    feature_map = linattn.feature_maps.Identity(8)
    found, state = gated_attention_with_state(q, k, v, feature_map, given)
    C, n = torch.zeros(2, 2, 8, 5, dtype=torch.float64), torch.zeros(2, 2, 8, dtype=torch.float64)
    m, outs = torch.full((2, 2), -torch.inf, dtype=torch.float64), []
    for t in range(LENGTH):
        log_f, log_i = given.log_forget[..., t], given.log_input[..., t]
        m_new = torch.maximum(log_f + m, log_i)
        f, i = torch.exp(log_f + m - m_new)[..., None], torch.exp(log_i - m_new)[..., None]
        C = f[..., None] * C + i[..., None] * k[:, :, t, :, None] * v[:, :, t, None]
        n, m = f * n + i * k[:, :, t], m_new
        outs.append((q[:, :, t, None] @ C).squeeze(-2) / (q[:, :, t] * n).sum(-1, keepdim=True))
    torch.testing.assert_close(found, torch.stack(outs, 2), rtol=1e-10, atol=1e-10)
    scale = torch.exp(state.m[..., :1] - m.unsqueeze(-1))
    torch.testing.assert_close(state.z * scale, n, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state.S * scale.unsqueeze(-1), C, rtol=1e-10, atol=1e-10)


def test_a_compiled_call_is_one_span() -> None:
    torch.compiler.reset()
    feature_map, given = build("FavorPlus"), gates(2, 2, LENGTH)

    def attend(q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor) -> Tensor:
        return gated_attention_with_state(q, k, v, feature_map, Gates(log_forget), enable_gqa=True).out

    inputs = (*qkv(num_queries=LENGTH, num_keys=LENGTH), given.log_forget)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, attend(*inputs), rtol=1e-12, atol=1e-12)
    stacked = [torch.stack((x, x * 1.1)) for x in inputs]
    mapped = torch.func.vmap(attend)(*stacked)
    torch.testing.assert_close(mapped[1], attend(*(x[1] for x in stacked)), rtol=1e-12, atol=1e-12)


def refused(gate: object = None, log_input: object = None, **changes: object) -> object:
    """A gated call of five tokens with something wrong."""
    q, k, v = (changes.pop(name, x) for name, x in zip("qkv", qkv(num_queries=5, num_keys=5), strict=True))
    given = Gates(torch.zeros(2, 2, 5) if gate is None else gate, log_input)
    return gated_attention_with_state(q, k, v, build("FavorPlus"), given, enable_gqa=True, **changes)


def holding(wrong: float) -> Tensor:
    """Gates of which one is another."""
    log_forget = -torch.rand(2, 2, 5, generator=torch.Generator().manual_seed(0))
    log_forget[1, 0, 3] = wrong
    return log_forget


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "a list": (lambda: refused([0.0]), TypeError, "log_forget must be a floating tensor.*got list"),
    "integers": (lambda: refused(torch.zeros(2, 2, 5).int()), TypeError, "log_forget must be a floating.*int32"),
    "two dimensions": (lambda: refused(torch.zeros(2, 5)), ValueError, r"log_forget must be \(B or 1, Hkv, L\)"),
    "other input gates": (lambda: refused(log_input=torch.zeros(2, 2, 4)), ValueError, "log_input must be .*the same"),
    "other tokens": (lambda: refused(torch.zeros(2, 2, 4)), ValueError, r"got \(2, 2, 4\) for keys of \(2, 2, 5\)"),
    "fewer queries": (
        lambda: refused(q=tokens(2, 4, 3, 8)),
        ValueError,
        "queries stand beside keys, got 3 for 5",
    ),
    "of query heads": (lambda: refused(torch.zeros(2, 4, 5)), ValueError, r"got \(2, 4, 5\) for keys of \(2, 2, 5\)"),
    "another batch": (lambda: refused(torch.zeros(3, 2, 5)), ValueError, r"got \(3, 2, 5\) for keys of \(2, 2, 5\)"),
    "another mask": (lambda: refused(key_mask=torch.ones(2, 4) > 0), ValueError, r"must be \(B, L\) for gates"),
    "a mask of one row": (
        lambda: refused(key_mask=torch.ones(5, dtype=torch.bool)),
        ValueError,
        r"key_mask must be \(B, L\) for gates",
    ),
    "one that is no number": (lambda: refused(holding(math.nan)), ValueError, "log_forget must be .* below infinity"),
    "an infinite one": (lambda: refused(holding(math.inf)), ValueError, "log_forget must be .* below infinity"),
    "no input gate": (lambda: refused(log_input=holding(math.nan)), ValueError, "log_input must be .* below infinity"),
    "gates alone": (lambda: gate_bias(torch.zeros(2, 2, 5)), TypeError, "gates must be Gates, got Tensor"),
    "another state": (lambda: refused(state=torch.zeros(2)), TypeError, "state must be a linattn.State or None"),
    "a mask of integers": (lambda: refused(key_mask=torch.ones(2, 5)), TypeError, "key_mask must be a bool tensor"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_words(name: str) -> None:
    call, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=message):
        call()
