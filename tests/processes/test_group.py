"""What processes share out, average and agree on."""

from __future__ import annotations

import pytest
import torch

from linattn.processes import Processes
from ranks import NUM_RANKS

pytestmark = pytest.mark.xdist_group("ranks")


def shared_out(mesh, count):
    """What each rank did of so many items, and what it got."""
    processes, did = Processes.of_this_run(), []
    found = processes.each(range(count), lambda item: did.append(item) or item * item)
    x = torch.tensor([float(processes.rank)])
    processes.average_([x])
    first = processes.first_does(lambda: processes.rank), processes.number_from_first(processes.rank + 0.1)
    return did, found, first, x.item()


@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_every_item_is_done_once_and_known_to_all(on_ranks, count):
    every = on_ranks(NUM_RANKS, shared_out, count)
    for rank, (did, found, first, mean) in enumerate(every):
        assert did == list(range(rank, count, NUM_RANKS))
        assert found == [item * item for item in range(count)]
        assert (first, mean) == ((0, 0.1), 1.5)
