"""Merged keys of a row are those of its live tokens alone: however far it is padded, where, and beside what."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

import linattn
from grid import qkv
from linattn import MergedKV
from linattn.kv_cache import bidirectional, query_sample
from merged_rows import TOLERANCE
from padded_rows import FILLINGS, PADDED, PLACES, REAL, padded, weights

# The last ones attend exactly: there are as many merged keys as tokens, or no more than two blocks of them.
MERGED = (MergedKV(None, 9, bits=None), MergedKV(1, 9, bits=None), MergedKV(16, 9, bits=None))
MERGED += (MergedKV(None, 70, bits=None), MergedKV(4, 70, bits=None), MergedKV(32, 9, bits=None))
# The wheel of compiled code is optional; where one is installed that does not fit, its laws fail.
BACKENDS = ("torch", "compiled") if find_spec("linattn_compiled") else ("torch",)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples and seeds that are fewer than so few tokens, as in long calls."""
    monkeypatch.setattr(query_sample, "_SAMPLED", 1000)
    monkeypatch.setattr(query_sample, "_LEAST_SAMPLED", 4)
    monkeypatch.setattr(bidirectional, "_SEEDS", 20)
    monkeypatch.setattr(bidirectional, "_SEEDS_PER_CLUSTER", 2)
    monkeypatch.setattr(bidirectional, "MEASURED", 80)


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", MERGED, ids=str)
def test_merged_keys_are_chosen_by_a_row_s_own_tokens(config: MergedKV, place: str, filling: str, few: None) -> None:
    """Outputs, log-normalisers and gradients."""
    real, full, mask = padded(place, FILLINGS[filling])
    found = []
    for tokens, options in ((real, {}), (full, weights("mask", mask))):
        # A query is no key: nothing masks its gradient.
        tokens[0] = tokens[0].nan_to_num()
        leaves = [x.clone().requires_grad_() for x in tokens]
        own = linattn.merged_partial(*leaves, config, enable_gqa=True, **options)
        rows = [x[:1] if x.shape[2] == REAL else x[:1, :, PLACES[place]] for x in own]
        found.append((*rows, torch.autograd.grad(rows[0].square().sum() + rows[1].sum(), leaves)))
    torch.testing.assert_close(found[1][:2], found[0][:2], rtol=1e-10, atol=1e-10)
    for alone, among in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(among[:1, :, PLACES[place]], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["mask", "bias", "heads"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", MERGED, ids=str)
def test_so_they_are_in_every_backend(
    config: MergedKV, place: str, backend: str, groups: int, how: str, few: None
) -> None:
    real, full, mask = padded(place, torch.nan, groups, dtype=torch.float32)
    options = {"enable_gqa": True, "backend": backend}
    alone = linattn.merged_attention(*real, config, **options)
    among = linattn.merged_attention(*full, config, **options, **weights(how, mask, torch.float32))
    torch.testing.assert_close(among[:1, :, PLACES[place]], alone, rtol=TOLERANCE, atol=TOLERANCE)
    assert (among[2] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", [MergedKV(None, 70, bits=None), MergedKV(4, 70, bits=None)], ids=str)
def test_few_keys_stay_alone_where_axes_tell_them_not_apart(config: MergedKV, backend: str) -> None:
    """Two of them differ where no others do."""
    real, full, mask = padded("left", 3.0, head_dim=32, dtype=torch.float32)
    for x in real[1:]:
        x[:, :, 1] = x[:, :, 0]
    real[1][..., -1] = 0
    real[1][:, :, :2, -1] = torch.tensor([2.0, -2.0])
    for x, own in zip(full, real, strict=True):
        x[:1, :, PLACES["left"]] = own
    options = {"enable_gqa": True, "backend": backend}
    alone = linattn.merged_attention(*real, config, **options)
    among = linattn.merged_attention(*full, config, key_mask=mask, **options)
    torch.testing.assert_close(among[:1, :, PLACES["left"]], alone, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("length", [300, 2500])
def test_a_sample_is_as_large_as_a_row_s_own_length_says(length: int) -> None:
    """Of 300 tokens all queries are sampled, of 2,500 few, beside whatever row."""
    long = list(qkv(batch=1, num_queries=4200, num_keys=4200))
    real = [x[:, :, :length] + 1 for x in long]
    full = [
        torch.cat((torch.nn.functional.pad(x, (0, 0, 0, 4200 - length)), y)) for x, y in zip(real, long, strict=True)
    ]
    mask = torch.arange(4200) < torch.tensor([[length], [4200]])
    for config in (MergedKV(None, 32, bits=None), MergedKV(32, 32, bits=None)):
        alone = linattn.merged_attention(*real, config, enable_gqa=True, backend="torch")
        among = linattn.merged_attention(*full, config, enable_gqa=True, key_mask=mask, backend="torch")
        torch.testing.assert_close(among[:1, :, :length], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("num_queries", [7, PADDED - 1])
@pytest.mark.parametrize("place", PLACES)
def test_keys_of_other_tokens_are_chosen_by_their_own_number(
    place: str, num_queries: int, filling: str, few: None
) -> None:
    """All queries are sampled from where they are of other tokens."""
    real, full, mask = padded(place, FILLINGS[filling])
    query = qkv(batch=3, num_queries=num_queries, seed=3)[0]
    for config in (MergedKV(None, 9, bits=None), MergedKV(None, 70, bits=None)):
        alone = linattn.merged_attention(query[:1], *real[1:], config, enable_gqa=True)
        among = linattn.merged_attention(query, *full[1:], config, enable_gqa=True, key_mask=mask)
        torch.testing.assert_close(among[:1], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("transform", "config"),
    [*(("vmap", config) for config in MERGED), *(("compile", config) for config in MERGED[::2])],
)
def test_a_graph_that_knows_no_mask_chooses_alike(config: MergedKV, transform: str, few: None) -> None:
    """How many queries it has room for is a matter of shapes."""
    torch.compiler.reset()
    _, full, mask = padded("interior", 3.0)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Merged attention, heads grouped."""
        return linattn.merged_attention(query, key, value, config, enable_gqa=True, key_mask=mask)

    def attend_row(*row: Tensor) -> Tensor:
        """One row of a batch."""
        return attend(*(x[None] for x in row))[0]

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    run = compiled if transform == "compile" else torch.vmap(attend_row)
    seen = mask[:, None, :, None]
    rows, wanted = (each(*full, mask).masked_fill(~seen, 0) for each in (run, attend))
    torch.testing.assert_close(rows, wanted, rtol=1e-10, atol=1e-10)


STREAMED = (
    MergedKV(8, 16, bits=4),
    MergedKV(8, 16, 4, 4, ((30, 4), (20, 2))),
    MergedKV(8, 0, None, 4, ((40, 4),)),
    MergedKV(4, 9, bits=None, num_sinks=0),
)


CUTS = ((), (3, 50, 51, 97, 98, 99, 120))


@pytest.mark.parametrize(
    ("config", "place", "backend", "cuts"),
    [
        (config, place, backend, CUTS[(i + j + k) % 2])
        for i, config in enumerate(STREAMED)
        for j, place in enumerate(PLACES)
        for k, backend in enumerate(BACKENDS)
    ],
    ids=lambda x: str(len(x)) if isinstance(x, tuple) else str(x),
)
def test_a_stream_keeps_live_tokens_alone(config: MergedKV, place: str, backend: str, cuts: tuple[int, ...]) -> None:
    """A text goes on after padding, cut anywhere, as one that was never padded.

    Whole and cut in turns, so that each meets every setting, place and backend.
    """
    dtype = torch.float64 if backend == "torch" else torch.float32
    tolerance = 1e-9 if backend == "torch" else TOLERANCE
    _, full, mask = padded(place, torch.nan, dtype=dtype)
    *twice, seen = (torch.cat((x, x.flip(2)), 2) for x in (*full, mask.unsqueeze(1)))
    live = seen[0, 0].nonzero().squeeze(-1)
    alone = [x[:1, :, live] for x in twice]
    wanted, held = linattn.merged_attention_with_state(*alone, config, enable_gqa=True, backend=backend)
    outs, state = [], None
    for start, stop in itertools.pairwise((0, *cuts, 2 * PADDED)):
        piece = [x[:, :, start:stop] for x in twice]
        out, state = linattn.merged_attention_with_state(
            *piece, config, state, key_mask=seen[:, 0, start:stop], enable_gqa=True, backend=backend
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2)[:1, :, live], wanted, rtol=tolerance, atol=tolerance)
    first = state.select(torch.tensor([0]))
    assert first.num_tokens == held.num_tokens
    for x, y in zip(first.tokens(), held.tokens(), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_queries", [20, PADDED])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", [MergedKV(97, 9, bits=None), MergedKV(2, 97, None, 0)], ids=str)
def test_queries_of_masked_tokens_see_live_ones_before_them(config: MergedKV, place: str, num_queries: int) -> None:
    """Where all live tokens have room attention is exact, for every query and in whatever pieces."""
    _, full, mask = padded(place, 3.0)
    state, pieces = None, []
    query, first = qkv(batch=3, num_queries=num_queries, seed=3)[0], PADDED - num_queries
    for start in range(0, PADDED, 40):
        stop = min(start + 40, PADDED)
        rows = slice(max(start - first, 0), max(stop - first, 0))
        tokens = query[:, :, rows], *(x[:, :, start:stop] for x in full[1:])
        out, state = linattn.merged_attention_with_state(
            *tokens, config, state, key_mask=mask[:, start:stop], enable_gqa=True
        )
        pieces.append(out)
    exact = linattn.softmax_attention(query, *full[1:], key_mask=mask, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(torch.cat(pieces, 2), exact, rtol=1e-9, atol=1e-9)
