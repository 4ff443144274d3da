"""Whether something follows what is computed with tensors; torch has no public names for most of it."""

from __future__ import annotations

import torch
from torch import Tensor


def is_followed(*tensors: Tensor | None) -> bool:
    """Whether autograd, dual numbers or torch.func follow what is computed with these."""
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if torch.compiler.is_compiling():
        return recorded
    return recorded or torch.autograd.forward_ad._current_level >= 0 or is_transformed()


def is_transformed() -> bool:
    """Whether torch.func is at work: a tensor that it maps does not say whether it requires gradients."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
