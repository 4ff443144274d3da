"""A row is that of its live tokens alone: however far it is padded and where, and whatever stands there and beside it.

Letters: B batch, L tokens, Hkv key/value heads.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

import linattn
from grid import (
    CASES,
    MAPS,
    NONNEGATIVE_MAPS,
    SOFTMAX_MAPS,
    Case,
    build,
    qkv,
    relative_error,
    takes_statistics_from_the_call,
)
from linattn import Exact
from linattn.attention.exact.merged import bidirectional, even_sample
from linattn.feature_maps import expansion
from merged_rows import TOLERANCE

REAL, PADDED = 61, 97
PLACES = {
    "right": torch.arange(REAL),
    "left": torch.arange(PADDED - REAL, PADDED),
    "interior": torch.randperm(PADDED, generator=torch.Generator().manual_seed(5))[:REAL].sort().values,
}
FILLINGS = {"zero": 0.0, "other": 3.0, "nan": torch.nan}
# The last ones attend exactly: there are as many merged keys as tokens, or no more than two blocks of them.
MERGED = (Exact(num_merged=9), Exact(1, num_merged=9), Exact(16, num_merged=9))
MERGED += (Exact(num_merged=70), Exact(4, num_merged=70), Exact(32, num_merged=9))
# Rows with a window are parts of positive sums.
WINDOW_MAPS = [name for name in SOFTMAX_MAPS if name in NONNEGATIVE_MAPS]
# The wheel of compiled code is optional; where one is installed that does not fit, its laws fail.
BACKENDS = ("blocked", "compiled") if find_spec("linattn_compiled") else ("blocked",)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples and seeds that are fewer than so few tokens, as in long calls."""
    monkeypatch.setattr(even_sample, "_SAMPLED", 1000)
    monkeypatch.setattr(even_sample, "_FEWEST", 4)
    monkeypatch.setattr(bidirectional, "_SEEDS", 20)
    monkeypatch.setattr(bidirectional, "_SEEDS_PER_CLUSTER", 2)
    monkeypatch.setattr(bidirectional, "_MEASURED", 80)


def padded(place: str, filling: float, groups: int = 2, **options: object) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Real tokens alone, the same between padding beside a longer row and one without any, and the mask."""
    real = list(qkv(batch=1, heads=2 * groups, num_queries=REAL, num_keys=REAL, **options))
    others = qkv(heads=2 * groups, num_queries=PADDED, num_keys=PADDED, seed=9, **options)
    full = []
    for x, other in zip(real, others, strict=True):
        room = torch.full_like(other[:1], filling)
        room[:, :, PLACES[place]] = x
        full.append(torch.cat((room, other)))
    mask = torch.zeros(3, PADDED, dtype=torch.bool)
    mask[0, PLACES[place]] = True
    mask[1] = True
    return real, full, mask


def weights(how: str, mask: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A mask as one, or as a bias of all key/value heads or of each."""
    if how == "mask":
        return {"key_mask": mask}
    bias = torch.where(mask, 0.0, -torch.inf).to(dtype).unsqueeze(1)
    return {"key_bias": bias if how == "bias" else bias.expand(-1, 2, -1)}


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("exact", MERGED, ids=lambda exact: exact.label)
def test_merged_keys_are_chosen_by_a_row_s_own_tokens(exact: Exact, place: str, filling: str, few: None) -> None:
    """Outputs, log-normalisers and gradients."""
    real, full, mask = padded(place, FILLINGS[filling])
    found = []
    for tokens, options in ((real, {}), (full, weights("mask", mask))):
        # A query is no key: nothing masks its gradient.
        tokens[0] = tokens[0].nan_to_num()
        leaves = [x.clone().requires_grad_() for x in tokens]
        own = linattn.linear_partial(*leaves, None, exact=exact, enable_gqa=True, **options)
        rows = [x[:1] if x.shape[2] == REAL else x[:1, :, PLACES[place]] for x in own]
        found.append((*rows, torch.autograd.grad(rows[0].square().sum() + rows[1].sum(), leaves)))
    torch.testing.assert_close(found[1][:2], found[0][:2], rtol=1e-10, atol=1e-10)
    for alone, among in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(among[:1, :, PLACES[place]], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["mask", "bias", "heads"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("exact", MERGED, ids=lambda exact: exact.label)
def test_so_they_are_in_every_backend(exact: Exact, place: str, backend: str, groups: int, how: str, few: None) -> None:
    real, full, mask = padded(place, torch.nan, groups, dtype=torch.float32)
    options = {"exact": exact, "enable_gqa": True, "backend": backend}
    alone = linattn.linear_attention(*real, None, **options)
    among = linattn.linear_attention(*full, None, **options, **weights(how, mask, torch.float32))
    torch.testing.assert_close(among[:1, :, PLACES[place]], alone, rtol=TOLERANCE, atol=TOLERANCE)
    assert (among[2] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("exact", [Exact(num_merged=70), Exact(4, num_merged=70)], ids=lambda exact: exact.label)
def test_few_keys_stay_alone_where_axes_tell_them_not_apart(exact: Exact, backend: str) -> None:
    """Two of them differ where no others do."""
    real, full, mask = padded("left", 3.0, head_dim=32, dtype=torch.float32)
    for x in real[1:]:
        x[:, :, 1] = x[:, :, 0]
    real[1][..., -1] = 0
    real[1][:, :, :2, -1] = torch.tensor([2.0, -2.0])
    for x, own in zip(full, real, strict=True):
        x[:1, :, PLACES["left"]] = own
    options = {"exact": exact, "enable_gqa": True, "backend": backend}
    alone = linattn.linear_attention(*real, None, **options)
    among = linattn.linear_attention(*full, None, key_mask=mask, **options)
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
    for exact in (Exact(num_merged=32), Exact(32, num_merged=32)):
        alone = linattn.linear_attention(*real, None, exact=exact, enable_gqa=True, backend="blocked")
        among = linattn.linear_attention(*full, None, exact=exact, enable_gqa=True, key_mask=mask, backend="blocked")
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
    for exact in (Exact(num_merged=9), Exact(num_merged=70)):
        alone = linattn.linear_attention(query[:1], *real[1:], None, exact=exact, enable_gqa=True)
        among = linattn.linear_attention(query, *full[1:], None, exact=exact, enable_gqa=True, key_mask=mask)
        torch.testing.assert_close(among[:1], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("transform", ["compile", "vmap"])
@pytest.mark.parametrize("exact", MERGED, ids=lambda exact: exact.label)
def test_a_graph_that_knows_no_mask_chooses_alike(exact: Exact, transform: str, few: None) -> None:
    """How many queries it has room for is a matter of shapes."""
    _, full, mask = padded("interior", 3.0)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """The op without a map."""
        return linattn.linear_attention(query, key, value, None, exact=exact, enable_gqa=True, key_mask=mask)

    def attend_row(*row: Tensor) -> Tensor:
        """One row of a batch."""
        return attend(*(x[None] for x in row))[0]

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    run = compiled if transform == "compile" else torch.vmap(attend_row)
    seen = mask[:, None, :, None]
    rows, wanted = (each(*full, mask).masked_fill(~seen, 0) for each in (run, attend))
    torch.testing.assert_close(rows, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("exact", [Exact(4, num_merged=9), Exact(16, num_merged=33), Exact(4, num_merged=9, bits=4)])
@pytest.mark.parametrize("place", ["right", "left"])
def test_whole_blocks_of_padding_leave_a_stream_with_merged_keys(exact: Exact, place: str) -> None:
    """Causally blocks are of positions."""
    real, full, mask = padded("right", torch.nan)
    shift = 32 if place == "left" else 0
    full, mask = [x.roll(shift, 2) for x in full], mask.roll(shift, 1)
    options = {"exact": exact, "enable_gqa": True, "is_causal": True}
    alone = linattn.linear_attention(*real, None, **options)
    among = linattn.linear_attention(*full, None, key_mask=mask, **options)
    torch.testing.assert_close(among[:1, :, shift : shift + REAL], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_row_beside_longer_ones_is_that_of_its_tokens(case: Case) -> None:
    tolerance = 1e-9 if case.build().nonnegative else 1e-7
    for place in PLACES:
        real, full, mask = padded(place, torch.nan)
        alone, among = case.attend(*real, case.build()), case.attend(*full, case.build(), key_mask=mask)
        assert relative_error(among[:1, :, PLACES[place]], alone) < tolerance
        assert (among[2] == 0).all()


@pytest.mark.parametrize("how", ["mask", "heads"])
@pytest.mark.parametrize("most", [20, 80, 4096])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("map_name", [name for name in MAPS if takes_statistics_from_the_call(name)])
def test_statistics_are_of_a_row_s_own_tokens(
    map_name: str, place: str, most: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only some of many tokens are looked at, and where many are alike."""
    monkeypatch.setattr(expansion, "_MOST_POINTS", most)
    for filling in FILLINGS.values():
        real, full, mask = padded(place, filling)
        for alike in (False, True):
            if alike:
                real = [x[:, :, torch.arange(REAL) % 2] for x in real]
                for x, own in zip(full, real, strict=True):
                    x[:1, :, PLACES[place]] = own
            alone = linattn.linear_attention(*real, build(map_name), enable_gqa=True)
            among = linattn.linear_attention(*full, build(map_name), enable_gqa=True, **weights(how, mask))
            torch.testing.assert_close(among[:1, :, PLACES[place]], alone, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("map_name", WINDOW_MAPS)
def test_padding_on_the_right_or_by_whole_blocks_leaves_a_window_beside_a_map(map_name: str, filling: str) -> None:
    """There blocks are of positions."""
    real, full, mask = padded("right", FILLINGS[filling])
    for window, shift in ((1, 0), (8, 0), (32, 0), (1, 36), (4, 36), (32, 32)):
        tokens, seen = [x.roll(shift, 2) for x in full], mask.roll(shift, 1)
        for is_causal in (False,) if takes_statistics_from_the_call(map_name) else (False, True):
            options = {"exact": Exact(window), "enable_gqa": True, "is_causal": is_causal}
            alone = linattn.linear_attention(*real, build(map_name), **options)
            among = linattn.linear_attention(*tokens, build(map_name), key_mask=seen, **options)
            torch.testing.assert_close(among[:1, :, shift : shift + REAL], alone, rtol=1e-9, atol=1e-9)
