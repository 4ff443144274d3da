"""The folds (absorb, read, causal) as differentiable operations.

Eager calls go through one `torch.autograd.Function`, whose backward pass is a Function too, so that torch.func.grad and
vmap compose; a vmapped dimension is folded into the batch. Compiled calls go through one custom operator, opaque to the
compiler: no loop is unrolled and the choice between joint and split blocks stays possible. Second derivatives and
forward-mode derivatives raise. Letters as in blocked/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.backend import Rows
from linattn.attention.backends.blocked import absorption, causal, causal_backward, reading
from linattn.attention.backends.blocked.records import (
    Absorb,
    Causal,
    CausalOutputs,
    Gradients,
    MassOutputs,
    Read,
    Saved,
)
from linattn.attention.bound_map import BoundMap
from linattn.attention.sums import Sums
from linattn.feature_maps import FeatureMap, GroupedFeatureMap


class Fold(NamedTuple):
    """forward(map, inputs) -> outputs; backward(map, saved) -> gradients; records of tensors in and out."""

    forward: Callable[..., Any]
    backward: Callable[..., Gradients] | None  # None where all outputs are constants
    inputs: Any
    outputs: Any

    def constants(self, feature_map: FeatureMap, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs without a gradient; a plain map's exponents of rows are maxima, a grouped one's are not."""
        followed = {"out", "den", "S", "z"} | ({"reference"} if isinstance(feature_map, GroupedFeatureMap) else set())
        return [x for name, x in zip(self.outputs._fields, outputs, strict=True) if name not in followed]


FOLDS = {
    "absorb": Fold(absorption.forward, absorption.backward, Absorb, Sums),
    "read": Fold(reading.forward, reading.backward, Read, Rows),
    "causal": Fold(causal.forward, causal_backward.backward, Causal, CausalOutputs),
    "mass": Fold(reading.mass, None, Causal, MassOutputs),
}


class Task(NamedTuple):
    """Which fold to run and how: rows of causal folds with a span see the keys of earlier spans of so many tokens."""

    name: str
    span: int = 0

    @property
    def fold(self) -> Fold:
        """Its functions."""
        return FOLDS[self.name]

    @property
    def options(self) -> dict[str, int]:
        """What the fold's functions take beside tensors."""
        return {"span": self.span} if self.span else {}


def run(task: Task, bound: BoundMap, inputs: Any) -> Any:
    """Run a fold, differentiating its inputs, the biases among them and the map's bound tensors."""
    if torch.compiler.is_compiling():
        # Imported here: torch's marks for its compiler import the compiler.
        from linattn.attention.backends.blocked import opaque

        return task.fold.outputs(*opaque.run(task, bound, inputs))
    names, tensors = tuple(bound.tensors), tuple(bound.tensors.values())
    if not is_followed(*inputs, *tensors):
        return forward(task, bound, inputs)
    return task.fold.outputs(*_Forward.apply(task, bound.feature_map, names, *inputs, *tensors))


def is_followed(*tensors: Tensor | None) -> bool:
    """Whether autograd, dual numbers or torch.func follow this call; torch has no public name for the last two."""
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    dual = torch.autograd.forward_ad._current_level >= 0
    return recorded or dual or torch._C._functorch.peek_interpreter_stack() is not None


def forward(task: Task, bound: BoundMap, inputs: Any) -> Any:
    """The fold's outputs, no gradient recorded."""
    return bound.run(partial(task.fold.forward, **task.options), inputs.S.device, inputs)


def backward(task: Task, bound: BoundMap, saved: Sequence[Any], *, bias_grad: bool) -> tuple[Tensor, ...]:
    """Gradients of the inputs but m, of the biases if asked for, and of the map's tensors.

    `saved` is (*gradients of the outputs, *inputs, *outputs); the biases, last of the inputs, may be missing.
    """
    fold = task.fold
    assert fold.backward is not None, f"{task.name} has no differentiable output"
    count = len(fold.outputs._fields)
    grads, inputs, outputs = saved[:count], saved[count:-count], saved[-count:]
    leaves = BoundMap(bound.feature_map, {name: x.detach().requires_grad_() for name, x in bound.tensors.items()})
    tensors = tuple(leaves.tensors.values())
    record = Saved(fold.inputs(*inputs), fold.outputs(*outputs), fold.outputs(*grads), tensors, bias_grad)
    found: Gradients = leaves.run(partial(fold.backward, **task.options), inputs[0].device, record)
    of_bias = () if found.bias is None else (found.bias,)
    return *found.inputs, *of_bias, *(x.to(y.dtype) for x, y in zip(found.tensors, tensors, strict=True))


def by_argument(fold: Fold, found: Sequence[Tensor], *, bias_grad: bool) -> tuple[list[Tensor | None], list[Tensor]]:
    """What `backward` returns as gradients of all inputs, None for constants, and of the map's tensors."""
    rest = list(found)
    of_inputs = [rest.pop(0) if name not in ("m", "bias") else None for name in fold.inputs._fields]
    if bias_grad:
        of_inputs[-1] = rest.pop(0)
    return of_inputs, rest


class _Forward(torch.autograd.Function):
    """(task, map, names of the bound tensors, *inputs, *bound tensors) -> outputs."""

    @staticmethod
    def forward(task: Task, feature_map: FeatureMap, names: tuple[str, ...], *rest: Any) -> Any:
        """Run the fold."""
        count = len(task.fold.inputs._fields)
        bound = BoundMap(feature_map, dict(zip(names, rest[count:], strict=True)))
        return tuple(forward(task, bound, task.fold.inputs(*rest[:count])))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep inputs and outputs."""
        ctx.task, ctx.feature_map, ctx.names, *rest = inputs
        # Autograd itself notices a change of the followed tensors, which are saved.
        ctx.fingerprint = ctx.feature_map.fingerprint(ctx.names)
        fold, count = ctx.task.fold, len(ctx.task.fold.inputs._fields)
        ctx.mark_non_differentiable(*fold.constants(ctx.feature_map, output))
        ctx.save_for_backward(*rest[:count], *output, *rest[count:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients in the order of the arguments."""
        saved, fold = ctx.saved_tensors, ctx.task.fold
        now = ctx.feature_map.fingerprint(ctx.names)
        if now != ctx.fingerprint:
            raise RuntimeError(
                f"the feature map was {ctx.fingerprint} in the forward pass and is {now} now: features are recomputed "
                "for gradients; redraw or fit after backward(), not before"
            )
        # Three arguments stand before the inputs, of which the biases are the last.
        bias_grad = "bias" in fold.inputs._fields and ctx.needs_input_grad[2 + len(fold.inputs._fields)]
        found = _Backward.apply(ctx.task, ctx.feature_map, ctx.names, bias_grad, *grads, *saved)
        of_inputs, of_tensors = by_argument(fold, found, bias_grad=bias_grad)
        return None, None, None, *of_inputs, *of_tensors

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Fold the mapped dimension into the batch."""
        return _mapped(_Forward, info.batch_size, in_dims, arguments, num_static=3)


class _Backward(torch.autograd.Function):
    """(task, map, names, bias_grad, *grads, *inputs, *outputs, *bound tensors) -> gradients, constants."""

    @staticmethod
    def forward(task: Task, feature_map: FeatureMap, names: tuple[str, ...], bias_grad: bool, *rest: Any) -> Any:
        """Pull the fold back."""
        count = len(rest) - len(names)
        bound = BoundMap(feature_map, dict(zip(names, rest[count:], strict=True)))
        return backward(task, bound, rest[:count], bias_grad=bias_grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Refuse second derivatives."""
        raise NotImplementedError(
            "backend='blocked' has first derivatives only; use backend='reference' for second derivatives"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Fold the mapped dimension into the batch, unless that would sum the samples' gradients of shared tensors."""
        first = len(arguments) - len(arguments[2])
        if any(x.ndim - (dim is not None) != 4 for x, dim in zip(arguments[first:], in_dims[first:], strict=True)):
            raise NotImplementedError(
                "per-sample gradients (vmap over grad) of a feature map's own parameters are not supported by "
                "backend='blocked'; freeze them with requires_grad_(False), or use backend='reference'"
            )
        return _mapped(_Backward, info.batch_size, in_dims, arguments, num_static=4)


def _mapped(function: Any, size: int, in_dims: Sequence[Any], arguments: Sequence[Any], *, num_static: int) -> Any:
    """Apply a function of (task, map, names, …, *tensors, *bound tensors) with the mapped dimension in the batch."""
    count = len(arguments) - len(arguments[2])
    tokens, bound = slice(num_static, count), slice(count, None)
    folded = [_folded(x, dim, size) for x, dim in zip(arguments[tokens], in_dims[tokens], strict=True)]
    folded += [_folded_bound(x, dim, size) for x, dim in zip(arguments[bound], in_dims[bound], strict=True)]
    results = function.apply(*arguments[:num_static], *folded)
    return tuple(r.unflatten(0, (size, -1)) for r in results), (0,) * len(results)


def _folded(x: Any, dim: int | None, size: int) -> Any:
    """Move the mapped dimension of a (B, …) tensor into its batch."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _folded_bound(x: Tensor, dim: int | None, size: int) -> Any:
    """The same for a tensor of the map: statistics of the call are (B, H, ·, D), all others are shared by the batch."""
    if x.ndim - (dim is not None) == 4:
        return _folded(x, dim, size)
    if dim is not None:
        raise NotImplementedError(
            "vmap over a feature map's own parameters is not supported by backend='blocked', got a mapped tensor of "
            f"shape {tuple(x.shape)}; give the map num_heads=… for one set per head, or use backend='reference'"
        )
    return x
