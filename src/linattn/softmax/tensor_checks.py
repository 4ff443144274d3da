"""Checks of the tensors of a state from elsewhere, in one place's words."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

TOKEN_DTYPES = {torch.float32: (torch.float32, torch.float16, torch.bfloat16), torch.float64: (torch.float64,)}
"""By the dtype of sums and biases, those of tokens beside them."""


def check_tensor(
    name: str, x: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, remedy: str
) -> None:
    """Refuse what is no tensor of this shape and dtype, or is on another device."""
    if not isinstance(x, Tensor) or x.shape != shape or x.dtype != dtype or x.device != device:
        refuse(name, x, f"{dtype} of shape {shape} on {device}", remedy)


def check_count(name: str, x: object, most: int | None, remedy: str) -> int:
    """How many tokens there are numbers (B, H, n) of, more than may be kept refused."""
    count: int = x.shape[2] if isinstance(x, Tensor) and x.ndim == 3 else -1
    if count < 0 or (most is not None and count > most):
        refuse(name, x, f"of shape (B, H, n{'' if most is None else f' ≤ {most}'})", remedy)
    return count


def check_kind(kind: type, name: str, x: object, remedy: str) -> None:
    """Refuse another kind of record."""
    if not isinstance(x, kind):
        refuse(name, x, f"a {kind.__name__}", remedy)


def refuse(name: str, x: object, wanted: str, remedy: str) -> NoReturn:
    """Say what was got, what was wanted and what to do."""
    if isinstance(x, Tensor):
        raise ValueError(
            f"the state's {name} must be {wanted}, got {x.dtype} of shape {tuple(x.shape)} on {x.device}; {remedy}"
        )
    raise TypeError(f"the state's {name} must be {wanted}, got {type(x).__name__}; {remedy}")
