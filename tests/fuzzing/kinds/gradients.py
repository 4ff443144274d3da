"""Gradients of any task: those of the truth, 0 at masked tokens, finite wherever outputs are.

How far they may be off is measured: the truth is computed again with every intermediate off by its own rounding.
Letters: B batch, H heads, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fuzzing.case import Case
from fuzzing.kinds import attention, combination, rows, states, streams
from fuzzing.limits import within
from fuzzing.machine import machine_of, sums_dtype, unit
from fuzzing.oracle import MismatchError, Rows, check_close
from fuzzing.task import Result, Task, compare
from fuzzing.tokens import DTYPES
from fuzzing.uses import changed_gradients
from fuzzing.weights import Noise

_DRAWS = {
    "attention": (5.0, lambda dice: attention.draw(dice, most=24, dtypes=_DTYPES)),
    "streams": (3.0, lambda dice: streams.draw(dice, most=20, dtypes=_DTYPES, whole=True)),
    "combination": (2.0, lambda dice: combination.draw(dice, most=20, dtypes=_DTYPES)),
    "states": (1.0, lambda dice: states.draw(dice, most=8, dtypes=_DTYPES, whole=True)),
    "rows": (1.0, lambda dice: rows.draw(dice, most=20, dtypes=_DTYPES)),
}
_DTYPES = DTYPES | {torch.float64: 0.75}
# How many times its own rounding a gradient may be off, for three experiments of one sample each.
_MARGIN = 100.0
# Noise that is small, and far above the rounding of the experiment itself.
_AMPLIFIED, _SMALL = 2.0**26, 1e-3
# Share of a dtype's largest number up to which gradients are compared.
_LARGEST = 0.01


def draw_task(case: Case) -> Task:
    """Any task."""
    kind = case.dice.weighted({name: share for name, (share, _) in _DRAWS.items()})
    return _DRAWS[kind][1](case.dice)


class Pulled(NamedTuple):
    """A task and a loss over its results.

    Attributes:
        task: the task.
        found: its results.
        exact: the truth's leaves: queries, keys and values in float64.
        own: the maps' trainable parameters.
        truth: the truth's results.
        weights: what the loss multiplies each tensor of each result with.
    """

    task: Task
    found: Sequence[Result]
    exact: list[Tensor]
    own: list[Tensor]
    truth: Sequence[Rows]
    weights: list[list[Tensor]]

    @property
    def leaves(self) -> list[Tensor]:
        """Everything that the truth has a gradient for."""
        return [*self.exact, *self.own]


def prepared(case: Case, task: Task, found: Sequence[Result], own: Sequence[Tensor] = ()) -> Pulled:
    """A loss over a task's results, which are compared first."""
    exact = [x.requires_grad_() for x in task.exact_inputs()]
    truth = task.truth(*exact, None)
    compare(found, truth, task.dtype)
    weights = [_weights(case, result, one) for result, one in zip(found, truth, strict=True)]
    return Pulled(task, found, exact, list(own), truth, weights)


def hold(case: Case, pulled: Pulled, ours: Sequence[Tensor]) -> None:
    """Hold the gradients of queries, keys, values and parameters against those of the truth."""
    task = pulled.task
    wanted = gradients(loss(_tensors(pulled.found, pulled.truth), pulled.weights), pulled.leaves)
    names = ["query", "key", "value", *(f"parameter {i}" for i in range(len(pulled.own)))]
    for name, x, y in zip(names, ours, wanted, strict=True):
        _check_finite(name, x, y)
    for name, x in zip(names[1:3], ours[1:3], strict=True):
        if (x != 0).masked_fill(task.live[:, None, :, None], False).any():
            raise MismatchError(f"gradient of {name}: masked tokens have one")
    if all(bool(((x - y).abs() <= _band(x, y, pulled)).all()) for x, y in zip(ours, wanted, strict=True)):
        return
    experiments, lost = _experiments(case, pulled), _lost_by_uses(pulled)
    for name, x, y, extra, rounding in zip(names, ours, wanted, experiments, lost, strict=True):
        if _largest(y) <= _LARGEST * torch.finfo(x.dtype).max:
            band = _band(x, y, pulled) + _MARGIN * _spread(extra) + _floor(task, pulled.weights) + rounding
            check_close(x, y.double(), band, f"gradient of {name}")


def run(case: Case) -> None:
    """Compare the gradients of queries, keys, values and trainable parameters."""
    task = draw_task(case)
    case.note(f"gradients of {task}")
    leaves = [x.detach().requires_grad_() for x in task.given]
    own = [x for drawn in task.maps for x in drawn.map.parameters() if x.requires_grad]
    own = list({id(x): x for x in own}.values())
    with machine_of(task.sizes):
        found = within(task.limits, lambda: task.call(*leaves))
        if not task.is_usable:
            return
        pulled = prepared(case, task, found, own)
        ours = gradients(loss([result.tensors for result in found], pulled.weights), [*leaves, *own])
    hold(case, pulled, ours)


def _experiments(case: Case, pulled: Pulled) -> list[Tensor]:
    """How far gradients are off in the mean when every intermediate is off by its rounding."""
    task, weights = pulled.task, pulled.weights
    relative = max((_largest(one.relative) for one in pulled.truth), default=0.0)
    amplified = max(min(_AMPLIFIED, _SMALL / max(relative, 1e-300)), 1.0)
    noise = Noise(case.dice.normal, amplified, unit(task.dtype) if task.is_exact else 0.0)
    results = []
    for noisy in (False, True, True, True):
        inputs = [x.detach().requires_grad_() for x in pulled.exact]
        rows = task.truth(*inputs, noise if noisy else None)
        total = loss(_tensors(pulled.found, rows), weights)
        for result, one, given in zip(pulled.found, rows, weights, strict=True):
            # What a weight adds to the loss is a difference of products, each of them rounded; so is the weight.
            size = given[0].abs().sum(-1) * (1.0 if result.is_rows else one.largest) + sum(x.abs() for x in given[1:])
            rounding = unit(sums_dtype(task.dtype)) * (one.shares.shape[-1] + 16) + one.relative.unsqueeze(-1)
            total = total + (one.shares * noise(one.shares, rounding) * size.unsqueeze(-1)).sum() * noisy
        results.append(gradients(total, [*inputs, *pulled.own]))
    clean, *others = results
    squares = [
        torch.stack([(x - y).double().square() for x in group]).mean(0)
        for y, *group in zip(clean, *others, strict=True)
    ]
    return [square.sqrt() / amplified for square in squares]


def _lost_by_uses(pulled: Pulled) -> list[Tensor]:
    """What n uses of a query or a key lose by cancelling, n/2·u·(Σ|g_i| - |Σ g_i|); 0 for values and parameters."""

    def summed(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        inputs = [x.detach().requires_grad_() for x in pulled.exact]
        with changed_gradients(change):
            rows = pulled.task.truth(*inputs, None)
        return gradients(loss(_tensors(pulled.found, rows), pulled.weights), inputs[:2])

    numbers = summed(lambda grad: (grad != 0).to(grad.dtype))
    parts = zip(numbers, summed(torch.abs), summed(lambda grad: grad), strict=True)
    u = unit(pulled.task.dtype)
    lost = [n / 2 * u * (size - total.abs()).clamp(min=0) for n, size, total in parts]
    return [*lost, *(torch.zeros_like(x) for x in pulled.leaves[2:])]


def _weights(case: Case, result: Result, rows: Rows) -> list[Tensor]:
    """What the loss multiplies each tensor of a result with; 0 where nothing is known of a row."""
    found = [case.dice.normal(*result.out.shape).to(result.out.dtype).double() * rows.known.unsqueeze(-1)]
    if result.log is not None:
        finite = result.log.isfinite() & rows.log_normalizer.isfinite()
        found.append(case.dice.normal(*result.log.shape) * (rows.known & finite) * case.dice.pick(0.0, 1.0))
    return found


def _tensors(found: Sequence[Result], truth: Sequence[Rows]) -> list[list[Tensor]]:
    """The truth's tensors in the order of the results'."""
    pairs = zip(found, truth, strict=True)
    return [
        [one.weights if result.is_rows else one.out, *([] if result.log is None else [one.log_normalizer])]
        for result, one in pairs
    ]


def loss(tensors: Sequence[Sequence[Tensor]], weights: Sequence[Sequence[Tensor]]) -> Tensor:
    """Σ weight·tensor, in float64; what has no weight is left out, whatever it is."""
    total = torch.zeros((), dtype=torch.float64)
    for group, given in zip(tensors, weights, strict=True):
        for x, weight in zip(group, given, strict=True):
            total = total + (torch.where(weight != 0, x.double(), 0) * weight).sum()
    return total


def gradients(total: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Gradients, 0 for leaves that the loss does not depend on."""
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if y is None else y.detach() for x, y in zip(leaves, found, strict=True)]


def _check_finite(name: str, found: Tensor, wanted: Tensor) -> None:
    """Refuse gradients that are not finite, unless they are too large for their dtype."""
    largest = _largest(wanted)
    if largest <= _LARGEST * torch.finfo(found.dtype).max and not found.isfinite().all():
        raise MismatchError(f"gradient of {name} is not finite, wanted at most {largest:.3g}")


def _largest(x: Tensor) -> float:
    """The largest number of all."""
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _band(found: Tensor, wanted: Tensor, pulled: Pulled) -> Tensor:
    """A few roundings of the largest gradient of a head."""
    tiny = torch.finfo(sums_dtype(pulled.task.dtype)).tiny * 2.0**30 + torch.finfo(found.dtype).tiny
    # Low precision: gradients of several uses are rounded before they are added.
    uses = 16 if found.dtype in (torch.float32, torch.float64) else 32 * len(pulled.found)
    return unit(found.dtype) * (2 * wanted.abs() + uses * _spread(wanted)) + tiny


def _floor(task: Task, weights: Sequence[Sequence[Tensor]]) -> float:
    """Even a gradient of 0 is a difference of products; an expansion's moments are not centred on the keys seen."""
    query, key, value = (_largest(x) for x in task.exact_inputs())
    size, factor = 1 + max(query, key), 64.0
    if any(drawn.is_expansion for drawn in task.maps):
        means = [x for drawn in task.maps for x in drawn.map.buffers() if x.is_floating_point()]
        factor *= 4 * max(size, *(_largest(x) for x in means), 1.0)
    upstream = max((_largest(x) for given in weights for x in given), default=0.0)
    return factor * unit(sums_dtype(task.dtype)) * size * upstream * (1 + value)


def _spread(x: Tensor) -> Tensor:
    """The largest number of each head, or of all where there are no heads."""
    if not x.numel():
        return x.abs()
    return x.abs().amax((2, 3), keepdim=True) if x.ndim == 4 else x.abs().amax()
