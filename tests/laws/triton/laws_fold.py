"""One fold, bracketed in any way: states cut and resumed, spans, segments side by side, exact keys beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import linattn
from grid import build, qkv, relative_error
from linattn.attention.backends import BACKENDS, Call
from linattn.attention.bound_map import BoundMap
from linattn.attention.sums import no_sums

TOLERANCE = 40 * torch.finfo().eps


def tokens(device: str, length: int = 40, *, scale: float = 0.7) -> list[Tensor]:
    """Queries, keys and values of grouped heads."""
    return [x.float().to(device) for x in qkv(1, 2, 1, length, length, scale=scale)]


@pytest.mark.parametrize("map_name", ["FavorPlus", "Relu"])
def test_a_stream_cut_anywhere_is_one_call(map_name: str, device: str) -> None:
    """Gradients go through the states, one of which another backend made."""
    results = []
    for cuts in ((40,), (17, 1, 22)):
        feature_map, state, outs = build(map_name).to(device), None, []
        leaves = [x.requires_grad_() for x in tokens(device)]
        for index, parts in enumerate(zip(*(x.split(cuts, 2) for x in leaves), strict=True)):
            backend = "blocked" if len(cuts) > 1 and index == 0 else "triton"
            found = linattn.linear_attention_with_state(*parts, feature_map, state, enable_gqa=True, backend=backend)
            outs.append(found.out)
            state = found.state
        out = torch.cat(outs, 2)
        last = state.read(feature_map, leaves[0][:, :, :3]).out
        total = (out * torch.arange(out.numel(), device=device).view(out.shape).cos()).sum() + last.sum()
        results.append((out, last, *torch.autograd.grad(total, leaves)))
    for index, (whole, cut) in enumerate(zip(*results, strict=True)):
        assert relative_error(cut, whole) < TOLERANCE, f"item {index}"


@pytest.mark.parametrize("span", [5, 16, 24])
@pytest.mark.parametrize("map_name", ["FavorPlus", "Relu"])
def test_rows_of_a_span_see_earlier_spans(map_name: str, span: int, device: str) -> None:
    results = []
    for backend, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in tokens(device)]
        feature_map = build(map_name).to(device)
        before = no_sums(feature_map, 1, 1, 5, dtype, torch.device(device))
        call = Call(BoundMap(feature_map, {}), leaves[0].unflatten(1, (1, 2)), *leaves[1:], None, is_causal=True)
        rows, after = BACKENDS[backend].attend(call, before, span=span)
        total = (rows.out * rows.out).sum() + (after.S * after.m.mean().neg().exp()).sum() * 0
        results.append((rows.out, *torch.autograd.grad(total, leaves[:2])))
    for index, (truth, found) in enumerate(zip(*results, strict=True)):
        assert relative_error(found, truth) < TOLERANCE, f"item {index}"


@pytest.mark.parametrize("is_causal", [False, True])
def test_segments_side_by_side_are_one_pass(is_causal: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from linattn_triton import segments

    feature_map, results = build("FavorPlus").to(device), []
    for programs in (1, 1000):
        monkeypatch.setattr(segments, "_PROGRAMS", programs)
        monkeypatch.setattr(segments, "_FEWEST", 1)
        # So large that the largest weight rises from group to group.
        leaves = [x.requires_grad_() for x in tokens(device, 60, scale=2.0)]
        out = linattn.linear_attention(*leaves, feature_map, is_causal=is_causal, enable_gqa=True, backend="triton")
        results.append((out, *torch.autograd.grad((out * out).sum(), leaves)))
    for index, (one, many) in enumerate(zip(*results, strict=True)):
        assert relative_error(many, one) < TOLERANCE, f"item {index}"


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_stands_beside_it(is_causal: bool, device: str) -> None:
    window, feature_map = 4, build("FavorPlus").to(device)
    outs = [
        linattn.linear_attention(
            *(x.to(dtype) for x in tokens(device, 20)),
            feature_map, is_causal=is_causal, enable_gqa=True, window=window, backend=backend,
        )
        for backend, dtype in (("reference", torch.float64), ("triton", torch.float32))
    ]  # fmt: skip
    assert relative_error(outs[1], outs[0]) < TOLERANCE


@pytest.mark.parametrize(
    ("map_name", "dtype"),
    [
        ("FavorPlus-per-head", torch.float32),
        ("FavorPlus-per-head", torch.bfloat16),
        ("Centred-FavorPlus", torch.float32),
        ("Relu", torch.bfloat16),
    ],
    ids=str,
)
def test_token_by_token_is_the_whole(map_name: str, dtype: torch.dtype, device: str) -> None:
    """Masked tokens among them, one of which holds NaN; the last states are equal too."""
    given = [x.to(device, dtype) for x in qkv(1, 4, 2, 9, 9, value_dim=37)]
    mask = torch.ones(1, 9, dtype=torch.bool, device=device)
    mask[0, 0], mask[0, 4] = False, False
    given[1][:, :, 4] = torch.nan
    feature_map, state, outs = build(map_name).to(device), None, []
    with torch.no_grad():
        whole = linattn.linear_attention_with_state(
            *given, feature_map, key_mask=mask, enable_gqa=True, backend="triton"
        )
        for i in range(9):
            token = [x[:, :, i : i + 1] for x in given]
            found = linattn.linear_attention_with_state(
                *token, feature_map, state, key_mask=mask[:, i : i + 1], enable_gqa=True, backend="triton"
            )
            state = found.state
            outs.append(found.out)
        # A whole call rounds features, weights and outputs to bfloat16, a step outputs and weights.
        allowed = TOLERANCE if dtype == torch.float32 else 4 * torch.finfo(dtype).eps / 2
        assert relative_error(torch.cat(outs, 2), whole.out) < allowed
        query = given[0][:, :, :2]
        last, expected = state.read(feature_map, query), whole.state.read(feature_map, query)
    assert relative_error(last.out, expected.out) < allowed
    assert relative_error(last.log_normalizer, expected.log_normalizer) < allowed


def test_it_compiles_into_one_graph(device: str) -> None:
    feature_map, leaves = build("FavorPlus").to(device), [x.requires_grad_() for x in tokens(device, 20)]

    def call(*x: Tensor) -> Tensor:
        return linattn.linear_attention(*x, feature_map, is_causal=True, enable_gqa=True, backend="triton")

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_packed_sequences_are_each_alone(device: str) -> None:
    """An empty one among them; states too."""
    feature_map, given, lengths = build("FavorPlus").to(device), tokens(device, 40), (17, 0, 3, 20)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0)
    options = {"enable_gqa": True, "backend": "triton"}
    found = linattn.linear_attention_packed_with_state(*given, feature_map, starts, **options)
    parts = [x.split(lengths, 2) for x in given]
    for row, part in enumerate(zip(*parts, strict=True)):
        alone = linattn.linear_attention_with_state(*part, feature_map, **options)
        own = found.out[:, :, int(starts[row]) : int(starts[row + 1])]
        assert relative_error(own, alone.out) < TOLERANCE
        state = linattn.State(*(x[row : row + 1] for x in found.state.sums), found.state.built_with)
        query = given[0][:, :, :2]
        assert relative_error(state.read(feature_map, query).out, alone.state.read(feature_map, query).out) < TOLERANCE


def test_autocast_leaves_its_sums_alone(device: str) -> None:
    feature_map, given = build("FavorPlus").to(device), tokens(device, 20)
    expected = linattn.linear_attention(*given, feature_map, enable_gqa=True, backend="triton")
    with torch.autocast(device, torch.bfloat16):
        found = linattn.linear_attention(*given, feature_map, enable_gqa=True, backend="triton")
    assert torch.equal(found, expected)
