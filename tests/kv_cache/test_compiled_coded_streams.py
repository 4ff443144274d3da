"""A stream in few bits whose codes are of compiled code: the rows of plain torch, and the same codes to the bit."""

from __future__ import annotations

import pytest
import torch

import linattn
from linattn import MergedKV
from linattn.kv_cache import coded_tokens, codes
from merged_rows import LENGTH, TOLERANCE, biases, given, leaves, streamed

pytest.importorskip("linattn_compiled")

CONFIGS = (
    MergedKV(16, 120, bits=4),
    MergedKV(16, 120, bits=2, num_sinks=0),
    MergedKV(7, 60, bits=(3.5, 2)),
    MergedKV(40, 200, bits=8, num_sinks=1),
    MergedKV(16, 60, bits=2, coded=((48, 4), (64, 2.5))),
    MergedKV(16, 60, bits=None, coded=((48, 3),)),
    MergedKV(16, 0, coded=((96, 4), (32, 2))),
)


@pytest.fixture(params=[256, 8], ids=["in all coordinates", "along axes"])
def measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer keys than merges go along axes of, and more."""
    monkeypatch.setattr("linattn.kv_cache.merging.MEASURED", request.param)


BIASES = ("none", "masks", "biases", "heads")


# Each setting measured in both ways, with a bias in each; each bias measured in both ways.
@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("measured", "config", "bias"),
    [(most, x, BIASES[(2 * i + i // 2 + j) % 4]) for i, x in enumerate(CONFIGS) for j, most in enumerate((256, 8))],
    ids=str,
    indirect=["measured"],
)
def test_it_is_what_plain_torch_is(config: MergedKV, bias: str) -> None:
    """Which keys are merged, and what is kept, to the bit."""
    tokens = given(3)
    ours, theirs = (streamed(tokens, config, backend, (200,), biases(bias)) for backend in ("compiled", "torch"))
    torch.testing.assert_close(ours[0], theirs[0], rtol=TOLERANCE, atol=TOLERANCE)
    assert all(torch.equal(x, y) for x, y in zip(leaves(ours[1]), leaves(theirs[1]), strict=True))


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (33, 70), (256, 16)])
def test_widths_fill_blocks_or_not(head_dim: int, value_dim: int) -> None:
    tokens, config = given(1, head_dim=head_dim, value_dim=value_dim), MergedKV(16, 120, bits=4)
    ours, theirs = (streamed(tokens, config, backend)[0] for backend in ("compiled", "torch"))
    bound = TOLERANCE * head_dim / 8
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_of_16_bits_lose_no_more_than_their_own_rounding(dtype: torch.dtype) -> None:
    tokens, unit = tuple(x.to(dtype) for x in given()), torch.finfo(dtype).eps
    ours, theirs = (streamed(tokens, CONFIGS[0], backend)[0] for backend in ("compiled", "torch"))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=unit, atol=unit)


def test_log_normalisers_are_those_of_plain_torch() -> None:
    tokens, options = given(), {"is_causal": True, "config": CONFIGS[0], "key_bias": biases("masks")}
    ours, theirs = (
        linattn.merged_partial(*tokens, backend=backend, **options).log_normalizer for backend in ("compiled", "torch")
    )
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("backend", ["auto", "compiled", "torch"])
def test_codes_are_written_in_it_but_under_torch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used, run = [], codes._write_in_compiled_code
    monkeypatch.setattr(codes, "_write_in_compiled_code", lambda *call: used.append(1) or run(*call))
    streamed(given(), CONFIGS[0], backend)
    assert bool(used) == (backend != "torch")


def test_auto_reads_codes_in_it_one_token_or_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not in float64, for gradients or under "torch"."""
    used, run = [], coded_tokens.read_in_compiled_code

    def counted(*call: object) -> object:
        used.append(1)
        return run(*call)

    monkeypatch.setattr("linattn.kv_cache.memory.read_in_compiled_code", counted)
    tokens, config = given(), CONFIGS[0]
    state = streamed(tokens, config, "auto")[1]
    number = len(used)
    assert number > 0
    linattn.merged_attention_with_state(*(x[:, :, :1] for x in tokens), config, state)
    assert len(used) == number + 1
    streamed(tokens, config, "torch")
    streamed(tuple(x.double() for x in tokens), config, "auto")
    streamed(tuple(x.clone().requires_grad_() for x in tokens), config, "auto")
    assert len(used) == number + 1


def test_later_tokens_change_nothing_before_them() -> None:
    tokens, config = given(), CONFIGS[0]
    before = streamed(tokens, config)[0]
    for x in tokens:
        x[:, :, 250:] *= 1e3
    assert torch.equal(streamed(tokens, config)[0][:, :, :240], before[:, :, :240])


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("cuts", [(1, 2, 3), (16, 100, 131), tuple(range(150, LENGTH))], ids=str)
def test_a_stream_may_be_cut_anywhere(cuts: tuple[int, ...]) -> None:
    """What is kept is the same to the bit; a row alone adds its products up in another order."""
    tokens, config = given(2), CONFIGS[0]
    whole, parts = (streamed(tokens, config, cuts=each) for each in ((), cuts))
    torch.testing.assert_close(parts[0], whole[0], rtol=TOLERANCE, atol=TOLERANCE)
    assert all(torch.equal(x, y) for x, y in zip(leaves(parts[1]), leaves(whole[1]), strict=True))


@pytest.mark.usefixtures("measured")
def test_rows_of_a_batch_are_what_they_are_alone() -> None:
    tokens, config = given(2), CONFIGS[0]
    together = streamed(tokens, config)
    for row in range(2):
        alone = streamed(tuple(x[row : row + 1] for x in tokens), config)
        torch.testing.assert_close(alone[0], together[0][row : row + 1], rtol=TOLERANCE, atol=TOLERANCE)
        kept = linattn.MergedState.select(together[1], torch.tensor([row]))
        assert all(torch.equal(x, y) for x, y in zip(leaves(alone[1]), leaves(kept), strict=True))


def test_damaged_orders_are_refused() -> None:
    tokens, config = given(), CONFIGS[0]
    state = streamed(tokens, config)[1]
    frame = state.groups[0].merged.frames.key
    frame.order[0, 0, 0] = 99
    token = tuple(x[:, :, :1] for x in tokens)
    with pytest.raises(ValueError, match="rebuild it from the tokens"):
        linattn.merged_attention_with_state(*token, config, state, backend="compiled")
