"""A training split in any way, and continued in another from its checkpoint, is the training of one process."""

from __future__ import annotations

import pytest

from ranks import NUM_RANKS
from split_trainings import STEPS, trained

pytestmark = pytest.mark.xdist_group("ranks")

# Layouts that follow one another, with the steps after which each is cut off. A look is every tenth step.
HALF = STEPS // 2
COURSES = (
    (("data", HALF), ("sequence", STEPS)),
    (("sequence", HALF), ("both", STEPS)),
    (("both", HALF), ("data", STEPS)),
    (("sharded data", 10), ("sharded both", 20), ("alone", 30), ("sharded data", 40)),
)


@pytest.fixture(scope="module")
def alone():
    """Losses of every step of one process, and those of its looks."""
    found = trained(None, "alone", None)
    assert found[-1][0] < 0.6 * found[0][0]
    return found


@pytest.mark.parametrize("course", COURSES, ids=lambda course: ", ".join(layout for layout, _ in course))
def test_a_checkpoint_of_any_layout_continues_in_any_other(on_ranks, tmp_path, alone, course):
    found = []
    for layout, until in course:
        if layout == "alone":
            every = [trained(None, layout, tmp_path, until)]
        else:
            every = on_ranks(NUM_RANKS, trained, layout, tmp_path, until)
        assert all(one == every[0] for one in every)
        found += every[0]
        assert len(found) == until
    for ours, truth in zip(zip(*found, strict=True), zip(*alone[: len(found)], strict=True), strict=True):
        assert ours == pytest.approx(truth, abs=1e-5)
