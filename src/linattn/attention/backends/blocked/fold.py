"""Folds as differentiable operations.

Eager calls go through one `torch.autograd.Function`, whose backward pass is a Function too, so that torch.func.grad and
vmap compose; a vmapped dimension is folded into the batch. Compiled calls go through one custom operator, opaque to the
compiler: no loop is unrolled and the choice between joint and split blocks stays possible. Second derivatives and
forward-mode derivatives raise. Letters as in blocked/__init__.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linattn.attention.backends.backend import lifted, lifts
from linattn.attention.backends.blocked.records import Gradients, Saved
from linattn.attention.bound_map import BoundMap, check_unchanged, with_swapped_tensors
from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.softmax.precision import outside_autocast, small_power
from linattn.softmax.tracing import is_followed, is_traced


class Fold(NamedTuple):
    """forward(map, inputs) -> outputs; backward(map, saved) -> gradients; records of tensors in and out."""

    path: str  # by which a graph finds it: its module's full name, and its name there
    forward: Callable[..., Any]
    backward: Callable[..., Gradients]
    inputs: Any
    outputs: Any
    shapes: Callable[[Any, int], Sequence[Tensor]]  # (inputs, span) -> memory of the outputs, for the compiler

    @property
    def backend(self) -> str:
        """The name of the backend that it is of; other packages' folds are plain torch."""
        return "triton" if self.path.startswith("linattn_triton.") else "blocked"

    def constants(self, feature_map: FeatureMap, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs without a gradient; a plain map's exponents of rows are maxima, a grouped one's are not."""
        followed = {"out", "den", "S", "z", "log_normalizer"} | (
            {"reference"} if isinstance(feature_map, GroupedFeatureMap) else set()
        )
        return [x for name, x in zip(self.outputs._fields, outputs, strict=True) if name not in followed]


class Task(NamedTuple):
    """Part of a call that autograd carries beside tensors."""

    fold: Fold
    feature_map: FeatureMap
    names: tuple[str, ...]  # of the map's tensors that the call binds
    span: int  # rows of a causal fold see the keys of earlier spans of so many tokens; 0: those up to their own

    @property
    def options(self) -> tuple[int, ...]:
        """Arguments of the fold's functions beside tensors."""
        return (self.span,) if self.span else ()

    def swapped(self, tensors: Sequence[Tensor]) -> FeatureMap:
        """The map with these tensors."""
        return with_swapped_tensors(self.feature_map, dict(zip(self.names, tensors, strict=True)))


def run(fold: Fold, bound: BoundMap, inputs: Any, span: int = 0) -> Any:
    """Run a fold, differentiating its inputs, the biases among them and the map's bound tensors."""
    traced, tensors = is_traced(inputs[0]), tuple(bound.tensors.values())
    if not (traced or is_followed(*inputs, *tensors)):
        with outside_autocast(inputs[0].device):
            return fold.forward(bound.swapped, inputs, *((span,) if span else ()))
    task = Task(fold, bound.feature_map, tuple(bound.tensors), span)
    if traced:
        # Imported here: torch's marks for its compiler import the compiler.
        from linattn.attention.backends.blocked import opaque

        outputs = fold.outputs(*opaque.run(task, inputs, tensors))
    else:
        outputs = fold.outputs(*_Forward.apply(task, *inputs, *tensors))
    return lifted(outputs, task.feature_map)


def _smaller(task: Task, saved: Saved, least: float) -> Saved:
    """The input of a backward pass for gradients times `least`, where any might overflow on its way to the tokens'.

    Callers have lifted numbers. The gradients of these lack the factors, most of which `least` takes back.
    """
    inputs, outputs, grads, *_ = saved
    factors = lifts(outputs, task.feature_map)
    # A CUDA graph under way cannot wait for a value.
    if not factors or inputs[0].is_meta or (inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        return saved
    large = [getattr(grads, name).abs() * least for name in factors if name != "den"]
    if not bool(torch.stack([(x > 1).any() for x in (*factors.values(), *large)]).any()):
        return saved
    smaller = {name: getattr(grads, name) * (factor * least) for name, factor in factors.items()}
    # Gradients of outputs stay: they are divided by larger denominators, before which sums might make them vanish.
    outputs = outputs._replace(**{name: outputs.den / least for name in factors if name == "den"})
    # float16 has no such numbers.
    wide = (x if x is None else x.to(torch.promote_types(x.dtype, torch.bfloat16)) for x in inputs)
    return saved._replace(inputs=type(inputs)(*wide), outputs=outputs, grads=grads._replace(**smaller))


def forward(task: Task, inputs: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    """The fold's outputs, no gradient recorded; the biases, last of the inputs, may be missing."""
    record = task.fold.inputs(*inputs)
    with outside_autocast(record[0].device):
        return task.fold.forward(task.swapped(tensors), record, *task.options)


def backward(task: Task, saved: Sequence[Any], tensors: Sequence[Tensor], *, bias_grad: bool) -> tuple[Tensor, ...]:
    """Gradients of the inputs but m, of the biases if asked for, and of the map's tensors.

    `saved` is (*gradients of the outputs, *inputs, *outputs); the biases, last of the inputs, may be missing.
    """
    fold = task.fold
    count = len(fold.outputs._fields)
    grads, inputs, outputs = saved[:count], saved[count:-count], saved[-count:]
    tensors = tuple(x.detach().requires_grad_() for x in tensors)
    record = Saved(fold.inputs(*inputs), fold.outputs(*outputs), fold.outputs(*grads), tensors, bias_grad)
    least = small_power(torch.promote_types(inputs[0].dtype, torch.float32), 1 / 3)
    small = _smaller(task, record, least)
    with outside_autocast(inputs[0].device):
        gradients = fold.backward(task.swapped(tensors), small, *task.options)
    of_bias = [] if gradients.bias is None else [gradients.bias]
    results = [*gradients.inputs, *of_bias, *gradients.tensors]
    if small is not record:
        # Sums' gradients may overflow for good; infinite ones would be NaN one fold further back.
        results = [(x / least).clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max) for x in results]
    places = [x for name, x in zip(fold.inputs._fields, inputs, strict=False) if name not in ("m", "bias")]
    return tuple(x.to(y.dtype) for x, y in zip(results, [*places, *of_bias, *tensors], strict=True))


def by_argument(fold: Fold, grads: Sequence[Tensor], *, bias_grad: bool) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients of all inputs, None for constants, and of the map's tensors, from the result of `backward`."""
    rest = list(grads)
    of_inputs = [rest.pop(0) if name not in ("m", "bias") else None for name in fold.inputs._fields]
    if bias_grad:
        of_inputs[-1] = rest.pop(0)
    return of_inputs, rest


class _Forward(torch.autograd.Function):
    """(task, *inputs, *bound tensors) -> outputs."""

    @staticmethod
    def forward(task: Task, *rest: Any) -> Any:
        """Run the fold."""
        count = len(rest) - len(task.names)
        return tuple(forward(task, rest[:count], rest[count:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep inputs and outputs."""
        ctx.task, *rest = inputs
        ctx.fingerprint = ctx.task.feature_map.fingerprint(ctx.task.names)
        fold, count = ctx.task.fold, len(rest) - len(ctx.task.names)
        ctx.mark_non_differentiable(*fold.constants(ctx.task.feature_map, output))
        ctx.save_for_backward(*rest[:count], *output, *rest[count:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Gradients in the order of the arguments."""
        task, fold = ctx.task, ctx.task.fold
        check_unchanged(task.feature_map, ctx.fingerprint, task.names)
        # One argument stands before the inputs, of which the biases are the last.
        bias_grad = "bias" in fold.inputs._fields and ctx.needs_input_grad[len(fold.inputs._fields)]
        gradients = _Backward.apply(task, bias_grad, *grads, *ctx.saved_tensors)
        of_inputs, of_tensors = by_argument(fold, gradients, bias_grad=bias_grad)
        return None, *of_inputs, *of_tensors

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refuse forward-mode derivatives."""
        raise NotImplementedError(
            f"backend={ctx.task.fold.backend!r} has no forward-mode derivatives (jvp, jacfwd, hessian); use "
            "backend='reference' for those"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Fold the mapped dimension into the batch."""
        return _mapped(_Forward, info.batch_size, in_dims, arguments, num_static=1)


class _Backward(torch.autograd.Function):
    """(task, bias_grad, *grads, *inputs, *outputs, *bound tensors) -> gradients, constants."""

    @staticmethod
    def forward(task: Task, bias_grad: bool, *rest: Any) -> Any:
        """Pull the fold back."""
        count = len(rest) - len(task.names)
        return backward(task, rest[:count], rest[count:], bias_grad=bias_grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept but the name for the refusal."""
        ctx.backend = inputs[0].fold.backend

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Refuse second derivatives."""
        raise NotImplementedError(
            f"backend={ctx.backend!r} has first derivatives only; use backend='reference' for second derivatives"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        """Fold the mapped dimension into the batch, unless that would sum the samples' gradients of shared tensors."""
        first = len(arguments) - len(arguments[0].names)
        if any(not _is_of_call(x, dim) for x, dim in zip(arguments[first:], in_dims[first:], strict=True)):
            raise NotImplementedError(
                "per-sample gradients (vmap over grad) of a feature map's own parameters are not supported by "
                f"backend={arguments[0].fold.backend!r}; freeze them with requires_grad_(False), or use "
                "backend='reference'"
            )
        return _mapped(_Backward, info.batch_size, in_dims, arguments, num_static=2)


def _mapped(function: Any, size: int, in_dims: Sequence[Any], arguments: Sequence[Any], *, num_static: int) -> Any:
    """Apply a function of (task, …, *tensors, *bound tensors) with the mapped dimension in the batch."""
    first_bound, folded = len(arguments) - len(arguments[0].names), []
    for place, (x, dim) in enumerate(zip(arguments[num_static:], in_dims[num_static:], strict=True), num_static):
        is_shared = place >= first_bound and not _is_of_call(x, dim)
        if is_shared and dim is not None:
            raise NotImplementedError(
                "vmap over a feature map's own parameters is not supported by "
                f"backend={arguments[0].fold.backend!r}, got a mapped tensor of shape {tuple(x.shape)}; give the map "
                "num_heads=… for one set per head, or use backend='reference'"
            )
        if x is not None and not is_shared:
            x = (x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        folded.append(x)
    results = function.apply(*arguments[:num_static], *folded)
    return tuple(r.unflatten(0, (size, -1)) for r in results), (0,) * len(results)


def _is_of_call(x: Tensor, dim: int | None) -> bool:
    """Whether a bound tensor is a statistic of the call, (B, H, ·, D); all others are shared by the batch."""
    return x.ndim - (dim is not None) == 4
