"""Figures along a passage, and the errors of a model's heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from linattn.hf import AttentionCall
from linattn.methods.measures import relative_error


class Bins(NamedTuple):
    """Consecutive stretches of a text.

    Attributes:
        ends: where each ends, in tokens, ascending; the first begins at 0.
    """

    ends: tuple[int, ...]

    @classmethod
    def of(cls, num_tokens: int) -> Bins:
        """Stretches that double in length, the last ending with the text: the first are where little is lost.

        Example:
            >>> Bins.of(4096).ends
            (256, 512, 1024, 2048, 3072, 4096)
        """
        small = [size for size in (256, 512, 1024, 2048) if size < num_tokens]
        more = list(range(3072, num_tokens, 1024)) if num_tokens > 2048 else []
        return cls((*small, *more, num_tokens))

    def means(self, positions: Tensor, values: Tensor) -> list[float]:
        """The mean of values (n,) within each stretch; nan where none is measured."""
        found, start = [], 0
        for end in self.ends:
            inside = values[(positions >= start) & (positions < end)]
            found.append(float(inside.mean()) if len(inside) else math.nan)
            start = end
        return found


def head_errors(calls: Sequence[AttentionCall], outputs: Sequence[Tensor], first: int) -> list[list[float]]:
    """Relative Frobenius errors of each layer's heads, over queries from `first` on."""
    return [
        relative_error(out[:, :, first:].double(), call.softmax()[:, :, first:].double()).flatten().tolist()
        for call, out in zip(calls, outputs, strict=True)
    ]
