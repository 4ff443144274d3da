"""The folds as one custom operator for torch.compile: the compiler sees shapes, never the loop.

A graph holds tensors, numbers and strings only, so a fold travels as its path and a feature map as its handle; every
tensor of the map that needs a gradient, or that belongs to the call, travels as a tensor.
"""

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from linattn.attention.backends.blocked import fold
from linattn.attention.bound_map import check_unchanged
from linattn.feature_maps.base import live_map


@torch.library.custom_op("linattn::fold", mutates_args=())
def _fold(path: str, span: int, handle: int, names: str, inputs: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Run the fold, and tell the map by a number; biases, last of the inputs, may be missing."""
    task = _task(path, span, handle, names)
    number = hash(task.feature_map.fingerprint(task.names))
    return [*fold.forward(task, inputs, tensors), torch.full((), number, device=inputs[0].device)]


@_fold.register_fake
def _(path: str, span: int, handle: int, names: str, inputs: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The outputs' shapes."""
    record = _fold_at(path)
    return [*record.shapes(record.inputs(*inputs), span), inputs[0].new_empty((), dtype=torch.int64)]


# Not a custom_op: the fold pulls the map back with autograd, which a custom_op switches off around its body.
torch.library.define(
    "linattn::fold_backward",
    "(str path, int span, int handle, str names, bool bias_grad, Tensor[] saved, Tensor[] tensors) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl("linattn::fold_backward", "default")
def _fold_backward(
    path: str, span: int, handle: int, names: str, bias_grad: bool, saved: list[Tensor], tensors: list[Tensor]
) -> list[Tensor]:
    """Pull the fold back; `saved` is (*grads, *inputs, *outputs), and the map's number the last of the tensors."""
    task, (*tensors, number) = _task(path, span, handle, names), tensors
    # A CUDA graph under way cannot wait for a value.
    is_read = not (number.is_cuda and torch.cuda.is_current_stream_capturing())
    if is_read and number.item() != hash(task.feature_map.fingerprint(task.names)):
        check_unchanged(task.feature_map, "another one", task.names)
    return list(fold.backward(task, saved, tensors, bias_grad=bias_grad))


@torch.library.register_fake("linattn::fold_backward")
def _(
    path: str, span: int, handle: int, names: str, bias_grad: bool, saved: list[Tensor], tensors: list[Tensor]
) -> list[Tensor]:
    """The gradients' shapes."""
    count = len(_fold_at(path).outputs._fields)
    record = _fold_at(path).inputs(*saved[count:-count])
    inputs = [x for field, x in record._asdict().items() if field not in ("m", "bias")]
    shapes = [*inputs, *([record.bias] if bias_grad else []), *tensors[:-1]]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in shapes]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Keep inputs and outputs."""
    *ctx.arguments, fold_inputs, tensors = inputs
    task, (*outputs, number) = _task(*ctx.arguments), output
    bias = getattr(task.fold.inputs(*fold_inputs), "bias", None)
    ctx.bias_grad = bias is not None and bias.requires_grad
    ctx.counts = len(fold_inputs), len(fold_inputs) + len(outputs)
    ctx.save_for_backward(*fold_inputs, *outputs, *tensors, number)
    ctx.mark_non_differentiable(*task.fold.constants(task.feature_map, outputs), number)


def _pull(ctx: Any, grads: list[Tensor]) -> Any:
    """Gradients in the order of the arguments."""
    num_given, num_rest = ctx.counts
    saved, tensors = list(ctx.saved_tensors[:num_rest]), list(ctx.saved_tensors[num_rest:])
    outputs = saved[num_given:]
    dense = [torch.zeros_like(y) if g is None else g.contiguous() for g, y in zip(grads[:-1], outputs, strict=True)]
    gradients = torch.ops.linattn.fold_backward(*ctx.arguments, ctx.bias_grad, [*dense, *saved], tensors)
    of_inputs, of_tensors = fold.by_argument(_fold_at(ctx.arguments[0]), gradients, bias_grad=ctx.bias_grad)
    return None, None, None, None, of_inputs[:num_given], of_tensors


_fold.register_autograd(_pull, setup_context=_setup)


def _task(path: str, span: int, handle: int, names: str) -> fold.Task:
    """The task that these numbers and strings stand for."""
    return fold.Task(_fold_at(path), live_map(handle), tuple(names.split(",")) if names else (), span)


def _fold_at(path: str) -> fold.Fold:
    """The fold at a path, imported in a process that has not run it yet."""
    fold_at_path: fold.Fold = resolve_name(path)
    return fold_at_path


@torch.compiler.assume_constant_result
def _inside_a_transform() -> bool:
    """Whether torch.func or dual numbers are at work while a graph is made; torch has no public names for these."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def run(task: fold.Task, inputs: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The fold's outputs inside a graph; raises where something follows them that would be silently wrong."""
    if _inside_a_transform():
        raise NotImplementedError(
            "torch.func transforms (grad, vmap, jvp) and dual numbers inside torch.compile, or what else makes graphs, "
            f"are not supported by backend={task.fold.backend!r}; apply them outside the compiled function, or use "
            "backend='reference'"
        )
    present, names = [x for x in inputs if x is not None], ",".join(task.names)
    outputs: list[Tensor] = _fold(task.fold.path, task.span, task.feature_map.handle, names, present, list(tensors))
    return outputs[:-1]
