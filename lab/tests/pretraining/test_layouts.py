"""A training split in any way, and continued in another from its checkpoint, is the training of one process."""

from __future__ import annotations

import pytest

from ranks import NUM_RANKS, Pool
from split_trainings import STEPS, trained

pytestmark = pytest.mark.xdist_group("ranks")

# Layouts that follow one another, with the steps after which each is cut off, on so many processes. A look is every
# fourth step.
HALF = STEPS // 2
COURSES = (
    (2, (("data", HALF), ("sequence", STEPS))),
    (2, (("sequence", HALF), ("data", STEPS))),
    (NUM_RANKS, (("both", HALF), ("both", STEPS))),
    (NUM_RANKS, (("sharded data", 4), ("sharded both", 8), ("alone", 12), ("data", 16), ("sequence", 20))),
)


@pytest.fixture(scope="module")
def alone():
    """Losses of every step of one process, and those of its looks."""
    found = trained(None, "alone", None)
    assert found[-1][0] < 0.6 * found[0][0]
    return found


@pytest.fixture(scope="module")
def pair():
    """Two processes, all of a world."""
    pool = Pool(2)
    yield pool.run
    pool.close()


@pytest.mark.parametrize(("number", "course"), COURSES, ids=lambda x: str(x) if isinstance(x, int) else x[0][0])
def test_a_checkpoint_of_any_layout_continues_in_any_other(on_ranks, pair, tmp_path, alone, number, course):
    run, found = pair if number == 2 else on_ranks, []
    for layout, until in course:
        if layout == "alone":
            every = [trained(None, layout, tmp_path, until)]
        else:
            every = run(number, trained, layout, tmp_path, until)
        assert all(one == every[0] for one in every)
        found += every[0]
        assert len(found) == until
    for ours, truth in zip(zip(*found, strict=True), zip(*alone[: len(found)], strict=True), strict=True):
        assert ours == pytest.approx(truth, abs=1e-5)
