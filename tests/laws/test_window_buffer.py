"""A stream with a window writes its keys into a buffer with places for later ones: states stay values all the same."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Barrier

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import linattn
from linattn import State
from linattn.feature_maps import FavorPlus

HEADS, HEAD_DIM, WINDOW = 2, 4, 8
MAP = FavorPlus(HEAD_DIM, 8)
# Beyond two blocks, so that keys have left; the buffer that is made first is full after as many again.
LENGTH = 5 * WINDOW + 3
# States with a buffer for a few tokens more, at the beginning of a stream and later.
PLACES = (3, WINDOW, 2 * WINDOW, 3 * WINDOW + 5)

attend = partial(linattn.linear_attention_with_state, feature_map=MAP, window=WINDOW, backend="blocked")


def tokens(seed: int, length: int = LENGTH, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Normal queries, keys and values."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, length, HEAD_DIM, generator=generator).to(dtype) for _ in range(3)]


def cut(inputs: list[Tensor], start: int, stop: int) -> list[Tensor]:
    """Some of the tokens."""
    return [x[:, :, start:stop] for x in inputs]


def stepped(inputs: list[Tensor], state: State | None = None) -> tuple[Tensor, State]:
    """Rows of a stream token by token, and its last state."""
    outs = []
    for place in range(inputs[0].shape[2]):
        out, state = attend(*cut(inputs, place, place + 1), state=state)
        outs.append(out)
    assert state is not None
    return torch.cat(outs, 2), state


def fresh(state: State) -> State:
    """A state of the same numbers with no buffer around its keys."""
    found: State = copy.deepcopy(state)
    assert found.window.buffer is None
    return found


def assert_alike(first: State, second: State) -> None:
    """Two states are equal to the bit."""
    for x, y in zip(tree_leaves(first), tree_leaves(second), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_a_token_moves_no_key_but_where_its_room_ends() -> None:
    _, state = stepped(tokens(0, 2 * WINDOW))
    memory = [state.window.buffer.key.data_ptr()]
    for place in range(8 * WINDOW):
        _, state = stepped(tokens(place, 1), state)
        memory.append(state.window.recent.key.untyped_storage().data_ptr())
    moves = sum(x != y for x, y in pairwise(memory))
    assert 0 < moves <= 8


def test_a_stream_holds_at_most_three_blocks() -> None:
    _, state = attend(*tokens(0, 40 * WINDOW))
    for place in range(4 * WINDOW):
        for x in state.window.recent[:2]:
            assert x.untyped_storage().nbytes() <= 3 * WINDOW * HEADS * HEAD_DIM * x.element_size()
        _, state = stepped(tokens(place, 1), state)


@pytest.mark.parametrize("place", PLACES)
def test_streams_that_part_do_not_meet(place: int) -> None:
    _, state = stepped(tokens(0, place))
    before, alone = fresh(state), [stepped(tokens(seed), fresh(state)) for seed in (1, 2)]
    # In turn, token by token.
    states, outs = [state, state], ([], [])
    for at in range(LENGTH):
        for branch in (0, 1):
            out, states[branch] = stepped(cut(tokens(1 + branch), at, at + 1), states[branch])
            outs[branch].append(out)
    for branch in (0, 1):
        assert torch.equal(torch.cat(outs[branch], 2), alone[branch][0])
        assert_alike(states[branch], alone[branch][1])
    assert_alike(state, before)


@pytest.mark.parametrize("place", PLACES)
def test_a_decayed_state_and_its_origin_go_on_apart(place: int) -> None:
    _, state = stepped(tokens(0, place))
    wanted = [stepped(tokens(1), fresh(x)) for x in (state, state.decay(-0.5))]
    decayed = state.decay(-0.5)
    for found, (out, after) in zip((stepped(tokens(1), decayed), stepped(tokens(1), state)), wanted[::-1], strict=True):
        assert torch.equal(found[0], out)
        assert_alike(found[1], after)


def test_streams_that_part_in_threads_do_not_meet() -> None:
    before, number = sys.getswitchinterval(), 4
    sys.setswitchinterval(1e-6)
    try:
        for place in PLACES * 3:
            _, state = stepped(tokens(0, place))
            alone, start = [stepped(tokens(seed, 4), fresh(state))[0] for seed in range(number)], Barrier(number)

            def work(seed: int, state: State = state, start: Barrier = start) -> Tensor:
                start.wait()
                return stepped(tokens(seed, 4), state)[0]

            with ThreadPoolExecutor(number) as pool:
                assert all(map(torch.equal, pool.map(work, range(number)), alone))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("place", PLACES)
def test_files_and_copies_hold_the_keys_alone(place: int) -> None:
    _, state = stepped(tokens(0, place))
    whole, sizes = attend(*tokens(0, place)).state, []
    for each in (state, whole):
        torch.save(each, file := io.BytesIO())
        sizes.append(len(file.getvalue()))
        file.seek(0)
        for copied in (torch.load(file), pickle.loads(pickle.dumps(each)), copy.deepcopy(each)):
            assert_alike(copied, each)
            assert torch.equal(stepped(tokens(1), copied)[0], stepped(tokens(1), fresh(each))[0])
    assert sizes[0] == sizes[1]


def test_what_a_file_calls_room_is_not_taken() -> None:
    _, state = stepped(tokens(0, 3))
    window = copy.copy(state.window)
    window.__setstate__({"recent": state.window.recent, "width": WINDOW, "buffer": ("no", "memory", 3, {3: True})})
    assert window.buffer is None


@pytest.mark.parametrize("place", PLACES)
def test_later_tokens_leave_what_a_backward_pass_has_saved(place: int) -> None:
    with torch.no_grad():
        _, state = stepped(tokens(0, place))
    queries = [tokens(3, 2)[0].requires_grad_() for _ in range(2)]
    step = [x.detach() for x in tokens(4, 2)[1:]]
    grads = []
    for query, each in zip(queries, (state, fresh(state)), strict=True):
        rows = [each.read(MAP, query).out, attend(query, *step, state=each).out]
        with torch.no_grad():
            stepped(tokens(5, 3), each)
        grads.append(torch.autograd.grad(sum(x.sum() for x in rows), query)[0])
    assert torch.equal(*grads)


def test_gradients_go_through_a_stream_with_a_buffer() -> None:
    with torch.no_grad():
        _, state = stepped(tokens(0, PLACES[-1]))
    inputs = [[x.requires_grad_() for x in tokens(1, 3)] for _ in range(2)]
    grads = [
        torch.autograd.grad(stepped(x, each)[0].square().sum(), x)
        for x, each in zip(inputs, (state, fresh(state)), strict=True)
    ]
    for x, y in zip(*grads, strict=True):
        assert torch.equal(x, y)


def test_inference_mode_may_begin_or_end_within_a_stream() -> None:
    wanted = stepped(tokens(1), stepped(tokens(0, 3))[1])[0]
    with torch.inference_mode():
        _, inside = stepped(tokens(0, 3))
    _, outside = stepped(tokens(0, 3))
    assert torch.equal(stepped(tokens(1), inside)[0], wanted)
    with torch.inference_mode():
        assert torch.equal(stepped(tokens(1), outside)[0], wanted)


def test_wider_tokens_after_narrow_ones_keep_their_digits() -> None:
    _, state = stepped(tokens(0, 3, torch.bfloat16))
    wider = tokens(1, 4)
    out, after = stepped(wider, state)
    assert torch.equal(out, stepped(wider, fresh(state))[0])
    assert torch.equal(after.window.recent.key[:, :, 3:], wider[1])


@pytest.mark.parametrize("way", ["compiled", "exported"])
def test_a_graph_of_a_step_writes_into_no_buffer(way: str) -> None:
    _, state = stepped(tokens(0, 3))
    inputs, kept = tuple(tokens(1, 1)), dict(state.window.buffer.free)
    wanted = attend(*inputs, state=fresh(state)).out

    class Step(torch.nn.Module):
        def forward(self, *given: Tensor, state: State) -> Tensor:
            return attend(*given, state=state).out

    torch._dynamo.reset()
    if way == "compiled":
        graph = torch.compile(Step(), backend="eager", fullgraph=True)
    else:
        graph = torch.export.export(Step(), inputs, {"state": state}).module()
    for _ in range(2):
        torch.testing.assert_close(graph(*inputs, state=state), wanted)
    assert state.window.buffer.free == kept
