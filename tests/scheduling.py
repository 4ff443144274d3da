"""Which worker runs which tests, and what it tells of them: xdist's groups, at a lower cost."""

from __future__ import annotations

from typing import Any

import pytest
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


def tell_less(config: pytest.Config) -> None:
    """Have a worker leave out that a test begins, and that what surrounds it passed: half of all it sends.

    Nor are keywords of tests sent, which nothing asks for there, and most of what a report is.
    """
    # A worker is sent the text of xdist's module, and its classes are of no module that can be imported.
    (worker,) = (x for x in config.pluginmanager.get_plugins() if type(x).__name__ == "WorkerInteractor")
    send = worker.sendevent

    def chosen(name: str, **options: Any) -> None:
        """Send what is shown or counted."""
        around = name == "testreport" and options["data"]["when"] != "call"
        if name == "testreport":
            options["data"]["keywords"] = {}
        if name != "logstart" and not (around and options["data"]["outcome"] == "passed"):
            send(name, **options)

    worker.sendevent = chosen
