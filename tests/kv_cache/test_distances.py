"""What keys of a whole call are measured by: a metric from keys that are there, and the axes along which it is wide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import linattn
from grid import tokens
from linattn import MergedKV
from linattn.kv_cache import bidirectional
from linattn.kv_cache.partitioning import Axes, Metric, num_axes
from linattn.softmax.tokens import Tokens
from merged_rows import LENGTH, TOLERANCE, given, leaves

WIDTH = 48


def keys(num_directions: int, width: int = WIDTH, num_keys: int = 300) -> Tensor:
    """Keys and values (2, 2, n, 2·width) around a mean, in so many directions of falling width."""
    directions = tokens(2, 2, num_directions, 2 * width, seed=1)
    widths = 0.9 ** torch.arange(num_directions, dtype=torch.float64)
    return 3 + (tokens(2, 2, num_keys, num_directions, seed=2) * widths) @ directions


def measured(x: Tensor, bias: Tensor | None = None) -> tuple[Metric, Axes]:
    """What keys and values are measured by, seen by queries of another spread in each coordinate."""
    width = x.shape[-1] // 2
    spread = 0.1 + tokens(2, 2, width, seed=3).abs()
    given = torch.zeros(x.shape[:3], dtype=x.dtype) if bias is None else bias
    return bidirectional._distances(Tokens(x[..., :width], x[..., width:], given), spread)


def test_a_few_directions_are_measured_whole() -> None:
    """Axes as many as keys and values have directions leave every distance as it is, and the mean."""
    x = keys(15)
    metric, axes = measured(x)
    assert axes.turn.shape[-1] == 16
    whole, few = metric.points(x), axes.along(x)
    torch.testing.assert_close(few.norm(dim=-1), whole.norm(dim=-1), rtol=1e-9, atol=1e-9)
    whole, few = ((x - x.roll(1, 2)).norm(dim=-1) for x in (whole, few))
    torch.testing.assert_close(few, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("width", "number"), [(4, 8), (48, 16), (64, 16), (256, 64)])
def test_axes_are_nearly_the_principal_ones(width: int, number: int) -> None:
    """They hold nearly as much of all squares as the best of as many; an eighth of all where heads are wide."""
    x = keys(2 * width, width)
    metric, axes = measured(x)
    assert axes.turn.shape == (2, 2, 2 * width, number)
    points = metric.points(x)
    best = torch.linalg.svdvals(points)[..., :number].square().sum(-1)
    held = axes.along(x).square().sum((-2, -1))
    assert (held <= best * (1 + 1e-9)).all()
    assert (held >= 0.98 * best).all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_key_that_is_no_number_is_not_measured_by(value: float) -> None:
    x = keys(40)
    broken = x.clone()
    broken[0, 1, 0, 5] = value
    metric, axes = measured(broken)
    assert all(part.isfinite().all() for part in (*metric, *axes))
    assert axes.along(broken).isfinite().all()
    for found, others in zip((metric, axes), measured(x), strict=True):
        assert all(torch.equal(part[1], other[1]) for part, other in zip(found, others, strict=True))


def test_masked_keys_are_not_measured_by() -> None:
    """Keys after a masked one are measured as they are without it."""
    x = keys(40, num_keys=200)
    bias = torch.zeros(2, 2, 200, dtype=x.dtype)
    bias[:, :, 0] = -torch.inf
    for found, others in zip(measured(x, bias), measured(x[:, :, 1:]), strict=True):
        for part, other in zip(found, others, strict=True):
            torch.testing.assert_close(part, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("exponent", [-100, -40, 40])
def test_axes_of_rows_are_those_of_rows_a_power_of_two_as_large(exponent: int) -> None:
    """To the bit, where squares and what three numbers multiply to are none of float32's."""
    x = keys(40).float()
    metric = Metric(*(part.float() for part in measured(x.double())[0]))
    points, factor = metric.points(x), 2.0**exponent
    assert torch.equal(Axes.of(metric, points * factor).turn, Axes.of(metric, points).turn)


def test_there_are_as_many_axes_as_a_width_needs():
    assert [num_axes(width) for width in (8, 64, 512)] == [8, 16, 64]


@pytest.mark.parametrize("alike", ["queries", "values", "no queries"])
def test_queries_or_values_all_alike_merge_the_same_keys(alike: str) -> None:
    """No rounding of theirs decides which."""
    pytest.importorskip("linattn_compiled")
    query, key, value = given()
    query, value = (
        x[:, :, :1].expand_as(x) if alike == name else x for x, name in ((query, "queries"), (value, "values"))
    )
    first = LENGTH - 1 if alike == "no queries" else 0
    config, tokens = MergedKV(16, 40, bits=None, num_sinks=0), (query[:, :, first:], key, value)
    ours, theirs = (linattn.merged_partial_with_state(*tokens, config, backend=name) for name in ("compiled", "torch"))
    for x, y in zip((*ours.partial, *leaves(ours.state)), (*theirs.partial, *leaves(theirs.state)), strict=True):
        torch.testing.assert_close(x, y, rtol=TOLERANCE, atol=TOLERANCE)
