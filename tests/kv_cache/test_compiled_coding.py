"""Compiled code writes and decodes the codes of plain torch, bit for bit, whatever rows hold."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from linattn.kv_cache.codes import Codes, Layout

pytest.importorskip("linattn_compiled")

WIDTHS = (8, 16, 24, 40, 80, 96, 128, 256)
# Means of bits: none at all, some blocks without any, halves, all there are.
BITS = (0, 0.5, 1, 3.5, 4, 6, 8)
BATCH, HEADS, ROWS = 2, 3, 9


class Content(NamedTuple):
    """What rows hold: standard normal numbers to a power, times a factor, rounded to a multiple."""

    power: int = 1
    factor: float = 1.0
    multiple: float = 0.0


CONTENTS = {
    "normal": Content(),
    "heavy tails": Content(power=5),
    "zeros": Content(factor=0.0),
    "equal to many others": Content(multiple=1.0),
    "constant": Content(power=0),
    "beyond the largest": Content(factor=1e6),
    "float16's subnormal scales": Content(factor=3e-7),
    "below float16's": Content(factor=1e-9),
}


def drawn(content: Content, layout: Layout, seed: int) -> Tensor:
    """Rows (B, H, n, P)."""
    x = torch.randn(BATCH, HEADS, ROWS, layout.size, generator=torch.Generator().manual_seed(seed))
    x = x.sign() * x.abs() ** content.power * content.factor
    return (x / content.multiple).round() * content.multiple if content.multiple else x


def shared_out(layout: Layout, mean: float, seed: int) -> tuple[Tensor, int]:
    """Bits (B, H, N) of blocks, other ones for each head and as many in sum, and the bytes of a row."""
    generator, total = torch.Generator().manual_seed(seed), layout.spent(mean)
    bits = torch.zeros(BATCH * HEADS, layout.number, dtype=torch.uint8)
    for of_head in bits:
        # One of eight bits of each block at a time.
        for place in torch.randperm(8 * layout.number, generator=generator)[:total].tolist():
            of_head[place % layout.number] += 1
    return bits.view(BATCH, HEADS, -1), total * layout.block // 8


def check(x: Tensor, bits: Tensor, num_bytes: int) -> None:
    """Compare all bits, those of scales that are no numbers among them."""
    plain, compiled = (Codes.of(x, bits, num_bytes, in_compiled_code=each) for each in (False, True))
    assert torch.equal(compiled.code, plain.code)
    assert torch.equal(compiled.scale.nan_to_num(nan=-1.0), plain.scale.nan_to_num(nan=-1.0))
    check_numbers(plain, bits, x.shape[-1])


def check_numbers(codes: Codes, bits: Tensor, size: int) -> None:
    """Compare decoded numbers, to the bit."""
    plain, compiled = (codes.rows(bits, size, torch.float32, in_compiled_code=each) for each in (False, True))
    assert compiled.shape == (*codes.scale.shape, size)
    torch.testing.assert_close(compiled, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("width", WIDTHS)
def test_codes_are_those_of_plain_torch(width: int, content: str) -> None:
    layout = Layout.of(width)
    for seed, mean in enumerate(BITS):
        check(drawn(CONTENTS[content], layout, seed), *shared_out(layout, mean, seed))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_give_the_same_codes(number: float) -> None:
    layout = Layout.of(80)
    x = drawn(Content(), layout, 0)
    x[:, :, 1, 3] = number
    check(x, *shared_out(layout, 4, 0))


def test_rows_may_lie_apart_and_be_none() -> None:
    layout = Layout.of(64)
    x, (bits, num_bytes) = drawn(Content(), layout, 0), shared_out(layout, 4, 0)
    apart = x.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(Codes.of(apart, bits, num_bytes, in_compiled_code=True).code, Codes.of(x, bits, num_bytes).code)
    assert Codes.of(x[:, :, :0], bits, num_bytes, in_compiled_code=True).code.shape == (BATCH, HEADS, 0, num_bytes)


def test_defaults_of_torch_change_nothing() -> None:
    layout = Layout.of(64)
    x, (bits, num_bytes) = drawn(Content(), layout, 0), shared_out(layout, 4, 0)
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            check(x, bits, num_bytes)
    finally:
        torch.set_default_dtype(dtype)


@pytest.mark.parametrize("damage", [(9, 0), (4, 3)], ids=["more than there are", "a sum that is not the codes'"])
def test_bits_that_do_not_fit_codes_are_refused(damage: tuple[int, int]) -> None:
    """A frame may come from a file: nothing is written beyond a row."""
    bits = torch.tensor(damage, dtype=torch.uint8).view(1, 1, 2)
    with pytest.raises(ValueError, match="bits of the state's frames do not fit its codes; pass a state"):
        Codes.of(torch.ones(1, 1, 4, 64), bits, 32, in_compiled_code=True)
    codes = Codes(torch.zeros(1, 1, 4, 32, dtype=torch.uint8), torch.ones(1, 1, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="bits of the state's frames do not fit its codes; pass a state"):
        codes.rows(bits, 64, torch.float32, in_compiled_code=True)


def test_any_rows_are_decoded_a_few_of_many_and_none() -> None:
    """Random bytes, of a tensor and of some of its rows."""
    layout = Layout.of(64)
    bits, num_bytes = shared_out(layout, 4, 0)
    code = torch.randint(256, (BATCH, HEADS, ROWS, num_bytes), generator=torch.Generator().manual_seed(1)).byte()
    codes = Codes(code, torch.linspace(-2, 3, ROWS).half().expand(BATCH, HEADS, -1))
    check_numbers(codes, bits, layout.size)
    check_numbers(codes.cut(3, 7), bits, layout.size)
    check_numbers(codes.cut(2, 2), bits, layout.size)
