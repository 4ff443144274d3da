"""Commands in processes of their own, to be killed or interrupted.

They are forked from a server that has imported what commands need, and done nothing else: a test with four of them does
not import transformers four times.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

FORKED = get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "linattn.convert",
        "linattn_lab.commands.head_audit",
        "linattn.cli.conversion",
        "linattn_lab.commands.training",
        "linattn_lab.pretraining",
        "linattn.training.loop",
        "transformers.models.bert.modeling_bert",
    ]
)
SECONDS = 120


class Apart:
    """`linattn WORDS` in another process, on one thread; leaving the block kills it.

    `prepare(*arguments)`, a function of a module of the tests, is called there before. What is printed goes to a file.
    """

    def __init__(self, output: Path, *words: object, prepare: Callable[..., None] | None = None, arguments: tuple = ()):
        self._output, self._begun = output, time.monotonic()
        self._process = FORKED.Process(target=_run, args=(output, [str(word) for word in words], prepare, arguments))
        self._process.start()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_for(self, event: Callable[[], Any]) -> None:
        """Return when the event has come; an error if the process ends before."""
        while not event():
            assert self._process.is_alive(), self._output.read_text()
            assert time.monotonic() < self._begun + SECONDS
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.kill(self._process.pid or 0, signal.SIGINT)

    def kill(self) -> None:
        """As `kill -9`."""
        self._process.kill()
        self._process.join()

    def ended(self) -> tuple[int | None, str]:
        """The exit status, negative for a signal's, and what was printed."""
        self._process.join(max(0.0, self._begun + SECONDS - time.monotonic()))
        return self._process.exitcode, self._output.read_text(encoding="utf-8")


def launch(folder: Path, words: list[object], prepare: Callable[..., None], arguments: tuple, seconds: float) -> str:
    """`linattn WORDS` on two ranks of torch's launcher, prepared on the second; they are expected to fail.

    Returns:
        What the launcher says, as torchrun prints it; folder / "0" and folder / "1" have what the ranks printed.
    """
    config = LaunchConfig(
        run_id="tests",
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="forkserver",
        max_restarts=0,
        monitor_interval=0.1,
    )
    errors: list[ChildFailedError] = []

    def launched() -> None:
        try:
            elastic_launch(config, _rank)(folder, [str(word) for word in words], prepare, arguments)
        except ChildFailedError as error:
            errors.append(error)

    # In a thread the launcher leaves this process its signal handlers, and is given up in time.
    thread = Thread(target=launched, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the launcher has not ended in time"
    assert errors, "no rank has failed"
    return str(errors[0])


def dying(place: str, name: str, times: int) -> None:
    """From now on a function, or a class's, of a module kills its process when it is called so many times."""
    module, _, kind = place.partition(":")
    owner, left = import_module(module), times
    owner = getattr(owner, kind) if kind else owner
    own = getattr(owner, name)

    def last(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args, **options)

    setattr(owner, name, last)


def saying(*words: str) -> None:
    """From now on the command of this process ends with these words too."""
    module = import_module("linattn.cli")
    own = module.main

    def main() -> None:
        sys.argv += words
        own()

    module.main = main


def _rank(folder: Path, words: list[str], prepare: Callable[..., None], arguments: tuple) -> None:
    """In a process of the launcher's."""
    rank = os.environ["RANK"]
    try:
        _run(folder / rank, words, prepare if rank == "1" else None, arguments)
    finally:
        # A fork ends sooner than an interpreter, and the launcher calls the first rank that it finds ended the cause.
        time.sleep(1)


def _run(output: Path, words: list[str], prepare: Callable[..., None] | None, arguments: tuple) -> None:
    """In the process."""
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ |= {"COLUMNS": "200", "TERM": "dumb"}
    torch.set_num_threads(1)
    # A shell that has started the tests in the background has interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A training's look for garbage would go through all that the server has imported.
    gc.freeze()
    if prepare:
        prepare(*arguments)
    sys.argv = ["linattn", *words]
    from linattn.cli import main

    main()
