"""The benchmark measures what it says: verified results, honest errors, both contenders in turn."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import ANY

import pytest
import torch

from linattn.attention import linear_attention
from linattn.feature_maps import features
from linattn.methods.method import parse_method
from linattn_lab import built_methods
from linattn_lab.bench import measuring, memory
from linattn_lab.bench.contenders import draw_inputs, exact_run, fitted_method, linear_run
from linattn_lab.bench.errors import verify
from linattn_lab.bench.measuring import Bench
from linattn_lab.bench.settings import Settings

SMALL = Settings(lengths=(16, 40), heads=2, head_dim=8, features=16, repeats=3, memory=False)


def silent(words):
    """Announces nothing."""


@pytest.mark.parametrize("map_", ["FavorPlus", "Oprf", "Centred(FavorPlus)", "RandomRelu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_are_complete_and_verified(map_, dtype, is_causal):
    settings = replace(SMALL, map=map_, dtype=dtype, is_causal=is_causal, backward=True)
    bench = Bench(settings)
    rows = list(bench.rows([], silent))
    assert [row.length for row in rows] == bench.header.lengths == [16, 40]
    for row in rows:
        assert 0 < row.error <= bench.header.error_bound
        assert 0 < row.gradient_error <= bench.header.error_bound
        assert len(row.linear_seconds) == len(row.exact_seconds) == 3
        assert row.exact_predicted is None
        assert (row.linear_memory, row.exact_memory) == (None, None)


def test_stages_that_are_left_out_are_not_announced():
    stages: list[str] = []
    list(Bench(replace(SMALL, memory=False)).rows([], stages.append))
    assert any(stage.endswith(": timing") for stage in stages)
    assert not any(stage.endswith(": memory") for stage in stages)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("method", "features"),
    [
        ("FavorPlus + window 4", 16),
        ("merged 8 + WINDOW 4", None),
        ("Expansion(num_centres=2) + window 4", None),
    ],
)
def test_methods_with_an_exact_part_are_verified_too(method, features, is_causal):
    """Their own definition follows the same keys; what they lose against exact attention is less than the map's."""
    settings = replace(SMALL, map=method, features=features, is_causal=is_causal, backward=True)
    bench = Bench(settings)
    rows = list(bench.rows([], silent))
    assert (bench.header.map, bench.header.num_features) == (parse_method(method).label, features or ANY)
    bound = bench.header.error_bound or 1e-4
    for row in rows:
        assert 0 < row.error <= bound
        assert 0 < row.gradient_error <= bound
    alone = next(Bench(replace(SMALL, is_causal=is_causal)).rows([], silent))
    assert rows[0].approximation_error < alone.approximation_error


def test_all_keys_merged_into_themselves_are_exact_attention():
    settings = replace(SMALL, map="merged 64", features=None, dtype="float32")
    for row in Bench(settings).rows([], silent):
        assert row.approximation_error < 1e-6 < 1e-2 < row.uniform_error


@pytest.mark.parametrize(
    ("map_", "is_causal", "numbers"),
    # R·(D + 2); twice the window's keys and values beside it; N·(D + D + 1), causally 16 queries.
    [
        ("FavorPlus", False, 16 * 10),
        ("FavorPlus + window 4", True, 16 * 10 + 8 * 16),
        ("merged 8", False, 8 * 17),
        ("merged 8 + window 4", True, 8 * 17 + 8 * 16 + 16 * 8),
    ],
)
def test_the_header_counts_what_a_head_keeps(map_, is_causal, numbers):
    features = 16 if "Favor" in map_ else None
    settings = replace(SMALL, map=map_, features=features, is_causal=is_causal)
    assert Bench(settings).header.state_numbers == numbers


def test_the_header_records_the_circumstances():
    settings = replace(SMALL, map="centred(Taylor(order=1))", features=None, batch=3, seed=5, is_causal=True)
    header = Bench(settings, exact_limit=7.0).header
    assert set(header.versions) == {"python", "torch", "linattn", "linattn-compiled"}
    assert header.threads == torch.get_num_threads()
    assert (header.device, header.dtype, header.batch, header.num_heads, header.head_dim) == ("cpu", "float32", 3, 2, 8)
    assert (header.map, header.num_features, header.error_bound) == ("Centred(Taylor(order=1))", 9, None)
    assert header.map_repr.startswith("Centred(")
    assert (header.is_causal, header.backward, header.repeats, header.seed) == (True, False, 3, 5)
    assert (header.exact_limit, header.memory) == (7.0, "not measured, as asked for")
    assert header.processor
    assert header.device_name == header.processor


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_", ["FavorPlus(scale=0.1)", "EluPlusOne"])
def test_errors_are_those_of_the_quadratic_definition(map_, is_causal):
    settings = replace(SMALL, map=map_, features=None, is_causal=is_causal, batch=2, heads=3)
    inputs = draw_inputs(settings, 512)
    built = fitted_method(settings, inputs)
    errors = verify(settings, inputs)
    q, k, v = (x[:1, :2].double() for x in inputs.tokens)
    hidden = torch.ones(512, 512, dtype=torch.bool).triu(1) & is_causal
    scale = 0.1 if "scale" in map_ else 8**-0.5
    exact = (scale * q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1) @ v
    uniform = torch.zeros(512, 512, dtype=torch.float64).masked_fill(hidden, -math.inf).softmax(-1) @ v
    phi_q, phi_k = (features(built.feature_map, x, side) for x, side in ((q, "query"), (k, "key")))
    kernel = (phi_q @ phi_k.mT).masked_fill(hidden, 0.0)
    linear = kernel / kernel.sum(-1, keepdim=True) @ v

    def mean_error(out):
        per_head = (out - exact).square().sum((0, 2, 3)) / exact.square().sum((0, 2, 3))
        return float(per_head.sqrt().mean())

    assert errors.approximation_error == pytest.approx(mean_error(linear), rel=1e-5)
    assert errors.uniform_error == pytest.approx(mean_error(uniform), rel=1e-9)
    assert errors.gradient_error is None


@pytest.fixture
def spoiled(monkeypatch):
    """A function that lets the fast way, not the definition, return something else."""

    def with_change(change):
        def attend(query, *rest, backend, **options):
            out = linear_attention(query, *rest, backend=backend, **options)
            return out if backend == "reference" else change(out, query)

        monkeypatch.setattr(built_methods, "linear_attention", attend)

    return with_change


def test_a_wrong_output_is_not_timed(spoiled, monkeypatch):
    spoiled(lambda out, query: out * (1 + 2e-4))
    monkeypatch.setattr(measuring, "seconds", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(ValueError, match=r"output of FavorPlus in float32 differ .* by 2\.\d\de-04, more than"):
        next(Bench(SMALL).rows([], silent))


def test_what_is_wrong_beyond_a_block_is_not_timed(spoiled):
    """The fast way takes 1,024 tokens at once at most: what it does between two of them is verified too."""
    spoiled(lambda out, query: torch.cat((out[:, :, :1024], out[:, :, 1024:] * 1.01), 2))
    with pytest.raises(ValueError, match="the output of FavorPlus in float32 differ"):
        next(Bench(replace(SMALL, lengths=(1500,))).rows([], silent))


def test_a_wrong_gradient_is_not_timed(spoiled):
    spoiled(lambda out, query: out + 0.01 * (query - query.detach()))
    list(Bench(SMALL).rows([], silent))
    with pytest.raises(ValueError, match="the gradients of FavorPlus in float32 differ"):
        next(Bench(replace(SMALL, backward=True)).rows([], silent))


def test_a_result_that_is_not_a_number_is_not_timed(spoiled):
    spoiled(lambda out, query: out * math.nan)
    with pytest.raises(ValueError, match="by inf, more than"):
        next(Bench(SMALL).rows([], silent))


def test_signed_maps_have_their_error_recorded_and_no_bound(spoiled):
    spoiled(lambda out, query: 3 * out)
    bench = Bench(replace(SMALL, map="Trigonometric"))
    assert bench.header.error_bound is None
    assert next(bench.rows([], silent)).error == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("method", ["window 4 + merged 8 in 4 bits", "window 4 + merged 8 + 6 in 3 bits"])
def test_causal_keys_in_few_bits_are_timed(method):
    """What is rounded depends on the bytes of the dtype: float64 is no definition of it."""
    bench = Bench(replace(SMALL, map=method, features=None, is_causal=True))
    assert bench.header.error_bound is None
    assert [len(row.linear_seconds) for row in bench.rows([], silent)] == [3, 3]
    assert Bench(replace(SMALL, map="window 4 + merged 8 in 4 bits", features=None)).header.error_bound == 1e-4


def test_both_contenders_answer_the_same_question():
    """At one token both are that token's value, and every gradient but the value's is 0."""
    settings = replace(SMALL, backward=True)
    inputs = draw_inputs(settings, 1)
    built = fitted_method(settings, inputs)
    for run in (linear_run(settings, inputs, built), exact_run(settings, inputs, built)):
        out, d_query, d_key, d_value = run()
        torch.testing.assert_close(out, inputs.tokens[2])
        torch.testing.assert_close(d_value, inputs.upstream)
        assert d_query.norm() + d_key.norm() < 1e-5


def test_inputs_are_drawn_from_the_seed_alone():
    first, again, other = (draw_inputs(replace(SMALL, seed=seed), 24) for seed in (0, 0, 1))
    half = draw_inputs(replace(SMALL, dtype="bfloat16"), 24)
    for one, same, different, rounded in zip(first.tokens, again.tokens, other.tokens, half.tokens, strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, different)
        assert torch.equal(one.bfloat16(), rounded)
    assert first.upstream is None


def grown(monkeypatch, exact_of):
    """Let exact attention take a known time; returns what was timed, length by length."""
    timed = []

    def seconds(runs, *, repeats):
        length = runs["linear"]()[0].shape[2]
        timed.append((length, list(runs)))
        return {name: [1e-3 if name == "linear" else exact_of(length)] * repeats for name in runs}

    monkeypatch.setattr(measuring, "seconds", seconds)
    return timed


def test_exact_attention_stops_where_it_would_take_too_long(monkeypatch):
    timed = grown(monkeypatch, {16: 1.0, 32: 3.2}.__getitem__)
    settings = replace(SMALL, lengths=(16, 32, 48, 64))
    rows = list(Bench(settings, exact_limit=4.0).rows([], silent))
    both, alone = ["linear", "exact"], ["linear"]
    assert timed == [(16, both), (32, both), (48, alone), (64, alone)]
    assert [row.exact_predicted for row in rows] == [None, None, 3.2 * 1.5**2, 3.2 * 2**2]
    assert [row.exact_seconds is None for row in rows] == [False, False, True, True]
    assert all(row.linear_seconds for row in rows)


def test_kept_rows_are_not_measured_again_and_still_predict(monkeypatch):
    timed = grown(monkeypatch, lambda length: (length / 16) ** 2)
    settings = replace(SMALL, lengths=(16, 32, 64))
    bench = Bench(settings, exact_limit=5.0)
    rows = list(bench.rows([], silent))
    timed.clear()
    assert list(bench.rows(rows[:2], silent)) == rows[2:]
    assert timed == [(64, ["linear"])]


def test_a_contender_left_out_is_not_asked_for_its_memory(monkeypatch):
    grown(monkeypatch, lambda length: 1.0)
    asked = []
    monkeypatch.setattr(memory, "measure", lambda _, length, contender: asked.append((length, contender)) or 5)
    rows = list(Bench(replace(SMALL, memory=True), exact_limit=2.0).rows([], silent))
    assert asked == [(16, "linear"), (16, "exact"), (40, "linear")]
    assert [(row.linear_memory, row.exact_memory) for row in rows] == [(5, 5), (5, None)]


def test_a_system_that_does_not_tell_its_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "absent")
    bench = Bench(replace(SMALL, memory=True))
    assert bench.header.memory == "not measured on this system"
    assert next(bench.rows([], silent)).linear_memory is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": ()}, r"lengths must be different positive integers in ascending order, got \[\]"),
        ({"lengths": (0, 16)}, "lengths must be different positive integers"),
        ({"lengths": (16, 16)}, "lengths must be different positive integers"),
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16; got 'float64'"),
        ({"device": "tpu"}, "device must be one of cpu, cuda; got 'tpu'"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"map": "EluPlusOne"}, "EluPlusOne has a width of its own, got features=16; leave the features out"),
        ({"map": "Performer"}, "there is no feature map 'Performer'"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **options)


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch finds no CUDA device here; leave it out"):
        replace(SMALL, device="cuda")
