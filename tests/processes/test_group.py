"""What processes share out, average and agree on."""

from __future__ import annotations

import pytest
import torch

from linattn.processes import Processes
from ranks import NUM_RANKS
from split_work import trained_apart

pytestmark = pytest.mark.xdist_group("ranks")


def shared_out(mesh, count):
    """What each rank did of so many items, and what it got."""
    processes, did = Processes.of_this_run(), []
    found = processes.each(range(count), lambda item: did.append(item) or item * item)
    x = torch.tensor([float(processes.rank)])
    processes.average_([x])
    first = processes.first_does(lambda: processes.rank), processes.from_first(processes.rank + 0.1)
    return did, found, first, x.item()


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_every_item_is_done_once_and_known_to_all(on_ranks, count):
    every = on_ranks(NUM_RANKS, shared_out, count)
    for rank, (did, found, first, mean) in enumerate(every):
        assert did == list(range(rank, count, NUM_RANKS))
        assert found == [item * item for item in range(count)]
        assert (first, mean) == ((0, 0.1), 1.5)


class OwnError(Exception):
    """Of a kind that another process may not have, and that does not survive pickling."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def failed(mesh, call, kind, failing):
    """How a call ends on each rank, where some fail."""
    processes = Processes.of_this_run()

    def do():
        if processes.rank in failing:
            raise kind("one", "two") if kind is OwnError else kind(f"of {processes.rank}")
        return processes.rank

    try:
        return getattr(processes, call)(do)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(("kind", "there"), [(FileNotFoundError, OSError), (ValueError, ValueError)])
def test_an_error_of_some_is_raised_on_all(on_ranks, kind, there):
    first = f"process 0 of {NUM_RANKS}: of 0"
    found = on_ranks(NUM_RANKS, failed, "first_does", kind, (0,))
    assert found == [(kind.__name__, "of 0")] + [(there.__name__, first)] * (NUM_RANKS - 1)
    found = on_ranks(NUM_RANKS, failed, "all_do", kind, (1, 2))
    for rank, (name, words) in enumerate(found):
        own = (kind.__name__, f"of {rank}") if rank in (1, 2) else (there.__name__, f"process 1 of {NUM_RANKS}: of 1")
        assert (name, words) == own
    assert on_ranks(NUM_RANKS, failed, "all_do", kind, ()) == list(range(NUM_RANKS))


def test_an_error_of_another_kind_arrives_too(on_ranks):
    found = on_ranks(NUM_RANKS, failed, "all_do", OwnError, (3,))
    assert found[3] == ("OwnError", "one and two")
    assert set(found[:3]) == {("RuntimeError", f"process 3 of {NUM_RANKS}: one and two")}


def test_weights_that_one_process_alone_reaches_train_by_the_mean_loss(on_ranks):
    """The processes' gradients are of different weights, of other sizes."""
    alone = trained_apart(None)
    assert alone[0][0] > 0.2
    assert alone[1][0] < -0.2
    for weights in on_ranks(NUM_RANKS, trained_apart):
        for ours, theirs in zip(weights, alone, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)
