"""Packed sequences: each as if it were alone, forward, backward and in its state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import linattn
from grid import build, qkv, relative_error

# Empty ones first, last and between; several of one power of two, one of each length that stands alone.
LENGTHS = (0, 5, 1, 7, 0, 13, 6, 5, 0)
TOTAL = sum(LENGTHS)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0)
MAPS = ("FavorPlus-per-head", "Relu", "Expansion", "Centred-call-FavorPlus", "Learned")


def given() -> tuple[Tensor, ...]:
    """Queries, keys, values and biases of all sequences, grouped heads."""
    bias = torch.randn(1, 2, TOTAL, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (*qkv(1, 4, 2, TOTAL, TOTAL), bias)


def gradients(out: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """The output, and the gradients of leaves by weights of their own for each number."""
    weight = torch.arange(out.numel(), dtype=out.dtype).view(out.shape).cos()
    return (out, *torch.autograd.grad((out * weight).sum(), leaves))


def each_alone(tokens: list[Tensor], mask: Tensor, function) -> list:
    """What a function gives of every sequence."""
    parts = [x.split(LENGTHS, 2) for x in tokens]
    masks = mask.split(LENGTHS, 1)
    return [function(*part, own) for *part, own in zip(*parts, masks, strict=True)]


@pytest.mark.parametrize("backend", ["blocked", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("map_name", MAPS)
def test_each_sequence_is_as_it_is_alone(map_name: str, is_causal: bool, backend: str) -> None:
    if is_causal and "-call" in map_name:
        return
    feature_map, mask = build(map_name), torch.ones(1, TOTAL, dtype=torch.bool)
    mask[0, 2], mask[0, 5], mask[0, 20] = False, False, False
    options = {"is_causal": is_causal, "enable_gqa": True, "backend": backend}
    followed = [x for x in feature_map.parameters() if x.requires_grad]

    def alone(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, own: Tensor) -> Tensor:
        return linattn.linear_attention(query, key, value, feature_map, key_mask=own, key_bias=bias, **options)

    leaves = [x.requires_grad_() for x in given()]
    truth = gradients(torch.cat(each_alone(leaves, mask, alone), 2), [*leaves, *followed])
    *tokens, bias = leaves
    packed = linattn.linear_attention_packed(*tokens, feature_map, STARTS, key_mask=mask, key_bias=bias, **options)
    found = gradients(packed, [*leaves, *followed])
    # Blocks of other lengths are summed in another order: some roundings of a sum.
    for index, (x, y) in enumerate(zip(found, truth, strict=True)):
        assert relative_error(x, y) < 1e-12, f"item {index}"


@pytest.mark.parametrize("map_name", ["FavorPlus-per-head", "Relu", "Expansion"])
def test_states_continue_each_sequence(map_name: str) -> None:
    """One batch of N rows, in the order of the sequences, empty ones too."""
    feature_map, (*tokens, bias) = build(map_name), given()
    found = linattn.linear_attention_packed_with_state(
        *tokens, feature_map, STARTS.int(), key_bias=bias, enable_gqa=True
    )
    late = qkv(len(LENGTHS), 4, 2, 1, 1, seed=9)
    after = linattn.linear_attention_with_state(*late, feature_map, found.state, enable_gqa=True)
    parts = [x.split(LENGTHS, 2) for x in (*tokens, bias)]
    for row, (query, key, value, own) in enumerate(zip(*parts, strict=True)):
        alone = linattn.linear_attention_with_state(query, key, value, feature_map, key_bias=own, enable_gqa=True)
        start = int(STARTS[row])
        if LENGTHS[row]:
            assert relative_error(found.out[:, :, start : start + LENGTHS[row]], alone.out) < 1e-12
        token = [x[row : row + 1] for x in late]
        next_one = linattn.linear_attention_with_state(*token, feature_map, alone.state, enable_gqa=True)
        assert relative_error(after.out[row], next_one.out[0]) < 1e-12


@pytest.mark.parametrize("count", [1, 3])
def test_sequences_that_are_all_empty(count: int) -> None:
    feature_map, starts = build("FavorPlus"), torch.zeros(count + 1, dtype=torch.int32)
    found = linattn.linear_attention_packed_with_state(*qkv(1, 2, 2, 0, 0), feature_map, starts)
    assert found.out.shape == (1, 2, 0, 5)
    assert found.state.S.shape[0] == count
    assert not found.state.z.any()


def test_nothing_of_other_sequences_is_read() -> None:
    """What they hold, NaN included."""
    feature_map, tokens = build("FavorPlus"), list(given()[:3])
    expected = linattn.linear_attention_packed(*tokens, feature_map, STARTS, enable_gqa=True)
    own = slice(int(STARTS[3]), int(STARTS[4]))
    changed = [torch.full_like(x, torch.nan) for x in tokens]
    for x, y in zip(changed, tokens, strict=True):
        x[:, :, own] = y[:, :, own]
    found = linattn.linear_attention_packed(*changed, feature_map, STARTS, enable_gqa=True)
    assert torch.equal(found[:, :, own], expected[:, :, own])


@pytest.mark.parametrize(("lengths", "calls", "rows"), [((8, 8, 8), 1, 24), ((5, 7, 4), 1, 21), ((1, 2, 4, 8), 4, 15)])
def test_one_call_for_each_power_of_two(lengths, calls, rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """And less than twice the tokens."""
    from linattn.attention import packed

    seen = []
    attend = packed.linear_attention

    def counted(query: Tensor, *rest: object, **options: object) -> Tensor:
        seen.append(query.shape[0] * query.shape[2])
        return attend(query, *rest, **options)

    monkeypatch.setattr(packed, "linear_attention", counted)
    tokens = qkv(1, 2, 2, sum(lengths), sum(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    linattn.linear_attention_packed(*tokens, build("FavorPlus"), starts)
    assert (len(seen), sum(seen)) == (calls, rows)
    assert sum(seen) < 2 * sum(lengths)


@pytest.mark.parametrize(
    ("starts", "error", "message"),
    [
        ([0, 44], TypeError, "int32 or int64: where sequences start.*got list"),
        (torch.tensor([0.0, 44.0]), TypeError, "got torch.float32"),
        (torch.tensor([44]), ValueError, r"got the shape \(1,\)"),
        (torch.tensor([[0, 44]]), ValueError, r"got the shape \(1, 2\)"),
        (torch.tensor([0, 43]), ValueError, r"rise from 0 to the number of tokens, 44, got \[0, 43\]"),
        (torch.tensor([1, 44]), ValueError, r"got \[1, 44\]"),
        (torch.tensor([0, 30, 20, 44]), ValueError, r"got \[0, 30, 20, 44\]"),
        (torch.tensor([0, *range(20)]), ValueError, r"got \[0, 0, 1, 2, …, 19\]"),
    ],
)
def test_it_refuses_other_starts(starts: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linattn.linear_attention_packed(*qkv(1, 2, 2, 44, 44), build("FavorPlus"), starts)


def test_it_refuses_rows_of_a_batch_and_other_numbers_of_queries() -> None:
    feature_map, starts = build("FavorPlus"), torch.tensor([0, 6])
    with pytest.raises(ValueError, match="in one batch row, got 2 rows; join them along the tokens"):
        linattn.linear_attention_packed(*qkv(2, 2, 2, 6, 6), feature_map, starts)
    with pytest.raises(ValueError, match="must be as many, got 3 and 6"):
        linattn.linear_attention_packed(*qkv(1, 2, 2, 3, 6), feature_map, starts)
