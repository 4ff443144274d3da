"""The future cannot be seen, and the past can."""

from __future__ import annotations

import pytest
import torch

import linattn
from grid import BACKENDS, CAUSAL_MAPS, NONNEGATIVE_MAPS, Case, build, qkv, relative_error, tokens
from linattn.attention.backends.blocked import causal, jumps

CAUSAL_CASES = tuple(Case(name, backend, True) for name in CAUSAL_MAPS for backend in BACKENDS)
LENGTH, CUT = 50, 31
ATTACKS = {
    "times-4": lambda x: 4 * x,
    "times-1000": lambda x: 1e3 * x,
    "random": lambda x: x.flip(-1).roll(1, 1) - 0.5,
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("case", CAUSAL_CASES, ids=str)
def test_later_tokens_do_not_reach_earlier_outputs(case: Case, attack: str, blocks_of) -> None:
    blocks_of(16)
    feature_map, tokens = case.build(), qkv(num_queries=LENGTH, num_keys=LENGTH, dtype=torch.float32)
    changed = [torch.cat((x[:, :, :CUT], ATTACKS[attack](x[:, :, CUT:])), 2) for x in tokens]
    before, after = (case.attend(*x, feature_map)[:, :, :CUT] for x in (tokens, changed))
    # A signed map's normaliser may cross 0, which magnifies rounding, not knowledge.
    band = 1e-6 if case.map_name in NONNEGATIVE_MAPS else 1e-4
    assert relative_error(after, before) <= band


@pytest.mark.parametrize("case", CAUSAL_CASES, ids=str)
def test_later_tokens_get_no_gradient_from_earlier_outputs(case: Case, blocks_of) -> None:
    blocks_of(16)
    leaves = [x.requires_grad_() for x in qkv(num_queries=LENGTH, num_keys=LENGTH)]
    out = case.attend(*leaves, case.build())
    for grad in torch.autograd.grad(out[:, :, :CUT].square().sum(), leaves):
        assert (grad[:, :, CUT:] == 0).all()


@pytest.mark.parametrize("name", CAUSAL_MAPS)
def test_steps_are_bitwise_causal(name: str) -> None:
    feature_map, tokens = build(name), qkv(num_queries=8, num_keys=8, dtype=torch.float32)

    def steps(tokens: list[torch.Tensor]) -> torch.Tensor:
        state, outs = None, []
        for t in range(8):
            step = (x[:, :, t : t + 1] for x in tokens)
            out, state = linattn.linear_attention_with_state(*step, feature_map, state, enable_gqa=True)
            outs.append(out)
        return torch.cat(outs, 2)

    changed = [torch.cat((x[:, :, :5], 1e3 * x[:, :, 5:]), 2) for x in tokens]
    assert torch.equal(steps(changed)[:, :, :5], steps(tokens)[:, :, :5])


class Shifted(linattn.feature_maps.FeatureMap):
    """Exponents are the inputs themselves."""

    exponential = True

    def query(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def kernel(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.exp(q) @ torch.exp(k).mT


class ShiftedApart(Shifted):
    """Keys have exponents of their own."""

    def key(self, x: torch.Tensor) -> torch.Tensor:
        return x - 0.5


@pytest.mark.parametrize("length", [1, 2, LENGTH])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [Shifted, ShiftedApart])
def test_a_map_that_gives_its_input_has_it_left_alone(kind: type[Shifted], backend: str, length: int) -> None:
    feature_map, given = kind(8, 8), qkv(2, 2, 2, length, length)
    before = [x.clone() for x in given]
    state = linattn.linear_attention_with_state(*given, feature_map, backend=backend).state
    linattn.linear_attention_with_state(*given, feature_map, state, backend=backend)
    for is_causal in (False, True):
        linattn.linear_attention(*given, feature_map, is_causal=is_causal, backend=backend)
    state.absorb(feature_map, *given[1:]).read(feature_map, given[0])
    for x, was in zip(given, before, strict=True):
        assert torch.equal(x, was)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", [0, -120])
@pytest.mark.parametrize(("jump", "position"), [(120, 1), (120, 20), (120, 49), (28, 20), (33, 20)])
def test_a_key_far_above_its_block_drowns_nobody(backend: str, level: int, jump: int, position: int) -> None:
    """One key far above all others, within one block: earlier rows keep their digits and gradients."""
    feature_map = Shifted(8, 8)
    query, key, value = qkv(1, 2, 2, LENGTH, LENGTH)
    key += level
    key[:, :, position] += jump
    results = []
    for dtype, chosen in ((torch.float64, "reference"), (torch.float32, backend)):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = linattn.linear_attention(*leaves, feature_map, is_causal=True, backend=chosen)
        results.append((out, *torch.autograd.grad(out[:, :, :position].square().sum(), leaves)))
    for truth, found in zip(*results, strict=True):
        assert found.isfinite().all()
        # Exponents near 120 are rounded to 120 · 2^-24 = 7e-6, relative to weights and gradients of order 1.
        torch.testing.assert_close(found.double(), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_heads_whose_maximum_jumps_are_cut_alone(groups: int, monkeypatch: pytest.MonkeyPatch, blocks_of) -> None:
    """Of 2 texts of 3 heads one jumps in each of two blocks, and all in a third: others pay for none of it."""
    blocks_of(16)
    feature_map, (query, key, value) = Shifted(8, 8), qkv(2, 3 * groups, 3, LENGTH, LENGTH)
    key[0, 1, 5] += 120
    key[1, 2, 20] += 120
    key[:, :, 40] += 300
    cut, split = [], jumps.split
    monkeypatch.setattr(causal, "split", lambda heads, *given: cut.append(heads.tolist()) or split(heads, *given))
    results = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "blocked")):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = linattn.linear_attention(*leaves, feature_map, is_causal=True, enable_gqa=True, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    # Forward, and back from the last block to the first.
    assert cut == [[1], [5], list(range(6)), list(range(6)), [5], [1]]
    for truth, found in zip(*results, strict=True):
        # Exponents near 300 are rounded to 300 · 2^-24 = 2e-5.
        torch.testing.assert_close(found.double(), truth, rtol=1e-4, atol=1e-4)


def test_rounded_outputs_are_computed_anew_in_heads_that_are_cut(blocks_of) -> None:
    """Beside one that is not: of bfloat16 tokens no output is kept that gradients could be taken of."""
    blocks_of(16)
    tokens = [x.bfloat16() for x in qkv(1, 2, 2, LENGTH, LENGTH)]
    tokens[1][:, 1, 20] += 120
    results = []
    for dtype, backend in ((torch.float64, "reference"), (torch.bfloat16, "blocked")):
        leaves = [x.to(dtype).requires_grad_() for x in tokens]
        out = linattn.linear_attention(*leaves, Shifted(8, 8), is_causal=True, backend=backend)
        results.append(torch.autograd.grad(out[:, :, 16:20].sum(), leaves))
    for truth, found in zip(*results, strict=True):
        # Results are rounded to bfloat16 once.
        assert relative_error(found, truth) < 0.01


@pytest.mark.parametrize("position", [1, 20, 49])
@pytest.mark.parametrize("jump", [59.0, 59.9, 61.0, 75.0, 80.0, 83.9, 86.0])
def test_jumps_around_the_limit_of_float32_keep_gradients_scaled_for_half_precision(jump: float, position: int) -> None:
    """A row's denominator of exp(-jump) divides a gradient of 2^16: beyond exp(-77) that is no float32 any more."""
    query, key, value = qkv(1, 2, 2, LENGTH, LENGTH)
    key = 0.1 * key
    key[:, :, position] += jump
    upstream = 2.0**16 * tokens(*value.shape, seed=3)[:, :, :position]
    results = []
    for dtype, backend in ((torch.float64, "reference"), (torch.float32, "blocked")):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = linattn.linear_attention(*leaves, Shifted(8, 8), is_causal=True, backend=backend)
        results.append((out, *torch.autograd.grad(out[:, :, :position], leaves, upstream.to(dtype))))
    sizes = (1.0, *[float(upstream.abs().max())] * 3)
    for truth, found, size in zip(*results, sizes, strict=True):
        assert found.isfinite().all()
        # Exponents near the jump are rounded to jump · 2^-24 ≤ 6e-6, as above, relative to the largest gradients.
        torch.testing.assert_close(found.double() / size, truth / size, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("limit", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("name", ["FavorPlus", "Trigonometric", "Centred-Taylor"])
def test_a_lower_limit_of_jumps_costs_time_and_nothing_else(
    name: str, limit: float, monkeypatch: pytest.MonkeyPatch, blocks_of
) -> None:
    blocks_of(16)
    feature_map, results = build(name), []
    inputs = qkv(num_queries=LENGTH, num_keys=LENGTH, scale=2.0)
    mask = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.3
    for chosen in (causal._MAX_JUMP, limit):
        monkeypatch.setattr(causal, "_MAX_JUMP", chosen)
        leaves = [x.requires_grad_() for x in inputs]
        out = linattn.linear_attention(*leaves, feature_map, key_mask=mask, is_causal=True, enable_gqa=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for truth, found in zip(*results, strict=True):
        assert relative_error(found, truth) <= (1e-12 if name in NONNEGATIVE_MAPS else 1e-8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [1, 5])
def test_rows_that_see_the_state_alone_are_not_drowned(backend: str, masked: int) -> None:
    """A block that begins with masked tokens: their rows read the state, far below the block's first live key."""
    feature_map = Shifted(8, 8)
    query, key, value = qkv(1, 2, 2, 20, 20)
    key[:, :, 8 + masked] += 120
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[:, 8 : 8 + masked] = False
    results = []
    for dtype, chosen in ((torch.float64, "reference"), (torch.float32, backend)):
        tokens = [x.to(dtype) for x in (query, key, value)]
        state = linattn.linear_attention_with_state(*(x[:, :, :8] for x in tokens), feature_map).state
        leaves = [x[:, :, 8:].requires_grad_() for x in tokens]
        options = {"key_mask": mask[:, 8:], "backend": chosen}
        out = linattn.linear_attention_with_state(*leaves, feature_map, state, **options).out
        results.append((out, *torch.autograd.grad(out[:, :, :masked].square().sum(), leaves)))
    for truth, found in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("jump", [50.0, 120.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_earlier_blocks_alone_are_not_drowned(backend: str, jump: float, blocks_of) -> None:
    """The same within one call, in both passes."""
    blocks_of(4)
    query, key, value = qkv(1, 2, 2, 12, 12)
    key[:, :, 6] += jump
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 4:6] = False
    results = []
    for dtype, chosen in ((torch.float64, "reference"), (torch.float32, backend)):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = linattn.linear_attention(*leaves, Shifted(8, 8), key_mask=mask, is_causal=True, backend=chosen)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for truth, found in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", CAUSAL_CASES, ids=str)
def test_tokens_mix(case: Case) -> None:
    """Changing v_0 changes later outputs, through attention and not through its own position alone."""
    query, key, value = qkv(num_queries=12, num_keys=12)
    other = value.clone()
    other[:, :, 0] += 1
    difference = case.attend(query, key, other, case.build()) - case.attend(query, key, value, case.build())
    assert (difference[:, :, 1:].abs().amax((0, 1, 3)) > 1e-6).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_unequal_lengths_align_at_the_end(backend: str) -> None:
    feature_map = build("FavorPlus")
    query, key, value = qkv(num_queries=20, num_keys=20)
    options = {"is_causal": True, "enable_gqa": True, "backend": backend}
    whole = linattn.linear_attention(query, key, value, feature_map, **options)
    last = linattn.linear_attention(query[:, :, 13:], key, value, feature_map, **options)
    torch.testing.assert_close(last, whole[:, :, 13:], rtol=1e-12, atol=1e-12)
    first = linattn.linear_attention(query, key[:, :, :6], value[:, :, :6], feature_map, **options)
    assert (first[:, :, :14] == 0).all()
