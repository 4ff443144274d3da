"""Which worker runs which tests: xdist's groups, at a cost that does not grow with the tests that are done."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadGroupScheduling


class Groups(LoadGroupScheduling):
    """Each group on one worker.

    What xdist has handed out it keeps, and counts all of it again after every test: with twenty thousand tests of no
    group, 25 s of a core. Here a group that is done is forgotten.
    """

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Note that a worker has run a test, and give it more if it has little left."""
        name = self.registered_collections[node][item_index]
        scope = self._split_scope(name)
        group = self.assigned_work[node][scope]
        group[name] = True
        if all(group.values()):
            del self.assigned_work[node][scope]
        self._reschedule(node)
