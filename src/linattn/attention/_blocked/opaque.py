"""The folds as one custom operator for torch.compile: the compiler sees shapes, never the loop.

A graph holds tensors and numbers only, so a feature map travels as its handle; every tensor of the map that needs a
gradient, or that belongs to the call, travels as a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from linattn.attention._blocked import fold
from linattn.attention._blocked.blocks import block_size
from linattn.attention._blocked.causal import num_checkpoints
from linattn.feature_maps import FeatureMap
from linattn.feature_maps._base import live_map


@torch.library.custom_op("linattn::fold", mutates_args=())
def _fold(
    name: str, span: int, handle: int, names: str, mask: Tensor | None, inputs: list[Tensor], own: list[Tensor]
) -> list[Tensor]:
    """Run the fold."""
    return list(fold.forward(fold.Task(name, span), live_map(handle), _named(names, own), mask, inputs))


@_fold.register_fake
def _(
    name: str, span: int, handle: int, names: str, mask: Tensor | None, inputs: list[Tensor], own: list[Tensor]
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
    "(str name, int span, int handle, str names, Tensor? mask, Tensor[] rest, Tensor[] own) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl("linattn::fold_backward", "default")
def _fold_backward(
    name: str, span: int, handle: int, names: str, mask: Tensor | None, rest: list[Tensor], own: list[Tensor]
) -> list[Tensor]:
    """Pull the fold back; `rest` is (*grads, *inputs, *outputs)."""
    return list(fold.backward(fold.Task(name, span), live_map(handle), _named(names, own), mask, rest))


@torch.library.register_fake("linattn::fold_backward")
def _(
    name: str, span: int, handle: int, names: str, mask: Tensor | None, rest: list[Tensor], own: list[Tensor]
) -> list[Tensor]:
    """The gradients' shapes."""
    count = fold.FOLDS[name].num_outputs
    inputs = rest[count : count + fold.FOLDS[name].num_inputs - 1]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (*inputs, *own)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Keep inputs and outputs."""
    name, span, handle, names, mask, tensors, own = inputs
    ctx.arguments, ctx.count = (name, span, handle, names), len(tensors)
    ctx.save_for_backward(mask, *tensors, *output, *own)
    ctx.mark_non_differentiable(*(output[i] for i in fold.FOLDS[name].constants))


def _pull(ctx: Any, grads: list[Tensor]) -> Any:
    """Gradients in the order of the arguments."""
    mask, *saved = ctx.saved_tensors
    num_own = len(ctx.arguments[3].split(",")) if ctx.arguments[3] else 0
    rest, own = saved[: len(saved) - num_own], saved[len(saved) - num_own :]
    outputs = rest[ctx.count :]
    dense = [torch.zeros_like(y) if g is None else g.contiguous() for g, y in zip(grads, outputs, strict=True)]
    found = torch.ops.linattn.fold_backward(*ctx.arguments, mask, [*dense, *rest], own)
    return None, None, None, None, None, [*found[: ctx.count - 1], None], found[ctx.count - 1 :]


_fold.register_autograd(_pull, setup_context=_setup)


def _named(names: str, own: list[Tensor]) -> dict[str, Tensor]:
    """The map's tensors by name."""
    return dict(zip(names.split(","), own, strict=True)) if names else {}


@torch.compiler.assume_constant_result
def _inside_a_transform() -> bool:
    """Whether torch.func is at work while the compiler traces; torch has no public name for this."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def run(
    task: fold.Task, feature_map: FeatureMap, own: Mapping[str, Tensor], mask: Tensor | None, *inputs: Tensor
) -> tuple[Tensor, ...]:
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
    return tuple(_fold(*task, feature_map.handle, ",".join(own), mask, list(inputs), list(own.values())))
