"""The processes of one work, which all hold the same: what they share out, average and agree on."""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")
_Failure = tuple[type[Exception], str]
# A collective may rightly wait, as while the first process writes a model: longer than that takes.
_TIMEOUT = timedelta(minutes=10)
# Another process's error is raised as one of these, or else as a RuntimeError.
_KINDS = OSError, ValueError


@dataclass(frozen=True)
class Processes:
    """All of them, as one sees them; a run that nothing launched is one process, for which there is nothing to do."""

    rank: int  # this process's number, from 0
    size: int  # how many they are

    @classmethod
    def of_this_run(cls) -> Self:
        """Processes of torch.distributed's default group; this one alone where there is none.

        Example:
            >>> Processes.of_this_run()
            Processes(rank=0, size=1)
        """
        if not dist.is_initialized():
            return cls(0, 1)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def average_(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over all processes: one all-reduce for each dtype."""
        if self.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for x in tensors:
            by_dtype.setdefault(x.dtype, []).append(x)
        for alike in by_dtype.values():
            flat = torch.cat([x.detach().flatten() for x in alike])
            dist.all_reduce(flat)
            for x, mean in zip(alike, (flat / self.size).split([x.numel() for x in alike]), strict=True):
                x.detach().copy_(mean.view_as(x))

    def mean(self, x: Tensor) -> Tensor:
        """The mean of a tensor over all processes, a constant for gradients."""
        mean = x.detach().clone()
        self.average_([mean])
        return mean

    def from_first(self, value: T) -> T:
        """Value of the first process, on all of them; it travels pickled."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def first_does(self, do: Callable[[], T]) -> T:
        """Call a function on the first process and return its result on all, which wait; its error is raised on all."""
        result, error, failure = _tried(do) if self.is_first else (None, None, None)
        result, failure = self.from_first((result, failure))
        self._raise(error, [failure])
        return cast(T, result)

    def all_do(self, do: Callable[[], T]) -> T:
        """Call a function on each process and return its result, once all have succeeded; an error is raised on all."""
        result, error, failure = _tried(do)
        self._raise(error, self.gather(failure))
        return cast(T, result)

    def _raise(self, error: Exception | None, failures: Sequence[_Failure | None]) -> None:
        """Raise this process's own error, or else the first one of another process, by that one's number."""
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                kind, words = failure
                raise kind(f"process {rank} of {self.size}: {words}")

    def gather(self, value: T) -> list[T]:
        """Values of all processes, in the order of the ranks, on all of them; they travel pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def each(self, items: Sequence[T], do: Callable[[T], R]) -> list[R]:
        """Results for each item, in the items' order, on all processes: each does its share, every size-th of them.

        Example:
            >>> Processes(0, 1).each([1, 2, 3], lambda number: number**2)
            [1, 4, 9]
        """
        every = self.gather([do(item) for item in items[self.rank :: self.size]])
        return [every[place % self.size][place // self.size] for place in range(len(items))]


@contextmanager
def launched() -> Iterator[Processes]:
    """The processes that a launcher (torchrun, accelerate) started, in one group on gloo until the block ends.

    A launcher says so by WORLD_SIZE and RANK in the environment; without it there is one process and no group. A
    process that ends by force breaks its connections: the others' collectives fail at once, and torchrun names it. For
    one that is stopped, as by a signal or with its machine, they wait 10 minutes. At its end all wait.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(0, 1)
        return
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield Processes.of_this_run()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _tried(do: Callable[[], T]) -> tuple[T | None, Exception | None, _Failure | None]:
    """A function's result, or in its place the error, and what others are sent of it: it may not survive pickling."""
    try:
        return do(), None, None
    except Exception as error:
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
        return None, error, (kind, str(error))


@contextmanager
def interrupts(*, are_raised: bool = True) -> Iterator[list[int]]:
    """Note Ctrl-C in the list that is yielded: Python swallows what is raised while an object is being destroyed.

    Unless `are_raised` nothing is raised: TensorBoard's queue of events would wait for ever. Where interrupts are
    ignored, as in a shell's background, they stay so.

    Example:
        >>> before = signal.signal(signal.SIGINT, signal.default_int_handler)
        >>> with interrupts(are_raised=False) as pressed:
        ...     signal.raise_signal(signal.SIGINT)
        >>> _ = signal.signal(signal.SIGINT, before)
        >>> pressed == [signal.SIGINT]
        True

    Source: Python's documentation, "Note on Signal Handlers and Exceptions".
    """
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield pressed
        return

    def press(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        if are_raised:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
