"""The precision in which attention is computed."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from linattn.softmax.tracing import has_tangents, has_values

LOG2_E = math.log2(math.e)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums, exponents and divisions run in at least float32."""
    return torch.promote_types(dtype, torch.float32)


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context without autocast; entering one where none is at work would cost a single token a tenth of its time."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def small_power(dtype: torch.dtype, share: float = 0.5) -> float:
    """Power of two that lies this share of the way from 1 down to a dtype's smallest normal number."""
    return 2.0 ** int(math.log2(torch.finfo(dtype).tiny) * share)


def lift(x: Tensor) -> Tensor:
    """Factors exp(n), n whole, of numbers below `small_power` in size; 1 of others and 0; constants for gradients."""
    size, least = x.detach().abs(), small_power(x.dtype)
    return torch.where((size > 0) & (size < least), x.new_full((), math.exp(math.floor(-math.log(least)))), 1)


def divided(num: Tensor, den: Tensor) -> Tensor:
    """num/den, 0 where den is 0; lifted, since the gradient of a division divides by it twice."""
    safe = torch.where(den == 0, 1, den)
    factor = lift(safe)
    return torch.where(den == 0, 0, num * factor / (safe * factor))


def are_large(factors: Iterable[Tensor]) -> bool:
    """Whether any is above 1, as far as numbers may be looked at, and first derivatives alone are asked for."""
    return not has_tangents() and any(has_values(x) and bool((x > 1).any()) for x in factors)


def rescaled(x: Tensor, of_value: Tensor | float, of_gradient: Tensor | float) -> Tensor:
    """x times a factor, with its gradient times another."""
    # Infinities, as biases of masked keys, have no gradient.
    return x.detach() * of_value + torch.where(x.isfinite(), x - x.detach(), 0) * of_gradient


def enlarged(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in at least this dtype, its gradient divided by the `small_power` that a later `rescaled` multiplies it by."""
    large = rescaled(x.to(torch.promote_types(x.dtype, dtype)), 1, 1 / small_power(dtype))
    if large.requires_grad:
        large.register_hook(_refuse_second_derivatives)
    return large


def _refuse_second_derivatives(grad: Tensor) -> None:
    """Refuse gradients that are to be differentiated again: they would be enlarged twice."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "rows whose weights are so faint have first derivatives only, without create_graph; take float64, or "
            "queries and keys whose features are larger"
        )
