"""The refusal of nested tensors, jagged or strided, in one place's words.

Letters: H heads, T tokens of all sequences.
"""

from __future__ import annotations

import torch


def check_dense(**tensors: object) -> None:
    """Refuse nested tensors."""
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and x.is_nested:
            kind = "jagged" if x.layout == torch.jagged else "strided"
            raise ValueError(
                f"{name} must be a dense tensor, got a nested one, {kind}; give sequences of different lengths, one "
                "after the other as (1, H, T, width), to linear_attention_packed, which takes x.values().unsqueeze(0) "
                "and x.offsets() of a jagged x of shape (B, H, L, width); or pad them, and say with "
                "key_mask where tokens are"
            )
