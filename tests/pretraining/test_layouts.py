"""One training, whose layout changes at every checkpoint, is the training of one process."""

from __future__ import annotations

import pytest

from ranks import NUM_RANKS
from split_trainings import LAYOUTS, STEPS, trained

pytestmark = pytest.mark.xdist_group("ranks")


def test_a_checkpoint_of_any_layout_continues_in_any_other(on_ranks, tmp_path):
    alone, found = trained(None, "alone", None), []
    assert alone[-1][0] < 0.95 * alone[0][0]
    # Cut off after looks, of which there is one every two steps.
    for layout, cut in zip(LAYOUTS, (8, 14, 20, 26, 32, STEPS), strict=True):
        if layout == "alone":
            every = [trained(None, layout, tmp_path, cut)]
        else:
            every = on_ranks(NUM_RANKS, trained, layout, tmp_path, cut)
        assert all(one == every[0] for one in every)
        assert len(every[0]) == cut - len(found)
        found += every[0]
    for ours, truth in zip(zip(*found, strict=True), zip(*alone, strict=True), strict=True):
        assert ours == pytest.approx(truth, abs=1e-5)
