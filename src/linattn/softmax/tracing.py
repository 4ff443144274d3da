"""Whether something follows what is computed with tensors, or traces it; torch has no public names for most of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor

F = TypeVar("F", bound=Callable[..., object])


def constant_in_graphs(function: F) -> F:
    """Have a graph take a function's result for a constant; torch's own mark for it imports the compiler."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def is_followed(*tensors: Tensor | None) -> bool:
    """Whether autograd, dual numbers or torch.func follow what is computed with these."""
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return recorded or has_tangents() or is_transformed()


def has_tangents() -> bool:
    """Whether dual numbers are at work, as in torch.func's jvp, which torch's kernels for attention do not take."""
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether torch.func is at work: a tensor that it maps does not say whether it requires gradients."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """A context outside torch.func: what is kept from it for later calls is none of its wrappers."""
    return temporarily_clear_interpreter_stack() if is_transformed() else nullcontext()


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether a graph is made of these, or their shapes alone are computed: no value can be looked at."""
    return torch.compiler.is_compiling() or is_fake(*tensors) or _has_mode("PROXY")


def is_fake(*tensors: Tensor | None) -> bool:
    """Whether these have shapes alone, under FakeTensorMode."""
    return _has_mode("FAKE") or any(type(x) is not Tensor and isinstance(x, FakeTensor) for x in tensors)


def has_values(x: Tensor) -> bool:
    """Whether a tensor's numbers may be looked at: no graph, recording or transform would take them for constants."""
    return not (is_traced(x) or is_transformed()) and torch._C._get_tracing_state() is None


def _has_mode(name: str) -> bool:
    """Whether a dispatch mode of torch's tracers is at work."""
    return torch._C._get_dispatch_mode(getattr(torch._C._TorchDispatchModeKey, name)) is not None


def outside_inference(tensor: Tensor, *, even_within: bool = False) -> Tensor:
    """The tensor, or a copy of one made under an inference mode that is over: autograd and writes refuse such."""
    is_free = torch.compiler.is_compiling() or not tensor.is_inference()  # graphs hold none
    if is_free or (torch.is_inference_mode_enabled() and not even_within):
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()
