"""What every kind of call comes down to: a function of queries, keys and values, its truth, and its limits.

Letters: B batch, H query heads, Hkv key/value heads, N queries, M keys, D head width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fuzzing.case import Case
from fuzzing.limits import Limit, within
from fuzzing.machine import machine_of, sums_dtype
from fuzzing.maps import DrawnMap
from fuzzing.oracle import MismatchError, Rows, check_close, check_log, check_out, check_same
from fuzzing.tokens import without_masked
from fuzzing.weights import Noise


class Result(NamedTuple):
    """One output of a task.

    Attributes:
        name: what it is.
        out: (B, H, N, Dv), or with `is_rows` the rows themselves, (B, H, N, M).
        log: log-normalisers (B, H, N), or None.
        roundings: how often `out` is rounded to the inputs' dtype on its way.
        is_rows: whether it is rows of the attention matrix.
    """

    name: str
    out: Tensor
    log: Tensor | None = None
    roundings: int = 1
    is_rows: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [self.out] if self.log is None else [self.out, self.log]


Call = Callable[[Tensor, Tensor, Tensor], list[Result]]
Truth = Callable[[Tensor, Tensor, Tensor, Noise | None], list[Rows]]


@dataclass(frozen=True)
class Task:
    """A drawn call, or several that belong together.

    Attributes:
        text: the call in words.
        maps: every map in it.
        given: query (B, H, N, D), key (B, Hkv, M, D) and value (B, Hkv, M, Dv), masked tokens anything.
        live: (B, M), False for masked keys.
        call: the product's results from these three.
        truth: the oracle's, from these in float64 with masked tokens 0, in the same order.
        limits: what it is refused for.
        sizes: of the machine.
        is_exact: whether some keys are attended to exactly.
    """

    text: str
    maps: Sequence[DrawnMap]
    given: tuple[Tensor, Tensor, Tensor]
    live: Tensor
    call: Call
    truth: Truth
    limits: list[Limit] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    is_exact: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensors."""
        return self.given[0].dtype

    @property
    def is_usable(self) -> bool:
        """Whether every map is fitted that must be; one that is not may go unnoticed where it has no keys."""
        return not any(drawn.unfinished for drawn in self.maps)

    def exact_inputs(self, inputs: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Inputs as the truth takes them."""
        query, key, value = self.given if inputs is None else inputs
        mask = self.live
        return [query.double(), without_masked(key, mask).double(), without_masked(value, mask).double()]

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(x.shape)) for x in self.given)
        live = "all" if bool(self.live.all()) else str([int(n) for n in self.live.sum(-1)])
        return f"{self.text} of {shapes}, {self.dtype}, {live} keys live, machine {self.sizes}"


def compare(found: Sequence[Result], truth: Sequence[Rows], dtype: torch.dtype) -> None:
    """Hold results against the truth."""
    if len(found) != len(truth):
        raise MismatchError(f"{len(found)} results, wanted {len(truth)}")
    for result, rows in zip(found, truth, strict=True):
        if result.is_rows:
            # Shares below the smallest normal number are lost.
            band = rows.weights_error + 64 * torch.finfo(sums_dtype(dtype)).tiny
            band = torch.where(rows.known.unsqueeze(-1), band, torch.inf)
            check_close(result.out, rows.weights, band, result.name)
            continue
        check_out(result.out, rows, dtype, result.name, roundings=result.roundings)
        if result.log is not None:
            check_log(result.log, rows, dtype, f"log-normaliser of {result.name}")


def run_task(case: Case, task: Task) -> None:
    """Make the calls and compare; inputs stay as they were, and so do the maps' tensors."""
    followed = case.dice.chance(0.2)
    case.note(f"{task}{', gradients followed' if followed else ''}")
    given = [x.detach().requires_grad_(followed) for x in task.given]
    kept = [x.clone() for x in task.given]
    with machine_of(task.sizes):
        found = within(task.limits, lambda: task.call(*given))
    for x, before in zip(given, kept, strict=True):
        check_same(x, before, "an input after the call")
    if task.is_usable:
        with torch.no_grad():
            truth = task.truth(*task.exact_inputs(), None)
        compare(found, truth, task.dtype)
