"""The folds as one custom operator for torch.compile: the compiler sees shapes, never the loop.

A graph holds tensors and numbers only, so a feature map travels as its handle; every tensor of the map that needs a
gradient, or that belongs to the call, travels as a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.attention.backends.blocked import fold
from linattn.attention.backends.blocked.blocks import block_size
from linattn.attention.backends.blocked.causal import num_checkpoints
from linattn.attention.bound_map import BoundMap
from linattn.feature_maps._base import live_map


@torch.library.custom_op("linattn::fold", mutates_args=())
def _fold(
    name: str, span: int, handle: int, names: str, bias: Tensor | None, inputs: list[Tensor], tensors: list[Tensor]
) -> list[Tensor]:
    """Run the fold."""
    return list(fold.forward(fold.Task(name, span), _bound(handle, names, tensors), bias, inputs))


@_fold.register_fake
def _(
    name: str, span: int, handle: int, names: str, bias: Tensor | None, inputs: list[Tensor], tensors: list[Tensor]
) -> list[Tensor]:
    """The outputs' shapes."""
    *_, S, z, m = inputs
    state = [x.new_empty(x.shape) for x in (S, z, m)]
    if name == "mass":
        return [z.new_empty(inputs[1].shape[:3])]
    if name == "absorb":
        return state
    query = inputs[0]
    rows = [query.new_empty(*query.shape[:-1], S.shape[-1])]
    rows += [S.new_empty(query.shape[:-1]) for _ in range(2)]
    if name.endswith("read"):
        return rows
    size = block_size(query.shape[:3].numel(), S.shape[2], query.device, is_causal=True, span=span)
    num_kept = num_checkpoints(query.shape[3], size)
    return [*rows, *state, *(x.new_empty(x.shape[0], num_kept, *x.shape[1:]) for x in (S, z, m))]


# Not a custom_op: the fold pulls the map back with autograd, which a custom_op switches off around its body.
torch.library.define(
    "linattn::fold_backward",
    "(str name, int span, int handle, str names, bool bias_grad, Tensor? bias, Tensor[] rest, Tensor[] tensors)"
    " -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl("linattn::fold_backward", "default")
def _fold_backward(
    name: str,
    span: int,
    handle: int,
    names: str,
    bias_grad: bool,
    bias: Tensor | None,
    rest: list[Tensor],
    tensors: list[Tensor],
) -> list[Tensor]:
    """Pull the fold back; `rest` is (*grads, *inputs, *outputs)."""
    return list(fold.backward(fold.Task(name, span), _bound(handle, names, tensors), bias, rest, bias_grad=bias_grad))


@torch.library.register_fake("linattn::fold_backward")
def _(
    name: str,
    span: int,
    handle: int,
    names: str,
    bias_grad: bool,
    bias: Tensor | None,
    rest: list[Tensor],
    tensors: list[Tensor],
) -> list[Tensor]:
    """The gradients' shapes."""
    count = fold.FOLDS[name].num_outputs
    inputs = rest[count : count + fold.FOLDS[name].num_inputs - 1]
    found = [*inputs, *([bias] if bias is not None and bias_grad else []), *tensors]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in found]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Keep inputs and outputs."""
    name, span, handle, names, bias, given, tensors = inputs
    ctx.arguments, ctx.count, ctx.num_bound = (name, span, handle, names), len(given), len(tensors)
    ctx.bias_grad = bias is not None and bias.requires_grad and fold.FOLDS[name].takes_bias
    ctx.save_for_backward(bias, *given, *output, *tensors)
    ctx.mark_non_differentiable(*(output[i] for i in fold.FOLDS[name].constants))


def _pull(ctx: Any, grads: list[Tensor]) -> Any:
    """Gradients in the order of the arguments."""
    bias, *saved = ctx.saved_tensors
    rest, tensors = saved[: len(saved) - ctx.num_bound], saved[len(saved) - ctx.num_bound :]
    outputs, count = rest[ctx.count :], ctx.count - 1
    dense = [torch.zeros_like(y) if g is None else g.contiguous() for g, y in zip(grads, outputs, strict=True)]
    found = torch.ops.linattn.fold_backward(*ctx.arguments, ctx.bias_grad, bias, [*dense, *rest], tensors)
    of_bias = found.pop(count) if ctx.bias_grad else None
    return None, None, None, None, of_bias, [*found[:count], None], found[count:]


_fold.register_autograd(_pull, setup_context=_setup)


def _bound(handle: int, names: str, tensors: list[Tensor]) -> BoundMap:
    """The map of a handle with tensors by name."""
    return BoundMap(live_map(handle), dict(zip(names.split(","), tensors, strict=True)) if names else {})


@torch.compiler.assume_constant_result
def _inside_a_transform() -> bool:
    """Whether torch.func is at work while the compiler traces; torch has no public name for this."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def run(task: fold.Task, bound: BoundMap, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """`fold.run` inside a compiled graph.

    Raises:
        NotImplementedError: a torch.func transform inside the compiled function; a custom operator would get it
            silently wrong (jvp: zero).
    """
    if _inside_a_transform():
        raise NotImplementedError(
            "torch.func transforms (grad, vmap, jvp) inside torch.compile are not supported by backend='blocked'; "
            "apply the transform outside the compiled function, or use backend='reference'"
        )
    names, tensors = ",".join(bound.tensors), list(bound.tensors.values())
    return tuple(_fold(*task, bound.feature_map.handle, names, bias, list(inputs), tensors))
