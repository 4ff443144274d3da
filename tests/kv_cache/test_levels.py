"""Levels, bits and frames: fixed points, what rounding costs, how rows lie in memory."""

from __future__ import annotations

import importlib.util
import itertools
import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from linattn import MergedKV, merged_attention, merged_attention_with_state
from linattn.kv_cache import frames as frames_room
from linattn.kv_cache import levels as levels_room
from linattn.kv_cache.codes import Codes, Layout, coded_bytes
from linattn.kv_cache.frames import Frame, allocated, mixed
from linattn.kv_cache.levels import DISTORTION, level_numbers, near_levels, table

WIDTHS = (1, 5, 8, 12, 32, 70, 80, 96, 256)


def test_rows_wider_than_their_order_numbers_are_refused_before_there_are_codes() -> None:
    """Orders are kept in 16 bits, and the numbers of wider rows would be others."""
    rows = torch.zeros(1, 1, 1, 2**15 + 1)
    assert merged_attention(rows, rows, rows, MergedKV(2, 2, None), is_causal=True).shape == rows.shape
    assert merged_attention(*[rows[..., 1:]] * 3, MergedKV(2, 2), is_causal=True).shape[-1] == 2**15
    for call in (
        lambda: merged_attention(rows, rows, rows, MergedKV(2, 2), is_causal=True),
        lambda: merged_attention_with_state(rows, rows, rows[..., :4], MergedKV(2, 0, coded=((4, 4),))),
        lambda: merged_attention_with_state(rows[..., :4], rows[..., :4], rows, MergedKV(2, 2)),
        lambda: MergedKV.within(512, head_dim=2**15 + 1),
    ):
        with pytest.raises(ValueError, match="quantized rows have at most 2¹⁵ numbers, got 32769; give bits=None"):
            call()


def levels(bits: int) -> Tensor:
    return table(torch.zeros(1, dtype=torch.float64))[2**bits - 1 : 2 ** (bits + 1) - 1]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_the_means_of_what_is_nearest_to_them(bits: int) -> None:
    """The fixed point of Lloyd's iteration, to some roundings of float64, and odd."""
    level = levels(bits)
    edge = torch.cat((torch.tensor([-torch.inf]), (level[1:] + level[:-1]) / 2, torch.tensor([torch.inf]))).double()
    density = torch.exp(-edge.square() / 2) / math.sqrt(2 * math.pi)
    share = torch.special.ndtr(edge).diff()
    # Of the upper half, whose probabilities are differences of numbers near 1, the mirror image is exact.
    half = 2 ** (bits - 1)
    torch.testing.assert_close(level[:half], -density.diff()[:half] / share[:half], rtol=1e-9, atol=1e-12)
    assert torch.equal(level, -level.flip(0))
    assert (level.diff() > 0).all()


def test_levels_and_distortions_are_those_of_the_tables() -> None:
    """Max 1960, table I: 1.510 and 0.4528 of four levels, 0.1175; one of two is √(2/π)."""
    assert levels(2).tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=5e-4)
    assert levels(1).tolist() == pytest.approx([-math.sqrt(2 / math.pi), math.sqrt(2 / math.pi)])
    assert DISTORTION[:4] == pytest.approx((1, 1 - 2 / math.pi, 0.1175, 0.03454), abs=5e-5)
    # Many levels: √3·π/2 over their square, from below.
    assert DISTORTION[8] * 4**8 == pytest.approx(math.sqrt(3) * math.pi / 2, rel=0.02)


def test_rounding_costs_at_most_what_is_said() -> None:
    """Scales are fitted to 32 numbers each, of which few are as far as normal numbers can be; they are rounded too."""
    x = normal(1, 1, 4000, 32)
    for bits in range(9):
        wide = torch.full((1, 1, 1), bits, dtype=torch.uint8)
        error = (Codes.of(x, wide, 4 * bits).rows(wide, 32, x.dtype) - x).square().mean().item()
        assert error < 1.01 * DISTORTION[bits] + 4.0**-12
        # Evenly spaced levels from end to end of 32 numbers, some 4 deviations apart, could do no better.
        assert error > min(1, 4**2 / (12 * 4**bits)) / 2


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_level_that_is_found_is_the_nearest(bits: int) -> None:
    """Between levels and beyond them; of two that are as near the lower, and some level for what is no number."""
    level = levels(bits)
    x = torch.cat(
        (3 * normal(500), (level[1:] + level[:-1]) / 2, level, torch.tensor([1e30, -1e30, math.inf]).double())
    )
    wide = torch.tensor(bits, dtype=torch.uint8)
    assert torch.equal(level_numbers(x, wide), torch.searchsorted((level[1:] + level[:-1]) / 2, x).int())
    # Half a step of 1/256 to either side, and as much of the level; beyond 5 all levels have ended.
    off = (x - near_levels(x, wide)).abs() - (x.unsqueeze(-1) - level).abs().amin(-1)
    assert off.nan_to_num().max() < 1 / 256 + 1e-6
    assert 0 <= int(level_numbers(torch.tensor([math.nan]), wide)) < 2**bits


@pytest.mark.parametrize("bits", [[4] * 4, [8, 6, 2, 0]], ids=str)
@pytest.mark.parametrize("tail", ["normal", "one far", "even"])
def test_the_scale_of_a_row_is_the_best_of_eight(bits: list[int], tail: str) -> None:
    """Σ 4^b (z - s·l)² is the least among levels nearest to z/(f·s₀), each with the scale that fits them."""
    x, wide = normal(1, 1, 300, 4, 32), torch.tensor(bits, dtype=torch.uint8)
    if tail == "one far":
        x[..., 0, 0] *= 9
    elif tail == "even":
        x = torch.special.ndtr(x) - 0.5
    worth = torch.where(wide > 0, 4.0 ** wide.double(), 0)[:, None]

    def error(found: Tensor) -> Tensor:
        return ((x - found).square() * worth).sum((-1, -2))

    size = ((x.square() * worth).sum((-1, -2)) / (32 * worth.sum())).sqrt()[..., None, None]
    table_of = [levels(wide) for wide in bits]
    every = []
    for factor in (0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.35, 1.6):
        numbers = [
            (row.unsqueeze(-1) - one).abs().argmin(-1)
            for row, one in zip((x / size / factor).unbind(3), table_of, strict=True)
        ]
        level = torch.stack([one[number] for one, number in zip(table_of, numbers, strict=True)], 3)
        scale = (x * level * worth).sum((-1, -2), keepdim=True) / (level.square() * worth).sum((-1, -2), keepdim=True)
        every.append(error(scale * level))
    codes = Codes.of(x.flatten(3), wide.view(1, 1, 4), 4 * sum(bits))
    found = error(codes.rows(wide.view(1, 1, 4), 128, x.dtype).view(x.shape))
    # Scales are float16: 2⁻¹¹ of a row, squared. Errors are compared with levels off by 1/256.
    rounding = 4.0**-11 * (x.square() * worth).sum((-1, -2))
    least = torch.stack(every).amin(0)
    assert (found <= 1.3 * least + rounding).all()
    assert (found.sum() <= 1.01 * least.sum() + rounding.sum()).all()
    assert least.sum() < {"normal": 0.95, "one far": 0.8, "even": 0.9}[tail] * every[4].sum()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", [2, 3.5, 8])
def test_rows_take_the_bytes_that_are_counted_and_fill_them_without_gaps(width: int, bits: float) -> None:
    x = normal(2, 3, 7, width)
    frame = Frame.of(x, torch.ones(2, 3, 7, dtype=torch.bool), bits, normal(2, 3, width).exp())
    codes = Codes.of(frame.inside(x), frame.bits, coded_bytes(width, bits) - 2)
    layout = Layout.of(width)
    assert codes.code.dtype == torch.uint8
    assert sum(part.nbytes for part in codes) == 2 * 3 * 7 * coded_bytes(width, bits)
    assert layout.size % 8 == 0
    assert layout.size - width < 8
    assert (frame.bits.sum(-1) == math.floor(bits * layout.number)).all()
    assert (frame.bits.int().diff() <= 0).all()
    # Bit by bit as the layout says.
    found = codes.rows(frame.bits, layout.size, x.dtype)
    place = [(0, 0, 0), (1, 2, 6)]
    for row, head, token in place:
        stream = "".join(f"{byte:08b}"[::-1] for byte in codes.code[row, head, token].tolist())
        at, numbers = 0, []
        for wide in frame.bits[row, head].tolist():
            for _ in range(layout.block):
                numbers.append(levels(wide)[int(stream[at : at + wide][::-1] or "0", 2)])
                at += wide
        assert at == len(stream)
        wanted = torch.stack(numbers) * codes.scale[row, head, token].double()
        torch.testing.assert_close(found[row, head, token], wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_frame_is_undone(width: int) -> None:
    """Coordinates in their places again, and products with queries those of keys less their mean."""
    x, there = 3 * normal(2, 2, 40, width) + 5, torch.ones(2, 2, 40, dtype=torch.bool)
    frame, query = Frame.of(x, there, 4, normal(2, 2, width).exp()), normal(2, 2, 6, width)
    inside = frame.inside(x)
    torch.testing.assert_close(frame.outside(inside), x, rtol=1e-11, atol=1e-11)
    logits = frame.queries(query, x.dtype) @ inside.mT + query @ frame.mean.mT
    torch.testing.assert_close(logits, query @ x.mT, rtol=1e-10, atol=1e-10)


def test_bits_are_where_they_gain_most() -> None:
    """No other bits of that sum have a smaller sum of weighted distortions."""
    weight = normal(5, 4).mul(2).exp()
    for total in (0, 3, 9, 20, 32):
        ours = allocated(weight, total)
        assert (ours.sum(-1) == total).all()
        every = [bits for bits in itertools.product(range(9), repeat=4) if sum(bits) == total]
        cost = torch.tensor(DISTORTION, dtype=torch.float64)[torch.tensor(every)] @ weight.mT
        found = (torch.tensor(DISTORTION, dtype=torch.float64)[ours.long()] * weight).sum(-1)
        torch.testing.assert_close(found, cost.amin(0), rtol=1e-12, atol=0)


def test_bits_by_coordinate_keep_logits_better() -> None:
    """Of queries that look at some coordinates alone a third of the error, in the same bytes."""
    x, there = normal(1, 1, 500, 64), torch.ones(1, 1, 500, dtype=torch.bool)
    query = normal(1, 1, 50, 64) * torch.logspace(1, -2, 64, dtype=torch.float64)[torch.randperm(64)]
    truth, errors = query @ x.mT, []
    for power in (query.square().mean(2), None):
        frame = Frame.of(x, there, 4, power)
        codes = Codes.of(frame.inside(x), frame.bits, coded_bytes(64, 4) - 2)
        rounded = frame.outside(codes.rows(frame.bits, 64, x.dtype))
        errors.append((query @ rounded.mT - truth).norm())
    assert errors[0] < errors[1] / 3


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_numbers_beyond_float16_s_scales_are_finite(value: float) -> None:
    bits = torch.full((1, 1, 1), 4, dtype=torch.uint8)
    rounded = Codes.of(torch.full((1, 1, 1, 8), value), bits, 4).rows(bits, 8, torch.float32)
    assert rounded.isfinite().all()


def test_scales_of_rows_that_are_cut_are_finite() -> None:
    """A scale is more than twice the numbers where the nearest levels are less than half of them."""
    bits, draw = torch.full((1, 1, 1), 2, dtype=torch.uint8), torch.Generator().manual_seed(0)
    share, place = (torch.rand(1, 1, 500, 8, generator=draw) for _ in range(2))
    rows = torch.where(place < 0.5, 1e9, share[..., :1] * 2.0**15)
    assert Codes.of(rows, bits, 2).scale.isfinite().all()


@pytest.mark.parametrize("number", [1, 23, 300])
def test_rows_all_alike_deviate_by_their_size(number: int) -> None:
    """However the sum of so many is rounded, and in whatever units."""
    row = (2.0**-20 * normal(1, 2, 1, 8)).float()
    frame = Frame.of(row.expand(1, 2, number, 8), torch.ones(1, 2, number, dtype=torch.bool), 4)
    ratio = frame.deviation / row.abs().mean(-1, keepdim=True)
    assert (ratio > 0.5).all()
    assert (ratio < 2).all()


def test_rows_nearly_alike_leave_others_their_place() -> None:
    """A later row that differs by its own length is coded, not cut, where those of the frame differ by 2^-30 of it."""
    row, there = normal(1, 1, 1, 16), torch.ones(1, 1, 20, dtype=torch.bool)
    frame = Frame.of(row * (1 + 2.0**-30 * normal(1, 1, 20, 16)), there, 8)
    codes = Codes.of(frame.inside(-row), frame.bits, coded_bytes(16, 8) - 2)
    error = frame.outside(codes.rows(frame.bits, 16, row.dtype)) + row
    assert error.norm() < 0.02 * row.norm()


def test_mixing_keeps_lengths_and_is_its_own_inverse() -> None:
    for block in (1, 8, 16, 32):
        x = normal(4, 96)
        torch.testing.assert_close(mixed(mixed(x, block), block), x, rtol=0, atol=1e-13)
        torch.testing.assert_close(mixed(x, block).norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)
    one = torch.zeros(96, dtype=torch.float64)
    one[40] = 4.0
    assert mixed(one, 16).abs().tolist() == [0.0] * 32 + [1.0] * 16 + [0.0] * 48


def test_one_large_coordinate_leaves_the_others_their_levels() -> None:
    """Of rows with one of their own each, on which a frame has no hold."""
    x, bits = normal(1, 1, 60, 32), torch.full((1, 1, 1), 4, dtype=torch.uint8)
    x[0, 0, torch.arange(60), torch.randint(32, (60,))] += 20

    def error(rows: Tensor) -> float:
        return float((rows - x).norm())

    plain, spread = (Codes.of(rows, bits, 16).rows(bits, 32, x.dtype) for rows in (x, mixed(x, 32)))
    assert error(mixed(spread, 32)) < 0.6 * error(plain)


@pytest.mark.parametrize("module", [levels_room, frames_room], ids=lambda module: module.__name__)
def test_numbers_do_not_depend_on_the_default_dtype_at_import(module: ModuleType) -> None:
    """Two processes quantize alike: a second copy of the module, imported under another default, has the same ones."""
    spec = importlib.util.find_spec(module.__name__)
    again = importlib.util.module_from_spec(spec)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        spec.loader.exec_module(again)
    finally:
        torch.set_default_dtype(before)
    names = [name for name, x in vars(module).items() if isinstance(x, Tensor)]
    assert names
    for name in names:
        held, other = getattr(module, name), getattr(again, name)
        assert held.dtype == other.dtype
        assert torch.equal(held, other)
