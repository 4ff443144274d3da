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

from linattn.attention.backends.blocked import (
    absorption,
    causal,
    causal_backward,
    grouped_causal,
    grouped_reading,
    mass,
    reading,
)
from linattn.attention.backends.blocked.features import Gradients
from linattn.attention.bound_map import BoundMap
from linattn.feature_maps import FeatureMap


class Task(NamedTuple):
    """Which fold to run and how.

    Attributes:
        name: a key of FOLDS.
        span: 0, or how many tokens make a span: rows of causal folds then see the keys of earlier spans only.
    """

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


class Fold(NamedTuple):
    """forward(map, bias, *inputs) -> outputs; backward(map, tensors, bias, grads, inputs, outputs, bias_grad=…).

    The last input is the running maximum m, a constant; so are the outputs named here. `tensors` are those of the map
    that gradients follow. A fold without a backward function has constant outputs only.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., Gradients] | None
    num_inputs: int
    num_outputs: int
    constants: tuple[int, ...]
    takes_bias: bool = True


FOLDS = {
    "absorb": Fold(absorption.forward, absorption.backward, 5, 3, (2,)),
    "read": Fold(reading.forward, reading.backward, 4, 3, (2,), takes_bias=False),
    "causal": Fold(causal.forward, causal_backward.backward, 6, 9, (2, 5, 6, 7, 8)),
    "mass": Fold(mass.forward, None, 5, 1, (0,)),
    "grouped_read": Fold(grouped_reading.forward, grouped_reading.backward, 4, 3, (), takes_bias=False),
    "grouped_causal": Fold(grouped_causal.forward, grouped_causal.backward, 6, 9, (5, 6, 7, 8)),
}


def run(task: Task, bound: BoundMap, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Run a fold on keys with these biases, differentiating the inputs, the biases and the map's bound tensors."""
    names, tensors = tuple(bound.tensors), tuple(bound.tensors.values())
    if not is_followed(*inputs, *tensors, *(() if bias is None else (bias,))):
        return forward(task, bound, bias, inputs)
    found: tuple[Tensor, ...] = _Forward.apply(task, bound.feature_map, names, bias, *inputs, *tensors)
    return found


def is_followed(*tensors: Tensor) -> bool:
    """Whether autograd, dual numbers or torch.func follow this call; torch has no public name for the last two."""
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    dual = torch.autograd.forward_ad._current_level >= 0
    return recorded or dual or torch._C._functorch.peek_interpreter_stack() is not None


def forward(task: Task, bound: BoundMap, bias: Tensor | None, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The fold's outputs, no gradient recorded."""
    run_forward = partial(task.fold.forward, **task.options)
    outputs: tuple[Tensor, ...] = bound.run(run_forward, inputs[0].device, bias, *inputs)
    return outputs


def backward(
    task: Task, bound: BoundMap, bias: Tensor | None, rest: Sequence[Tensor], *, bias_grad: bool
) -> tuple[Tensor, ...]:
    """Gradients of the inputs but m, of the bias if asked for, and of the map's tensors.

    `rest` is (*grads, *inputs, *outputs).
    """
    fold = task.fold
    assert fold.backward is not None, f"{task.name} has no differentiable output"
    num_grads, num_given = fold.num_outputs, fold.num_outputs + fold.num_inputs
    grads, inputs, outputs = rest[:num_grads], rest[num_grads:num_given], rest[num_given:]
    leaves = BoundMap(bound.feature_map, {name: x.detach().requires_grad_() for name, x in bound.tensors.items()})
    tensors = tuple(leaves.tensors.values())
    pull_back = partial(fold.backward, bias_grad=bias_grad, **task.options)
    found: Gradients = leaves.run(pull_back, inputs[0].device, tensors, bias, grads, inputs, outputs)
    of_bias = () if found.bias is None else (found.bias,)
    return *found.inputs, *of_bias, *(x.to(y.dtype) for x, y in zip(found.tensors, tensors, strict=True))


class _Forward(torch.autograd.Function):
    """(task, map, names of the bound tensors, bias, *inputs, *bound tensors) -> outputs."""

    @staticmethod
    def forward(task: Task, feature_map: FeatureMap, names: tuple[str, ...], bias: Any, *rest: Any) -> Any:
        """Run the fold."""
        count = task.fold.num_inputs
        bound = BoundMap(feature_map, dict(zip(names, rest[count:], strict=True)))
        return forward(task, bound, bias, rest[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep inputs and outputs."""
        ctx.task, ctx.feature_map, ctx.names, bias, *rest = inputs
        # Autograd itself notices a change of the followed tensors, which are saved.
        ctx.fingerprint = ctx.feature_map.fingerprint(ctx.names)
        fold = ctx.task.fold
        ctx.mark_non_differentiable(*(output[i] for i in fold.constants))
        ctx.save_for_backward(bias, *rest[: fold.num_inputs], *output, *rest[fold.num_inputs :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients in the order of the arguments."""
        bias, *saved = ctx.saved_tensors
        now = ctx.feature_map.fingerprint(ctx.names)
        if now != ctx.fingerprint:
            raise RuntimeError(
                f"the feature map was {ctx.fingerprint} in the forward pass and is {now} now: features are recomputed "
                "for gradients; redraw or fit after backward(), not before"
            )
        count = ctx.task.fold.num_inputs - 1
        bias_grad = ctx.task.fold.takes_bias and bias is not None and ctx.needs_input_grad[3]
        found = list(_Backward.apply(ctx.task, ctx.feature_map, ctx.names, bias_grad, bias, *grads, *saved))
        of_bias = found.pop(count) if bias_grad else None
        return None, None, None, of_bias, *found[:count], None, *found[count:]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Fold the mapped dimension into the batch."""
        return _mapped(_Forward, info.batch_size, in_dims, arguments, num_static=3)


class _Backward(torch.autograd.Function):
    """(task, map, names, bias_grad, bias, *grads, *inputs, *outputs, *bound tensors) -> gradients, constants."""

    @staticmethod
    def forward(
        task: Task, feature_map: FeatureMap, names: tuple[str, ...], bias_grad: bool, bias: Any, *rest: Any
    ) -> Any:
        """Pull the fold back."""
        count = len(rest) - len(names)
        bound = BoundMap(feature_map, dict(zip(names, rest[count:], strict=True)))
        return backward(task, bound, bias, rest[:count], bias_grad=bias_grad)

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
