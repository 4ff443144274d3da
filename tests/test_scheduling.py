"""Workers are given each group whole and every test once, and what is done is forgotten."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

from scheduling import Groups, tell_less

NAMES = [f"test_one[{number}]" for number in range(40)]
NAMES += [f"test_two[{number}]@{group}" for number in range(6) for group in ("first", "second")]


class Worker:
    """What the scheduler sees of one: a queue, of which two are kept until the end."""

    def __init__(self, name: str) -> None:
        self.gateway, self.shutting_down = SimpleNamespace(id=name), False
        self.queue: list[int] = []
        self.did: list[str] = []

    def send_runtest_some(self, places: list[int]) -> None:
        self.queue += places

    def shutdown(self) -> None:
        self.shutting_down = True


def run(kind: type[LoadGroupScheduling], config: pytest.Config) -> tuple[LoadGroupScheduling, list[Worker]]:
    """Two workers that take turns until all is done; the second does three tests in the time of one."""
    scheduler, workers = kind(config, Producer("silent", enabled=False)), [Worker("one"), Worker("two")]
    for worker in workers:
        scheduler.add_node(worker)
    for worker in workers:
        scheduler.add_node_collection(worker, NAMES)
    scheduler.schedule()
    while any(worker.queue for worker in workers):
        for worker, speed in zip(workers, (1, 3), strict=True):
            for _ in range(min(speed, len(worker.queue))):
                place = worker.queue.pop(0)
                worker.did.append(NAMES[place])
                scheduler.mark_test_complete(worker, place)
    return scheduler, workers


@pytest.fixture
def config() -> SimpleNamespace:
    """As for two workers that are given groups."""
    return SimpleNamespace(
        option=SimpleNamespace(loadscopereorder=True), getvalue=lambda name: ["popen"] * 2, getoption=lambda name: 2
    )


def test_tests_are_dealt_out_as_by_xdist(config) -> None:
    scheduler, workers = run(Groups, config)
    _, theirs = run(LoadGroupScheduling, config)
    assert [worker.did for worker in workers] == [worker.did for worker in theirs]
    assert sorted(workers[0].did + workers[1].did) == sorted(NAMES)
    for group in ("first", "second"):
        assert [any(name.endswith("@" + group) for name in worker.did) for worker in workers].count(True) == 1
    assert scheduler.tests_finished
    assert not any(scheduler.assigned_work.values())


class WorkerInteractor:
    """As xdist names a worker's end."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []

    def sendevent(self, name: str, **options: object) -> None:
        self.sent.append((name, options))


def test_a_worker_tells_of_a_test_once_and_of_all_that_fails() -> None:
    worker = WorkerInteractor()
    tell_less(SimpleNamespace(pluginmanager=SimpleNamespace(get_plugins=lambda: [object(), worker])))
    reports = [{"when": when, "outcome": end} for when in ("setup", "call", "teardown") for end in ("passed", "failed")]
    worker.sendevent("logstart", nodeid="one")
    for report in reports:
        worker.sendevent("testreport", data=report)
    worker.sendevent("logfinish", nodeid="one")
    told = [report for report in reports if report["when"] == "call" or report["outcome"] == "failed"]
    assert worker.sent == [*(("testreport", {"data": report}) for report in told), ("logfinish", {"nodeid": "one"})]
