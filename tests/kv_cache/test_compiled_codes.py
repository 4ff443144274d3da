"""Rows over keys and values in few bits in compiled code, for every kind of processor.

They are softmax attention over what codes stand for. The oracle decodes bit by bit in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from linattn.kv_cache import coded_tokens
from linattn.kv_cache.coded_tokens import CodedTokens, read_in_compiled_code
from linattn.kv_cache.codes import Codes
from linattn.kv_cache.frames import Frame, Frames
from linattn.softmax.partial import Partial, combine

pytest.importorskip("linattn_compiled")

EPS = torch.finfo(torch.float32).eps
KINDS = (1, 8, 16)


class CodedRows(NamedTuple):
    """Keys, or values, in few bits, and what they are relative to."""

    code: Tensor
    scale: Tensor
    mean: Tensor
    deviation: Tensor
    order: Tensor
    bits: Tensor


class Case(NamedTuple):
    """A call: sizes, and bits of blocks of keys and of values."""

    head_dim: int
    value_dim: int
    num_tokens: int
    key_bits: tuple[int, ...]  # of blocks, in turn
    value_bits: tuple[int, ...]
    batch: int = 2
    heads: int = 2
    groups: int = 3
    length: int = 1


CASES = (
    *(Case(64, 32, 70, (bits,), (bits,)) for bits in range(9)),
    Case(256, 256, 100, (8, 7, 6, 5, 3, 2, 1, 0), (4, 4, 4, 3), 1, 1, 4),
    Case(256, 256, 65, (0, 3, 0, 8), (0, 5, 5, 0), 1, 2, 1, 2),
    Case(80, 72, 33, (5, 3, 4), (2, 3), groups=1),
    Case(8, 5, 1, (3,), (7,)),
    Case(100, 96, 32, (1, 2), (6, 5), length=3),
    Case(40, 24, 95, (7,), (1,), groups=2, length=70),
    Case(128, 128, 257, (4, 4, 4, 3), (4,), 1, 3, 8),
)


def levels() -> Tensor:
    """Levels of any kind, those of b bits from number 2^b - 1 on."""
    return torch.cat([torch.linspace(-2, 2, 2**bits) ** 3 if bits else torch.zeros(1) for bits in range(9)])


def coded(width: int, number: int, bits: tuple[int, ...], case: Case, seed: int) -> CodedRows:
    """Codes at random; heads differ in their order, and in their bits where their sum allows it."""
    generator, shape = torch.Generator().manual_seed(seed), (case.batch, case.heads)
    size = -(-width // 8) * 8
    block = min(size & -size, 32)
    each = torch.tensor([bits[i % len(bits)] for i in range(size // block)], dtype=torch.uint8)
    bits_of = torch.stack([each.roll(i) for i in range(math.prod(shape))]).view(*shape, -1)
    code = torch.randint(256, (*shape, number, int(each.sum()) * block // 8), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(*shape, number, generator=generator) + 0.1).half()
    mean, deviation = (torch.rand(*shape, 1, width, generator=generator) + 0.1 for _ in range(2))
    order = torch.stack([torch.randperm(size, generator=generator) for _ in range(math.prod(shape))])
    return CodedRows(code, scale, mean, deviation, order.view(*shape, -1).short(), bits_of)


def numbers(rows: CodedRows, width: int) -> Tensor:
    """What codes of one head stand for, in float64; bit after bit."""
    size, table = rows.order.shape[-1], levels().double()
    block = size // rows.bits.shape[-1]
    stream = (rows.code.unsqueeze(-1) >> torch.arange(8) & 1).flatten(-2).long()
    places, first = [], 0
    for bits in rows.bits.repeat_interleave(block).tolist():
        code = (stream[:, first : first + bits] << torch.arange(bits)).sum(-1)
        places.append(table[2**bits - 1 + code])
        first += bits
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    mixed = (torch.stack(places, -1).unflatten(-1, (-1, block)) @ matrix * block**-0.5).flatten(-2)
    inside = torch.zeros_like(mixed)
    inside[:, rows.order.long()] = mixed * rows.scale.double().unsqueeze(-1)
    return rows.mean.double() + rows.deviation.double() * inside[:, :width]


def drawn(case: Case, seed: int = 0) -> tuple[Tensor, CodedRows, CodedRows]:
    """Queries, keys and values."""
    shape = (case.batch, case.heads, case.groups, case.length, case.head_dim)
    query = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5
    key = coded(case.head_dim, case.num_tokens, case.key_bits, case, seed + 1)
    return query, key, coded(case.value_dim, case.num_tokens, case.value_bits, case, seed + 2)


def read(
    query: Tensor, key: CodedRows, value: CodedRows, bias: Tensor | None = None, beside: Partial | None = None
) -> Partial:
    """Rows over codes, beside others that see no key where none are named."""
    bias = torch.zeros(key.scale.shape) if bias is None else bias
    if beside is None:
        out = torch.zeros(*query.shape[:4], value.mean.shape[-1])
        beside = Partial(out, torch.full(query.shape[:4], -torch.inf))
    frames = Frames(Frame(*key[2:]), Frame(*value[2:]))
    held = CodedTokens(Codes(*key[:2]), Codes(*value[:2]), bias, frames)
    return read_in_compiled_code(query, held, levels(), 0.3, beside)


def check(query: Tensor, key: CodedRows, value: CodedRows, bias: Tensor | None, got: Partial) -> None:
    """Compare with softmax over the numbers, head by head.

    A logit is a sum of P products of numbers that are sums of 32 at most, an output one of n: each rounds at most so
    often, a weight's logarithm by the sum of its products' sizes, an output by twice that of the values.
    """
    batch, heads = key.scale.shape[:2]
    for b in range(batch):
        for h in range(heads):
            keys, values = (numbers(CodedRows(*(x[b, h] for x in rows)), rows.mean.shape[-1]) for rows in (key, value))
            rows = query[b, h].double() * 0.3
            logits = rows @ keys.mT + (0 if bias is None else bias[b, h].double())
            log = logits.logsumexp(-1)
            peak = logits.amax(-1, keepdim=True)
            weights = (logits - torch.where(peak == -torch.inf, 0, peak)).exp()
            out = weights @ values / weights.sum(-1, keepdim=True).clamp(min=1e-300)
            # Mixed numbers are at most √32 times as far from their mean.
            size = 6 * float((rows.abs() @ keys.abs().mT).amax()) + float(logits.clamp(min=-100).abs().amax()) + 1
            bound = (key.order.shape[-1] + 64) * EPS * size
            torch.testing.assert_close(got.log_normalizer[b, h].double(), log, rtol=EPS, atol=bound)
            reach = float(values.abs().amax()) * 6 + 1
            slack = (2 * bound + (len(keys) + 64) * EPS) * reach
            torch.testing.assert_close(got.out[b, h].double(), out, rtol=0, atol=slack)


@pytest.fixture(params=KINDS)
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors of no more numbers."""
    monkeypatch.setattr(coded_tokens, "_WIDEST", request.param)


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_attention_over_what_codes_stand_for(case: Case) -> None:
    """Every number of bits, widths that fill no block or vector, heads whose bits and orders differ, odd numbers."""
    query, key, value = drawn(case)
    check(query, key, value, None, read(query, key, value))


@pytest.mark.usefixtures("_kind")
def test_biases_and_masks_weigh_keys() -> None:
    """A head whose every key is masked reads nothing, and what a masked key's scale holds goes nowhere."""
    query, key, value = drawn(CASES[4])
    bias = torch.randn(2, 2, 70, generator=torch.Generator().manual_seed(9))
    bias[0, 1, 3:40] = -torch.inf
    bias[1, 0] = -torch.inf
    got = read(query, key, value, bias)
    assert (got.out[1, 0] == 0).all()
    assert (got.log_normalizer[1, 0] == -torch.inf).all()
    kept = [0, 1, 3]
    flat = (x.flatten(0, 1)[kept].unsqueeze(0) for x in (query, *key, *value, bias, *got))
    query_, *rest = flat
    check(query_, CodedRows(*rest[:6]), CodedRows(*rest[6:12]), rest[12], Partial(*rest[13:]))
    for rows in (key, value):
        rows.scale[bias == -torch.inf] = torch.nan
    again = read(query, key, value, bias)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("scale", [0.0, 1e-3, 30.0, 1e4])
def test_short_and_long_keys_keep_their_digits(scale: float) -> None:
    """Scales too small for normal numbers of float16 included."""
    query, key, value = drawn(Case(64, 64, 70, (4,), (4,)))
    key = key._replace(scale=(key.scale.float() * scale).half(), mean=0 * key.mean)
    value = value._replace(scale=torch.arange(280).view(2, 2, 70).short().view(torch.float16))
    check(query, key, value, None, read(query, key, value))


@pytest.mark.usefixtures("_kind")
def test_an_infinite_scale_is_one() -> None:
    query, key, value = drawn(CASES[4])
    value.scale[1, 1, 5] = torch.inf
    got = read(query, key, value)
    assert got.out[0].isfinite().all()
    assert not got.out[1, 1].isfinite().any()


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_share_tokens_or_rows(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row's tokens in parts, or many rows in chunks."""
    monkeypatch.setattr(coded_tokens, "_MANY", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for case in (Case(64, 64, 257, (4, 3), (4,), 1, 1, 2), Case(64, 64, 100, (4, 3), (4,), 1, 2, 2, 150)):
            query, key, value = drawn(case)
            check(query, key, value, None, read(query, key, value))
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("_kind")
def test_heads_do_not_see_each_other() -> None:
    """Beside others to the bit what each is alone, wherever its codes lie in memory."""
    query, key, value = drawn(CASES[2])
    key.scale[0, 1] = torch.nan
    whole = read(query, key, value)
    for b in range(2):
        for h in range(2):
            one = (slice(b, b + 1), slice(h, h + 1))
            parts = (CodedRows(*(x[one] for x in rows)) for rows in (key, value))
            alone = read(query[one], *parts)
            assert torch.equal(alone.out.nan_to_num(7), whole.out[one].nan_to_num(7))
    assert whole.out[0, 1].isnan().all()
    assert whole.out[1].isfinite().all()


@pytest.mark.usefixtures("_kind")
def test_rows_join_those_beside_them() -> None:
    """Each side's weights in its share, wherever the larger is; a side that saw nothing counts nothing."""
    query, key, value = drawn(CASES[4])
    alone = read(query, key, value)
    generator = torch.Generator().manual_seed(8)
    out, log = (
        torch.randn(alone.out.shape, generator=generator),
        alone.log_normalizer + torch.randn(2, 2, 3, 1, generator=generator),
    )
    log[0, 0, 0] = -torch.inf
    log[0, 1] += 100
    log[1, 0] -= 100
    bias = torch.zeros(2, 2, 70)
    bias[1, 1] = -torch.inf
    alone.out[1, 1], alone.log_normalizer[1, 1] = 0, -torch.inf
    expected = combine(Partial(out, log), alone)
    got = read(query, key, value, bias, Partial(out.clone(), log.clone()))
    # A weight's logarithm is rounded by its size, 200 at most, and a share by twice that.
    torch.testing.assert_close(got.log_normalizer, expected.log_normalizer, rtol=4 * EPS, atol=4 * EPS)
    torch.testing.assert_close(got.out, expected.out, rtol=400 * EPS, atol=400 * EPS)


def test_nothing_is_read_of_no_tokens_and_no_rows() -> None:
    query, key, value = drawn(Case(16, 16, 0, (4,), (4,)))
    got = read(query, key, value)
    assert (got.out == 0).all()
    assert (got.log_normalizer == -torch.inf).all()
    query, key, value = drawn(Case(16, 16, 3, (4,), (4,), length=0))
    assert read(query, key, value).out.shape == (2, 2, 3, 0, 16)


@pytest.mark.parametrize("damage", ["order", "negative", "bits", "many"])
def test_frames_that_do_not_fit_codes_are_refused(damage: str) -> None:
    """Compiled code would read beyond its memory by what a file says."""
    query, key, value = drawn(Case(64, 64, 10, (4,), (4,)))
    if damage in ("order", "negative"):
        value.order[1, 0, 5] = 64 if damage == "order" else -1
    else:
        key.bits[0, 1, 0] = 5 if damage == "bits" else 250
    with pytest.raises(ValueError, match="orders or bits of the state's frames do not fit its codes"):
        read(query, key, value)
