"""A window's blocks are of a text's own tokens: a row is that of the text alone, however far it is padded at its ends.

Letters: B batch, L tokens, Hkv key/value heads.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from damaged_states import read_again
from grid import FOLDED, NONNEGATIVE_MAPS, SOFTMAX_MAPS, build, qkv, takes_statistics_from_the_call, tokens
from linattn import MergedKV
from linattn.softmax.row_groups import RowGroups
from merged_rows import BACKENDS, TOLERANCE
from ways import Attention, State, by_map, by_merging, is_grouped

FILLINGS = {"zero": 0.0, "other": 3.0, "nan": torch.nan}
LENGTH = 61
# Masked tokens before and after each row's own: of two rows that begin together, of one that is whole, of a long wait.
BEFORE, AFTER = (3, 0, 18, 3, 40), (0, 0, 11, 5, 0)
ROWS = tuple(slice(before, LENGTH - after) for before, after in zip(BEFORE, AFTER, strict=True))
MERGED = (MergedKV(4, 9, None), MergedKV(1, 3, None), MergedKV(16, 33, None), MergedKV(4, 9, bits=4))
# A merge leaves a block free: it comes as a text's own tokens fill what there is.
MERGED += (MergedKV(2, 34, None), MergedKV(8, 70, None))
# Rows with a window are parts of positive sums.
MAPS = [name for name in SOFTMAX_MAPS if name in NONNEGATIVE_MAPS]
CAUSAL_MAPS = [name for name in MAPS if not takes_statistics_from_the_call(name)]
CUTS = {"whole": (), "chunks": (1, 2, 10, 20, 20, 41), "tokens": tuple(range(1, LENGTH)), "none first": (0, 0, 30)}


def padded(filling: float = torch.nan, groups: int = 2, **options: object) -> tuple[list[Tensor], Tensor]:
    """Tokens of all rows, and their mask (B, L); masked keys hold anything."""
    mask = torch.zeros(len(ROWS), LENGTH, dtype=torch.bool)
    for row, own in zip(mask, ROWS, strict=True):
        row[own] = True
    options = {"batch": len(ROWS), "heads": 2 * groups, "num_queries": LENGTH, "num_keys": LENGTH} | options
    query, *others = qkv(**options)
    return [query, *(x.masked_fill(~mask[:, None, :, None], filling) for x in others)], mask


def unended() -> tuple[list[Tensor], Tensor]:
    """The tokens before any row's padding after its own."""
    given, mask = padded()
    stop = LENGTH - max(AFTER)
    return [x[:, :, :stop] for x in given], mask[:, :stop]


def streamed(
    attend: Attention, given: list[Tensor], mask: Tensor | None, cuts: tuple[int, ...], **options: object
) -> tuple[Tensor, State]:
    """All rows of a stream in pieces, and its state."""
    state, outs = None, []
    for start, stop in itertools.pairwise((0, *cuts, given[1].shape[2])):
        seen = None if mask is None else mask[:, start:stop]
        out, state = attend.stream(*(x[:, :, start:stop] for x in given), state=state, key_mask=seen, **options)
        outs.append(out)
    assert state is not None
    return torch.cat(outs, 2), state


def each_alone(attend: Attention, given: list[Tensor], **options: object) -> list[Tensor]:
    """Rows of their own tokens alone."""
    return [attend.rows(*(x[row : row + 1, :, own] for x in given), **options) for row, own in enumerate(ROWS)]


def check_rows(out: Tensor, alone: list[Tensor], tolerance: float, *, is_causal: bool) -> None:
    """Each row is that of its own tokens alone, and causally nothing is seen before them."""
    for row, (own, expected) in enumerate(zip(ROWS, alone, strict=True)):
        torch.testing.assert_close(out[row : row + 1, :, own], expected, rtol=tolerance, atol=tolerance)
        assert not is_causal or (out[row, :, : own.start] == 0).all()


@pytest.mark.parametrize("number", range(len(MERGED)), ids=lambda number: MERGED[number].label)
def test_a_stream_with_merged_keys(number: int) -> None:
    """In every cut; heads are grouped or not in turns, so that they meet every setting and every cut."""
    attend = by_merging(MERGED[number])
    for place, groups in enumerate((1, 4)):
        given, mask = padded(groups=groups)
        alone = each_alone(attend, given, is_causal=True)
        for cuts in list(CUTS.values())[(number + place) % 2 :: 2]:
            out, _ = streamed(attend, given, mask, cuts)
            check_rows(out, alone, 1e-10, is_causal=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "config", [dataclasses.replace(x, num_sinks=0) for x in MERGED if x.bits is None], ids=lambda config: config.label
)
def test_so_it_is_in_every_backend(config: MergedKV, backend: str) -> None:
    attend, (given, mask) = by_merging(config), padded(dtype=torch.float32)
    alone = each_alone(attend, given, is_causal=True, backend=backend)
    for cuts in ("whole", "tokens"):
        out, _ = streamed(attend, given, mask, CUTS[cuts], backend=backend)
        check_rows(out, alone, TOLERANCE, is_causal=True)


@pytest.mark.parametrize(("number", "map_name"), list(enumerate(CAUSAL_MAPS)), ids=str)
def test_a_stream_with_a_window_beside_a_map(number: int, map_name: str) -> None:
    """In every cut of a map of each kind of fold; of others in two that take turns."""
    for place, (window, filling) in enumerate(zip((1, 4, 32), FILLINGS.values(), strict=True)):
        attend, (given, mask) = by_map(build(map_name), window), padded(filling)
        alone = each_alone(attend, given, is_causal=True)
        for cuts in CUTS if map_name in FOLDED else ("none first", "chunks")[(number + place) % 2 :][:1]:
            out, _ = streamed(attend, given, mask, CUTS[cuts])
            check_rows(out, alone, 1e-9, is_causal=True)


@pytest.mark.parametrize(("number", "map_name"), list(enumerate(MAPS)), ids=str)
def test_a_window_beside_a_map_with_every_key_in_view(number: int, map_name: str) -> None:
    """With what fills the padding in turns, so that it meets every map and window."""
    fillings = list(FILLINGS.values())
    for place, window in enumerate((1, 4, 8, 32)):
        attend, (given, mask) = by_map(build(map_name), window), padded(fillings[(number + place) % len(fillings)])
        check_rows(attend.rows(*given, key_mask=mask), each_alone(attend, given), 1e-9, is_causal=False)


KINDS = {
    "merged": by_merging(MergedKV(4, 9, None)),
    "bits": by_merging(MergedKV(4, 9, bits=4)),
    "window": by_map(build("FavorPlus"), 4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_log_normalisers_and_gradients(kind: str) -> None:
    attend, (given, mask) = KINDS[kind], padded()
    leaves = [x.requires_grad_() for x in given]
    part = attend.partial(*leaves, key_mask=mask, is_causal=True)
    for row, own in enumerate(ROWS):
        alone = attend.partial(*(x[row : row + 1, :, own] for x in leaves), is_causal=True)
        among = [x[row : row + 1, :, own] for x in part]
        torch.testing.assert_close(among, list(alone), rtol=1e-10, atol=1e-10)
        assert (part.log_normalizer[row, :, : own.start] == -torch.inf).all()
        found, wanted = (
            torch.autograd.grad(x[0].square().sum() + x[1].sum(), leaves, retain_graph=True) for x in (among, alone)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["beams", "file", "fork", "tree"])
def test_a_state_goes_on(kind: str, way: str) -> None:
    """Rows that wait, one whose padding goes on, and those that went other ways, in any order."""
    attend, (given, mask) = KINDS[kind], padded()
    stop, rows = 37, [4, 4, 0, 1, 3, 2] if way == "beams" else list(range(len(ROWS)))
    state = attend.stream(*(x[:, :, :stop] for x in given), key_mask=mask[:, :stop]).state
    assert is_grouped(state)
    if way == "beams":
        state = state.select(torch.tensor([2, 4, 4, 0, 1, 3])).select(torch.tensor([1, 2, 3, 4, 5, 0]))
    elif way == "file":
        state = read_again(state)
    elif way == "tree":
        state = pytree.tree_map(torch.clone, state)
    else:
        other = (x.flip(0)[:, :, stop:] for x in given)
        attend.stream(*other, state=state, key_mask=mask.flip(0)[:, stop:])
    rest = (x[rows][:, :, stop:] for x in given)
    out, after = attend.stream(*rest, state=state, key_mask=mask[rows, stop:])
    later = tokens(len(rows), 4, 3, given[0].shape[-1], seed=8)
    read = attend.read(after, later)
    for place, row in enumerate(rows):
        own = [x[row : row + 1, :, BEFORE[row] :] for x in given]
        alone, end = streamed(attend, own, mask[row : row + 1, BEFORE[row] :], ())
        seen = slice(max(BEFORE[row] - stop, 0), LENGTH - AFTER[row] - stop)
        found, wanted = out[place : place + 1, :, seen], alone[:, :, max(stop - BEFORE[row], 0) :]
        torch.testing.assert_close(found, wanted[:, :, : found.shape[2]], rtol=1e-10, atol=1e-10)
        expected = attend.read(end, later[place : place + 1])
        torch.testing.assert_close([x[place : place + 1] for x in read], list(expected), rtol=1e-10, atol=1e-10)


def test_a_state_fades_and_moves_by_rows() -> None:
    feature_map, (given, mask) = build("FavorPlus"), padded()
    _, state = streamed(by_map(feature_map, 4), given, mask, (30,))
    assert is_grouped(state)
    factor = -tokens(len(ROWS), 2, seed=4).abs() * 50
    changed = state.decay(factor).detach().to("cpu")
    query = tokens(len(ROWS), 4, 3, given[0].shape[-1], seed=8)
    before, after = (x.read(feature_map, query) for x in (state, changed))
    torch.testing.assert_close(after.out, before.out, rtol=1e-10, atol=1e-10)
    shift = factor.repeat_interleave(2, 1).unsqueeze(-1)
    torch.testing.assert_close(after.log_normalizer, before.log_normalizer + shift, rtol=1e-10, atol=1e-10)
    assert state.flush(feature_map).read(feature_map, query).out.shape == before.out.shape


def test_rows_that_begin_together_stay_as_they_are() -> None:
    """Nothing is kept by groups, and nothing told, where all begin with one token; a selection of such rows too."""
    given, mask = unended()
    for attend in KINDS.values():
        _, state = streamed(attend, given, mask, ())
        assert is_grouped(state)
        assert not is_grouped(state.select(torch.tensor([3, 0, 0])))
        together = [x[[0, 3]] for x in given]
        assert not is_grouped(streamed(attend, together, mask[[0, 3]], ())[1])
        _, plain = streamed(attend, [x.nan_to_num() for x in given], None, (5,))
        assert not is_grouped(plain)


# A graph has each block of a window: few blocks show what many do, and texts are longer than the budget.
RECORDED = {"merged": by_merging(MergedKV(16, 9, None)), "window": by_map(build("FavorPlus"), 16)}


@pytest.mark.parametrize("transform", ["compile", "vmap"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", RECORDED)
def test_a_graph_that_knows_no_mask(kind: str, is_causal: bool, transform: str) -> None:
    """Rows are turned there."""
    torch.compiler.reset()
    way, (given, mask) = RECORDED[kind], padded(3.0)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """The op."""
        return way.rows(query, key, value, key_mask=mask, is_causal=is_causal)

    def attend_row(*row: Tensor) -> Tensor:
        """One row of a batch."""
        return attend(*(x[None] for x in row))[0]

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    run = compiled if transform == "compile" else torch.vmap(attend_row)
    check_rows(run(*given, mask), each_alone(way, given, is_causal=is_causal), 1e-10, is_causal=is_causal)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (((0, 3), (1,), (2,)), "groups of the numbers of 5 rows"),
        (((0, 3), (1,), (2,), (2,)), "groups of the numbers of 5 rows"),
        (((3, 0), (1,), (2,), (4,)), "groups of the numbers of 5 rows"),
        (((0, 3), (1,), (2,), (5,)), "groups of the numbers of 5 rows"),
        (((0,), (1, 3), (2,), (4,)), r"of shape|in the sizes of all others"),
        ([(0, 3), (1,), (2,), (4,)], "groups of the numbers of 5 rows"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_that_are_not_all_rows_are_refused(kind: str, rows: object, message: str) -> None:
    attend, (given, mask) = KINDS[kind], unended()
    _, state = streamed(attend, given, mask, ())
    field = "window" if kind == "window" else "keys"
    wrong = dataclasses.replace(state, **{field: RowGroups(rows, getattr(state, field).keys)})
    step = [x[:, :, :1].nan_to_num() for x in given]
    with pytest.raises(ValueError, match=message):
        attend.stream(*step, state=wrong)
    with pytest.raises(ValueError, match=message):
        wrong.select(torch.tensor([0]))


@pytest.mark.parametrize("kind", ["merged", "window"])
def test_groups_of_two_settings_are_refused(kind: str) -> None:
    given, mask = padded()
    _, state = streamed(KINDS[kind], given, mask, ())
    field, change = ("window", {"width": 8}) if kind == "window" else ("keys", {"config": MergedKV(4, 99, None)})
    groups = getattr(state, field)
    first, *others = groups.keys
    wrong = RowGroups(groups.rows, (dataclasses.replace(first, **change), *others))
    with pytest.raises(ValueError, match=r"one (width|config)"):
        dataclasses.replace(state, **{field: wrong}).select(torch.tensor([0]))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_wait_for_their_first_token_are_chosen_in_a_graph(kind: str) -> None:
    """A call of no tokens leaves one group of all rows, whose numbers a graph does not know.

    The text is as long as it takes until keys are merged: a graph has each of its blocks.
    """
    given, attend = [x[:, :, :21].nan_to_num() for x in padded()[0]], KINDS[kind]
    none = [x[:, :, :0] for x in given]

    def chosen(indices: Tensor, *rest: Tensor) -> Tensor:
        _, state = attend.stream(*none, state=None)
        return attend.stream(*rest, state=state.select(indices))[0]

    order, rest = torch.tensor([2, 0, 0]), [x[[2, 0, 0]] for x in given]
    torch._dynamo.reset()
    found = torch.compile(chosen, fullgraph=True, backend="eager")(order, *rest)
    torch.testing.assert_close(found, streamed(attend, rest, None, ())[0], rtol=1e-10, atol=1e-10)
