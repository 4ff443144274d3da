"""The planner's choices, what a plan computes, and its file."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import linattn
from linattn.planning import CANDIDATES, HeadPlan, Plan, paying, read_plans, write_plans
from linattn.planning import plan as plan_by_time
from linattn.planning.costs import exact_flops_per_token, exact_state_numbers, flops_per_token, state_numbers
from linattn.planning.measures import relative_error, uniform_average
from linattn.planning.methods import parse_method

# Most plans here are to be the same on every machine.
plan = partial(plan_by_time, even_if_slower=True)
LENGTH, D = 256, 8
TARGET = 0.1


def easy_and_sharp(seed=0):
    """Two heads: queries that are all nearly one, and queries that each find a key of their own, far away."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    easy_query = normal(1, 1, 1, D) + 0.01 * normal(1, 1, LENGTH, D)
    keys = torch.nn.functional.normalize(normal(1, 1, LENGTH, D), dim=-1)
    order = torch.randperm(LENGTH, generator=generator)
    query = torch.cat((easy_query, 60 * keys[:, :, order]), 1)
    key = torch.cat((normal(1, 1, LENGTH, D), keys), 1)
    return query, key, normal(1, 2, LENGTH, D)


@pytest.fixture(scope="module")
def made():
    query, key, value = easy_and_sharp()
    return plan(query, key, value, target_error=TARGET, scale=1.0, num_tokens=4096)


def test_an_easy_head_is_cheap_and_a_sharp_one_exact(made):
    easy, sharp = made.heads
    assert easy.method == "Expansion(num_centres=1)"
    assert 0 < easy.expected_error <= 0.9 * TARGET
    assert sharp == HeadPlan("exact", 0.0, None, sharp.uniform_error, 4096 * 2 * D, 4 * 4096 * D)
    assert easy.flops_per_token < sharp.flops_per_token
    assert sharp.uniform_error > 0.5


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_cheaper_candidate_meets_the_target(is_causal):
    query, key, value = (torch.randn(1, 2, 64, D) for _ in range(3))
    labels = [f"Expansion(num_centres={count})" for count in (1, 2, 4, 8)]
    options = {"scale": 0.7, "is_causal": is_causal, "num_tokens": 10**6}
    ladder = [plan(query, key, value, target_error=1e9, candidates=[label], **options) for label in labels]
    target = ladder[2].heads[0].expected_error / 0.9 * 1.0001
    chosen = plan(query, key, value, target_error=target, candidates=labels[::-1], **options)
    for head in range(2):
        errors = [one.heads[head].expected_error for one in ladder]
        expected = next((label for label, error in zip(labels, errors, strict=True) if error <= 0.9 * target), "exact")
        assert chosen.heads[head].method == expected


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_tenth_of_the_target_is_kept_in_reserve(is_causal):
    """A method is chosen up to the error of 0.9 of the target, and not beyond."""
    query, key, value = (torch.randn(1, 1, 64, D) for _ in range(3))
    label = "Expansion(num_centres=4)"
    options = {"candidates": [label], "is_causal": is_causal, "num_tokens": 10**6}
    error = plan(query, key, value, target_error=1e9, **options).heads[0].expected_error
    assert error > 0
    for share, method in ((0.9 - 1e-6, label), (0.9 + 1e-6, "exact")):
        assert plan(query, key, value, target_error=error / share, **options).heads[0].method == method


def test_the_expected_error_is_that_of_the_sampled_rows():
    query, key, value = (torch.randn(2, 2, 48, D) for _ in range(3))
    label = "Expansion(num_centres=4) + window 8"
    made = plan(query, key, value, target_error=1e9, scale=0.7, candidates=[label], num_tokens=10**6)
    exact = linattn.softmax_attention(query.double(), key.double(), value.double(), scale=0.7)
    # Fewer rows than would be sampled: all of them.
    errors = relative_error(made.attend(query, key, value), exact)
    assert [head.expected_error for head in made.heads] == pytest.approx(errors.tolist(), rel=1e-6)
    uniform = relative_error(uniform_average(value, num_heads=2, num_queries=48), exact)
    assert [head.uniform_error for head in made.heads] == pytest.approx(uniform.tolist(), rel=1e-6)
    higher = parse_method("Expansion(num_centres=4, order=2) + window 8")
    feature_map = higher.build(D, num_features=None, scale=0.7, seed=0)
    above = higher.attend(feature_map, query, key, value, is_causal=False)
    found = relative_error(made.attend(query, key, value), above)
    assert [head.next_order_error for head in made.heads] == pytest.approx(found.tolist(), rel=1e-5)


def test_a_causal_map_never_learns_from_measured_queries():
    query, key, value = (torch.randn(1, 2, 64, D) for _ in range(3))
    options = {"target_error": 1e9, "is_causal": True, "candidates": ["Expansion(num_centres=4)"], "num_tokens": 10**6}
    fitted = []
    for _ in range(2):
        made = plan(query, key, value, **options)
        fitted.append(made.fitted["Expansion(num_centres=4)"])
        # Other tokens from the middle on, where the measured rows are.
        query, key = (torch.cat((x[:, :, :32], torch.randn(1, 2, 32, D)), 2) for x in (query, key))
    assert fitted[0]["centres"].shape == (2, 4, D)
    for name in ("centres", "probes", "key_mean"):
        assert torch.equal(fitted[0][name], fitted[1][name])
    second = linattn.softmax_attention(query.double(), key.double(), value.double(), is_causal=True)[:, :, 32:]
    made = plan(query, key, value, **options)
    errors = relative_error(made.attend(query, key, value)[:, :, 32:], second)
    assert [head.expected_error for head in made.heads] == pytest.approx(errors.tolist(), rel=1e-6)


def test_fixed_maps_never_learn_from_measured_queries_nor_from_a_call():
    query, key, value = (torch.randn(1, 2, 64, D) for _ in range(3))
    label = "Expansion(num_centres=4)"
    options = {"target_error": 1e9, "candidates": [label], "num_tokens": 10**6}
    made = plan(query, key, value, fixed_maps=True, **options)
    assert made.fitted[label]["centres"].shape == (2, 4, D)
    exact = linattn.softmax_attention(query.double(), key.double(), value.double())[:, :, 1::2]
    errors = relative_error(made.attend(query, key, value)[:, :, 1::2], exact)
    assert [head.expected_error for head in made.heads] == pytest.approx(errors.tolist(), rel=1e-6)
    half = plan(query, key, value, **options).fit(query[:, :, ::2], key[:, :, ::2])
    assert torch.equal(half.attend(query, key, value), made.attend(query, key, value))
    assert not plan(query, key, value, **options).fitted
    with pytest.raises(ValueError, match="fixed maps wants at least 2 tokens, one half to fit on, got 1"):
        plan(query[:, :, :1], key[:, :, :1], value[:, :, :1], fixed_maps=True, **options)


def test_a_fitted_plan_is_its_maps_fitted_by_group():
    query, key, value = torch.randn(2, 4, 32, D), torch.randn(2, 2, 32, D), torch.randn(2, 2, 32, D)
    label = "Expansion(num_centres=2)"
    heads = tuple(HeadPlan(name, 0.0, None, 1.0, 1, 1) for name in ("exact", label, "FavorPlus(num_features=8)", label))
    made = Plan(heads, D, D, 0.3, False, 32).fit(query, key)
    wanted = parse_method(label).build(D, num_features=None, scale=0.3, seed=0)
    wanted.fit(query[:, [1, 3]], key[:, [0, 1]])
    assert torch.equal(made.fitted[label]["centres"], wanted.centres)
    out = linattn.linear_attention(query[:, [1, 3]], key[:, [0, 1]], value[:, [0, 1]], wanted)
    assert torch.equal(made.attend(query, key, value)[:, [1, 3]], out)
    assert made.summary == f"4 heads: 1 exact, 2 {label}, 1 FavorPlus(num_features=8)"
    with pytest.raises(ValueError, match="the plan is for 4 query heads of width 8"):
        made.fit(query[:, :3], key)


def test_exact_where_it_takes_fewer_operations():
    query, key, value = easy_and_sharp()
    short = plan(query[:, :, :8], key[:, :, :8], value[:, :, :8], target_error=10.0)
    assert [head.method for head in short.heads] == ["exact", "exact"]
    long = plan(query[:, :, :8], key[:, :, :8], value[:, :, :8], target_error=10.0, num_tokens=1000)
    assert [head.method for head in long.heads] == ["Expansion(num_centres=1)"] * 2


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_takes_fewer_operations_keeps_fewer_numbers(is_causal):
    """So that no plan's method is larger than a head's own keys and values."""
    for label in CANDIDATES:
        method = parse_method(label)
        feature_map = method.build(D, num_features=None, scale=1.0, seed=0)
        flops = flops_per_token(method, feature_map, value_dim=D, is_causal=is_causal)
        numbers = state_numbers(method, feature_map, value_dim=D, is_causal=is_causal)
        # The shortest text at which exact attention takes more.
        length = flops // (2 * D if is_causal else 4 * D) + 1
        assert exact_flops_per_token(length, head_dim=D, value_dim=D, is_causal=is_causal) >= flops
        assert numbers <= exact_state_numbers(length, head_dim=D, value_dim=D), label


@pytest.mark.parametrize(
    ("num_keys", "is_causal", "linear", "options", "method"),
    [
        (1, True, 2.0, {}, "exact"),
        (1, True, 2.0, {"even_if_slower": True}, "Expansion(num_centres=4)"),
        (1, True, 0.5, {}, "Expansion(num_centres=4)"),
        (8, True, 2.0, {}, "Expansion(num_centres=4)"),
        (8, False, 2.0, {}, "exact"),
        (8, False, 2.0, {"even_if_slower": True}, "Expansion(num_centres=4)"),
        (8, False, 0.5, {}, "Expansion(num_centres=4)"),
        # Twice the tokens are four times softmax's time: 2 · 2 beside 4 at twice the 4,096 that are timed.
        (8, False, 1.9, {"num_tokens": 8192}, "Expansion(num_centres=4)"),
        (8, False, 2.1, {"num_tokens": 8192}, "exact"),
    ],
)
def test_nothing_is_chosen_that_saves_nothing(monkeypatch, num_keys, is_causal, linear, options, method):
    """Eight heads with states of their own beside a cache of one or eight; a text's encoder keeps no state."""
    timed = []

    def seconds(contenders, *, repeats):
        """A machine on which linear attention takes so many times as long as exact attention."""
        for name, time in (("linear", linear), ("exact", 1.0)):
            contenders[name]()
            timed.append(name)
            yield name, [time] * repeats

    monkeypatch.setattr(paying, "seconds", lambda contenders, *, repeats: dict(seconds(contenders, repeats=repeats)))
    query = torch.zeros(1, 8, 128, D)
    key, value = torch.randn(1, num_keys, 128, D), torch.randn(1, num_keys, 128, D)
    options = {"candidates": ["Expansion(num_centres=4)"], "is_causal": is_causal, **options}
    made = plan_by_time(query, key, value, target_error=1e9, **options)
    # 4·9 features of 9 numbers and their maxima: 360, of 128·16 for one head and 256 for an eighth of one.
    assert {head.method for head in made.heads} == {method}
    is_timed = (num_keys == 1 or not is_causal) and "even_if_slower" not in options
    assert timed == (["linear", "exact"] if is_timed else [])


def test_the_best_within_a_number_of_features():
    query, key, value = easy_and_sharp()
    options = {"scale": 1.0, "num_tokens": 10**6}
    made = plan(query, key, value, max_features=4 * (1 + D), **options)
    assert made.max_features == 36
    for head in range(2):
        errors = {
            label: plan(query, key, value, target_error=1e9, candidates=[label], **options).heads[head].expected_error
            for label in CANDIDATES
            if any(name in label for name in ("=1)", "=4)"))
        }
        assert made.heads[head].method == min(errors, key=errors.get)
    assert plan(query, key, value, max_features=2, **options).heads[0].method == "exact"


@pytest.mark.parametrize("is_causal", [False, True])
def test_each_head_runs_its_own_method_under_grouped_queries(is_causal):
    query, key, value = torch.randn(2, 4, 32, D), torch.randn(2, 2, 32, D), torch.randn(2, 2, 32, 5)
    labels = ["FavorPlus(num_features=8)", "exact", "FavorPlus(num_features=8)", "EluPlusOne"]
    heads = tuple(HeadPlan(label, 0.0, None, 1.0, 1, 1) for label in labels)
    mask = torch.ones(2, 32, dtype=torch.bool)
    mask[1, 20:] = False
    out = Plan(heads, D, 5, 0.3, is_causal, 32).attend(query, key, value, key_mask=mask)
    for head, label in enumerate(labels):
        q, k, v = query[:, head : head + 1], key[:, head // 2 : head // 2 + 1], value[:, head // 2 : head // 2 + 1]
        if label == "exact":
            expected = linattn.softmax_attention(q, k, v, key_mask=mask, is_causal=is_causal, scale=0.3)
        else:
            feature_map = parse_method(label).build(D, num_features=None, scale=0.3, seed=0)
            expected = linattn.linear_attention(q, k, v, feature_map, key_mask=mask, is_causal=is_causal)
        torch.testing.assert_close(out[:, head : head + 1], expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_plan_survives_its_file(tmp_path, is_causal):
    query, key, value = (torch.randn(1, 2, 64, D) for _ in range(3))
    made = plan(query, key, value, target_error=0.2, is_causal=is_causal, num_tokens=10**6)
    assert any(head.method != "exact" for head in made.heads)
    assert bool(made.fitted) == is_causal
    path = tmp_path / "new" / "plan.json"
    made.to_json(path)
    read = Plan.from_json(path)
    assert read.heads == made.heads
    assert (read.target_error, read.num_tokens, read.scale, read.is_causal) == (0.2, 10**6, D**-0.5, is_causal)
    assert torch.equal(read.attend(query, key, value), made.attend(query, key, value))
    assert [name.name for name in path.parent.iterdir()] == ["plan.json"]


def test_plans_of_several_layers(tmp_path, made):
    path = tmp_path / "plan.json"
    write_plans(path, [made, made])
    assert [one.heads for one in read_plans(path)] == [made.heads, made.heads]
    with pytest.raises(ValueError, match="holds the plans of 2 layers, wanted one"):
        Plan.from_json(path)


def test_a_failed_write_leaves_what_was_there(tmp_path, made):
    path = tmp_path / "plan.json"
    made.to_json(path)
    before = path.read_bytes()
    broken = HeadPlan("exact", math.nan, None, 0.0, 1, 1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        Plan((broken,), D, D, 1.0, False, 8).to_json(path)
    assert path.read_bytes() == before
    assert [name.name for name in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "give one of target_error and max_features, got None and None"),
        ({"target_error": 0.1, "max_features": 3}, "give one of target_error and max_features"),
        ({"target_error": 0.0}, "target_error must be positive and finite, got 0.0"),
        ({"target_error": math.nan}, "target_error must be positive and finite, got nan"),
        ({"target_error": math.inf}, "target_error must be positive and finite, got inf"),
        ({"max_features": -1}, "max_features must be positive"),
        ({"target_error": 0.1, "candidates": ["FavorPlus"]}, "leaves its width open; write num_features="),
        ({"target_error": 0.1, "candidates": ["Performer"]}, "there is no feature map"),
    ],
)
def test_refusals(options, words):
    x = torch.randn(1, 2, 8, D)
    with pytest.raises(ValueError, match=words):
        plan(x, x, x, **options)


def test_refused_tensors(made):
    x = torch.randn(1, 2, 8, D)
    for q, k, v in ((x[0], x, x), (x, x[:, :, :4], x), (x, torch.randn(1, 3, 8, D), torch.randn(1, 3, 8, D))):
        with pytest.raises(ValueError, match="calibration wants self-attention's query"):
            plan(q, k, v, target_error=0.1)
    with pytest.raises(ValueError, match="holds nan or inf"):
        plan(x, x * math.nan, x, target_error=0.1)
    with pytest.raises(ValueError, match="at least 2 tokens, one half to fit on, got 1"):
        plan(x[:, :, :1], x[:, :, :1], x[:, :, :1], target_error=0.1, is_causal=True)
    for q in (x[0], x[..., :3], torch.randn(1, 3, 8, D)):
        with pytest.raises(ValueError, match="the plan is for 2 query heads of width 8"):
            made.attend(q, x, x)
