"""Where the numbers of a sharded tensor are: boxes of it, each in the file of one process."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Part:
    """A box of a tensor.

    Attributes:
        process: the number of the one in whose file it is, under the tensor's name.
        offset: its first index in each dimension.
        shape: its size in each dimension.
    """

    process: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """The index after its last in each dimension."""
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def is_empty(self) -> bool:
        """Whether it holds no number."""
        return min(self.shape, default=1) <= 0

    def overlap(self, other: Part) -> Part:
        """The box of the indices that are in both, which may be empty."""
        starts = tuple(map(max, self.offset, other.offset))
        sizes = tuple(end - start for start, end in zip(starts, map(min, self.ends, other.ends), strict=True))
        return Part(self.process, starts, sizes)

    def within(self, outer: Part) -> tuple[slice, ...]:
        """The box's indices in a tensor that holds the box around it."""
        return tuple(
            slice(start - first, end - first)
            for start, end, first in zip(self.offset, self.ends, outer.offset, strict=True)
        )


@dataclass(frozen=True)
class Stored:
    """A tensor in the files of a checkpoint.

    Attributes:
        dtype: of its numbers.
        shape: of all of it.
        parts: boxes that hold each of its numbers once.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def wrong(self) -> str | None:
        """Say why the parts do not hold each number once; None if they do."""
        whole = Part(0, (0,) * len(self.shape), self.shape)
        for part in self.parts:
            if not len(part.offset) == len(part.shape) == len(self.shape):
                return f"have another number of dimensions than {list(self.shape)}"
            if part.process < 0 or part.is_empty or part.overlap(whole) != part:
                return f"are not all within {list(self.shape)}"
        if len({part.process for part in self.parts}) < len(self.parts):
            return "are not each in a file of its own"
        if _meet(self.parts):
            return "overlap"
        count, total = sum(prod(part.shape) for part in self.parts), prod(self.shape)
        return None if count == total else f"hold {count} of {total} numbers"


def _meet(parts: tuple[Part, ...]) -> bool:
    """Whether two boxes have an index in common."""
    ordered = sorted(parts, key=lambda part: part.offset)
    for place, part in enumerate(ordered):
        for later in range(place + 1, len(ordered)):
            # Those that begin behind its end in the first dimension do not meet it, nor do any after them.
            if ordered[later].offset[:1] >= part.ends[:1]:
                break
            if not part.overlap(ordered[later]).is_empty:
                return True
    return False
