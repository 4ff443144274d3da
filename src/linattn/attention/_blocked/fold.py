"""The folds (absorb, read, causal) as differentiable operations.

Eager calls go through one `torch.autograd.Function`, whose backward pass is a Function too, so that torch.func.grad and
vmap compose; a vmapped dimension is folded into the batch. Compiled calls go through one custom operator, opaque to the
compiler: no loop is unrolled and the choice between joint and split blocks stays possible. Second derivatives and
forward-mode derivatives raise. Letters as in
_blocked/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.attention._blocked import (
    absorption,
    causal,
    causal_backward,
    grouped_causal,
    grouped_reading,
    mass,
    reading,
)
from linattn.feature_maps import FeatureMap
from linattn.feature_maps._swapping import with_swapped_tensors


class Task(NamedTuple):
    """Which fold to run and how.

    Attributes:
        name: a key of FOLDS.
        span: 0, or how many tokens make a span: rows of causal folds then see the keys of earlier spans only.
    """

    name: str
    span: int = 0

    @property
    def options(self) -> dict[str, int]:
        """What the fold's functions take beside tensors."""
        return {"span": self.span} if self.span else {}


class Fold(NamedTuple):
    """forward(map, mask, *inputs) -> outputs; backward(map, own, mask, grads, inputs, outputs) -> grads, own grads.

    The last input is the running maximum m, a constant; so are the outputs named here. `own` are tensors of the map.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[list[Tensor], list[Tensor]]]
    num_inputs: int
    num_outputs: int
    constants: tuple[int, ...]


FOLDS = {
    "absorb": Fold(absorption.forward, absorption.backward, 5, 3, (2,)),
    "read": Fold(reading.forward, reading.backward, 4, 3, (2,)),
    "causal": Fold(causal.forward, causal_backward.backward, 6, 9, (2, 5, 6, 7, 8)),
    "mass": Fold(mass.forward, mass.backward, 5, 1, (0,)),
    "grouped_read": Fold(grouped_reading.forward, grouped_reading.backward, 4, 3, ()),
    "grouped_causal": Fold(grouped_causal.forward, grouped_causal.backward, 6, 9, (5, 6, 7, 8)),
}


def run(
    task: Task,
    feature_map: FeatureMap,
    own: Mapping[str, Tensor],
    mask: Tensor | None,
    *inputs: Tensor,
) -> tuple[Tensor, ...]:
    """Run a fold on (mask, *inputs), with the map's tensors named in `own` replaced and differentiated."""
    if not is_followed(*inputs, *own.values()):
        return forward(task, feature_map, own, mask, inputs)
    found: tuple[Tensor, ...] = _Forward.apply(task, feature_map, tuple(own), mask, *inputs, *own.values())
    return found


def is_followed(*tensors: Tensor) -> bool:
    """Whether autograd, dual numbers or torch.func follow this call; torch has no public name for the last two."""
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    dual = torch.autograd.forward_ad._current_level >= 0
    return recorded or dual or torch._C._functorch.peek_interpreter_stack() is not None


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast; entering one where none is at work would cost a single token a tenth of its time."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def hosted(
    function: Callable[..., Any], feature_map: FeatureMap, own: Mapping[str, Tensor], device: torch.device, *args: Any
) -> Any:
    """function(feature_map, *args), outside autocast, with the map's tensors replaced by `own`."""
    with outside_autocast(device):
        return function(with_swapped_tensors(feature_map, own), *args)


def forward(
    task: Task, feature_map: FeatureMap, own: Mapping[str, Tensor], mask: Tensor | None, inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """The fold's outputs, no gradient recorded."""
    run_forward = partial(FOLDS[task.name].forward, **task.options)
    outputs: tuple[Tensor, ...] = hosted(run_forward, feature_map, own, inputs[0].device, mask, *inputs)
    return outputs


def backward(
    task: Task, feature_map: FeatureMap, own: Mapping[str, Tensor], mask: Tensor | None, rest: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of the inputs but m, then of the map's tensors; `rest` is (*grads, *inputs, *outputs)."""
    fold = FOLDS[task.name]
    count = fold.num_outputs
    own = {key: tensor.detach().requires_grad_() for key, tensor in own.items()}
    grads, inputs, outputs = rest[:count], rest[count : count + fold.num_inputs], rest[count + fold.num_inputs :]

    def pull(hosted_map: FeatureMap) -> tuple[list[Tensor], list[Tensor]]:
        return fold.backward(hosted_map, tuple(own.values()), mask, grads, inputs, outputs, **task.options)

    found, totals = hosted(pull, feature_map, own, inputs[0].device)
    return *found, *(total.to(tensor.dtype) for total, tensor in zip(totals, own.values(), strict=True))


class _Forward(torch.autograd.Function):
    """(task, map, names of own, mask, *inputs, *own) -> outputs."""

    @staticmethod
    def forward(task: Task, feature_map: FeatureMap, names: tuple[str, ...], mask: Any, *rest: Any) -> Any:
        """Run the fold."""
        count = FOLDS[task.name].num_inputs
        return forward(task, feature_map, dict(zip(names, rest[count:], strict=True)), mask, rest[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep inputs and outputs."""
        ctx.arguments, rest = inputs[:3], inputs[4:]
        # Autograd itself notices a change of the followed tensors, which are saved.
        ctx.fingerprint = inputs[1].fingerprint(inputs[2])
        fold = FOLDS[inputs[0].name]
        ctx.mark_non_differentiable(*(output[i] for i in fold.constants))
        ctx.save_for_backward(inputs[3], *rest[: fold.num_inputs], *output, *rest[fold.num_inputs :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients in the order of the arguments."""
        mask, *saved = ctx.saved_tensors
        now = ctx.arguments[1].fingerprint(ctx.arguments[2])
        if now != ctx.fingerprint:
            raise RuntimeError(
                f"the feature map was {ctx.fingerprint} in the forward pass and is {now} now: features are recomputed "
                "for gradients; redraw or fit after backward(), not before"
            )
        count = FOLDS[ctx.arguments[0].name].num_inputs
        found = _Backward.apply(*ctx.arguments, mask, *grads, *saved)
        return None, None, None, None, *found[: count - 1], None, *found[count - 1 :]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Fold the mapped dimension into the batch."""
        return _mapped(_Forward, info.batch_size, in_dims, arguments)


class _Backward(torch.autograd.Function):
    """(task, map, names of own, mask, *grads, *inputs, *outputs, *own) -> gradients; differentiable no further."""

    @staticmethod
    def forward(task: Task, feature_map: FeatureMap, names: tuple[str, ...], mask: Any, *rest: Any) -> Any:
        """Pull the fold back."""
        count = len(rest) - len(names)
        return backward(task, feature_map, dict(zip(names, rest[count:], strict=True)), mask, rest[:count])

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
        num_own = len(arguments[2])
        own, dims = arguments[len(arguments) - num_own :], in_dims[len(in_dims) - num_own :]
        if any(x.ndim - (dim is not None) != 4 for x, dim in zip(own, dims, strict=True)):
            raise NotImplementedError(
                "per-sample gradients (vmap over grad) of a feature map's own parameters are not supported by "
                "backend='blocked'; freeze them with requires_grad_(False), or use backend='reference'"
            )
        return _mapped(_Backward, info.batch_size, in_dims, arguments)


def _mapped(function: Any, size: int, in_dims: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """Apply a function of (task, map, names, *tensors, *own) with the mapped dimension folded into the batch."""
    count = len(arguments) - len(arguments[2])
    folded = [_folded(x, dim, size) for x, dim in zip(arguments[3:count], in_dims[3:count], strict=True)]
    folded += [_folded_own(x, dim, size) for x, dim in zip(arguments[count:], in_dims[count:], strict=True)]
    results = function.apply(*arguments[:3], *folded)
    return tuple(r.unflatten(0, (size, -1)) for r in results), (0,) * len(results)


def _folded(x: Any, dim: int | None, size: int) -> Any:
    """Move the mapped dimension of a (B, …) tensor into its batch."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _folded_own(x: Tensor, dim: int | None, size: int) -> Any:
    """The same for a tensor of the map: statistics of the call are (B, H, ·, D), all others are shared by the batch."""
    if x.ndim - (dim is not None) == 4:
        return _folded(x, dim, size)
    if dim is not None:
        raise NotImplementedError(
            "vmap over a feature map's own parameters is not supported by backend='blocked', got a mapped tensor of "
            f"shape {tuple(x.shape)}; give the map num_heads=… for one set per head, or use backend='reference'"
        )
    return x
