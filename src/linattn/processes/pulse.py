"""A sign of life from each process, and an end for those that would wait for one that gives none.

A collective waits as long as a process keeps its connection: half an hour, by gloo's default, for one that is stopped.
No shorter limit of collectives would do, for the others may rightly wait for long, as while the first one writes a
model. So a thread of each process counts on, in the launcher's store, as long as the process runs at all.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from linattn.processes.group import Processes

# Seconds between two beats, and beats without a sign of life before a process is given up. A launcher kills a stopped
# process half a minute after its first try to end it, and both together are to stay below a minute.
_BEAT, _PATIENCE = 1.0, 20


@contextmanager
def watched(processes: Processes) -> Iterator[None]:
    """This process gives signs of life while the block runs, and ends with a message if the next one gives none."""
    pulse = _Pulse(processes)
    threads = [threading.Thread(target=do, daemon=True) for do in (pulse.beat, pulse.watch)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        pulse.stop.set()


class _Pulse:
    """Two threads: one beats and listens, which may wait for ever; the other one counts how long nothing was heard."""

    def __init__(self, processes: Processes) -> None:
        self._processes, self._next = processes, (processes.rank + 1) % processes.size
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # What was heard last: how often this process beat, and the next one.
        self._own, self._other = 0, 0
        self.stop = threading.Event()

    def beat(self) -> None:
        """Count on, and look at the next process's count."""
        # A client of its own: one that is shared would wait while the group uses it.
        # The ignored error: torch documents TCPStore there, and its package's types do not list it.
        store = dist.TCPStore(*self._address, is_master=False)  # type: ignore[attr-defined]
        while not self.stop.wait(_BEAT):
            try:
                self._own = store.add(_key(self._processes.rank), 1)
                # Adding nothing reads, and does not wait for a count that is not there yet.
                self._other = store.add(_key(self._next), 0)
            except dist.DistError:
                # The store has ended; `watch` gives it up too, unless the work is over.
                return

    def watch(self) -> None:
        """End this process when a count stands still. Beats are counted and no time: all may have been stopped."""
        heard, silent = (0, 0), [0, 0]
        while not self.stop.wait(_BEAT):
            now = self._own, self._other
            silent = [0 if new != old else beats + 1 for new, old, beats in zip(now, heard, silent, strict=True)]
            heard = now
            if max(silent) >= _PATIENCE:
                self._end(is_own=silent[0] >= _PATIENCE)

    def _end(self, *, is_own: bool) -> None:
        """Say who is silent, and end, whatever the other threads wait for."""
        who = f"process {self._next} of {self._processes.size}"
        if is_own:
            host, port = self._address
            who = f"the store at {host}:{port}, kept by the launcher or by process 0,"
        sys.stderr.write(
            f"linattn: {who} gives no sign of life for {_PATIENCE * _BEAT:.0f} s: it is stopped, or its machine is; "
            f"process {self._processes.rank} ends. Start again: what was kept is gone on from\n"
        )
        sys.stderr.flush()
        os._exit(1)


def _key(rank: int) -> str:
    """Where a process counts."""
    return f"linattn/pulse/{rank}"
