"""What all tests share: a strict world, small blocks on demand, and the count of the grid's cells that ran."""

from __future__ import annotations

import gc
import logging
import shutil
import signal
from collections.abc import Callable, Iterator
from importlib import import_module
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from programs import Programs

# What is large is imported where it is used: the process that deals tests out reads this file, and then begins others.
if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from xdist.remote import Producer

    from ranks import Pool
    from scheduling import Groups


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Groups | None:
    """Groups of tests are dealt out without counting all that is done after every test."""
    if config.getoption("dist") != "loadgroup":
        return None
    from scheduling import Groups

    return Groups(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Workers tell of each test once; a sixth of the time of collecting tests would go into looking for garbage."""
    gc.disable()
    if hasattr(config, "workerinput"):
        from scheduling import tell_less

        tell_less(config)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        # Torch on one thread, from the first map on.
        import_module("grid")


def pytest_collection_finish() -> None:
    """Garbage is no longer looked for among modules and twenty thousand tests: each training looks for it once.

    Nor so often: graphs are recorded of so many small objects that an eighth of the time would go into it.
    """
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect garbage once a file of tests; what is left, up to a million objects, is looked at no more."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _strict_world() -> Iterator[None]:
    """Seeded, and nothing left behind."""
    import torch

    # torch.manual_seed also keeps the call for GPUs to come: half a millisecond, twenty thousand times.
    torch.default_generator.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32
    # Two threads on a worker's one core make small tensors twenty times as slow, for all tests after.
    assert torch.get_num_threads() == 1


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, one for all pages of a worker; what needs it is not collected where it is missing."""
    from playwright.sync_api import sync_playwright

    # Nothing but the pages: no sandbox for root, no look-ups of the browser's own.
    switches = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=switches)
        yield found
        found.close()


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What loggers are told; pytest's own fixture makes three handlers for each test, a quarter of its time."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where a shell has started the tests in the background, with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def blocks_of(monkeypatch: pytest.MonkeyPatch):
    """Force the blocked backend's block size, and short segments of blocks."""
    from linattn.attention.backends.blocked import blocks, causal, grouped

    def force(size: int) -> None:
        monkeypatch.setattr(blocks, "block_size", lambda *_, **__: size)
        monkeypatch.setattr(causal, "SEGMENT", 3)
        monkeypatch.setattr(grouped, "_CHUNK", 100 * size)

    return force


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised floating tensors hold NaN: an output that is not written cannot pass."""
    import torch

    def poison(function):
        def wrapped(*args, **kwargs):
            result = function(*args, **kwargs)
            return result.fill_(float("nan")) if result.is_floating_point() else result

        return wrapped

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Trainings believe this clock: `now`, in seconds."""
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr("linattn.training.loop.time", SimpleNamespace(perf_counter=lambda: found.now))
    return found


@pytest.fixture(scope="session")
def run_program() -> Iterator[Callable[..., CompletedProcess[str]]]:
    """run_program(program, *arguments): how a program in a process of its own ended, and what it printed."""
    with Programs() as programs:
        yield programs.run


@pytest.fixture(scope="session")
def _pools() -> Iterator[list[Pool]]:
    """The pool of ranks in use, if there is one."""
    pools: list[Pool] = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def on_ranks(_pools: list[Pool]) -> Callable[..., list]:
    """on_ranks(size, job, *arguments): what a job returns on each rank; a broken pool is replaced.

    Tests that use it are in xdist's group "ranks", for which there is one pool.
    """
    from ranks import Pool

    if not _pools or not _pools[0].is_alive:
        _pools[:] = [Pool()]
    return _pools[0].run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much of the grid the laws covered, and what was left out for want of a browser."""
    if shutil.which("chromium") is None:
        terminalreporter.write_line(
            "no browser: the pages of report and site were not opened; apt-get install chromium"
        )
    covered: dict[str, set[str]] = {}
    for report in terminalreporter.stats.get("passed", []):
        for key, value in report.user_properties:
            if key == "case":
                covered.setdefault(value, set()).add(report.nodeid.split("::")[0])
    if covered:
        cells = {cell.rsplit("-", 1)[0] for cell in covered}
        terminalreporter.write_line(
            f"laws covered {len(cells)} map × backend combinations, {len(covered)} with direction"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note which cell of the grid a law runs on."""
    callspec = getattr(item, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    if case is not None:
        from grid import Case

        if isinstance(case, Case):
            item.user_properties.append(("case", str(case)))
