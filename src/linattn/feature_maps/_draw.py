"""Draw a random projection, the same on every device; letters as in feature_maps/__init__.py."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Draw = Literal["orthogonal", "iid"]
Lengths = Literal["chi", "fixed"]


def draw_projection(
    seed: int, num_rows: int, head_dim: int, *, draw: Draw, lengths: Lengths, num_heads: int | None
) -> Tensor:
    """Rows of W, (m, D) or (H, m, D), in float64 on the CPU: a pure function of its arguments."""
    # Normal tensors even when a model is built under inference mode: they are used in training later.
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator(device="cpu").manual_seed(seed)
        heads = 1 if num_heads is None else num_heads
        rows = _gaussian((heads, num_rows, head_dim), generator)
        if draw == "orthogonal":
            rows = _norms(rows) * _haar_blocks(heads, num_rows, head_dim, generator)
        if lengths == "fixed":
            rows = rows / _norms(rows) * math.sqrt(head_dim)
        # Rows after rows, as files hold them: another layout in memory may round products differently.
        return (rows.squeeze(0) if num_heads is None else rows).contiguous()


def orthogonal_pairs(num_rows: int, head_dim: int) -> int:
    """Ordered pairs of rows of one block: Σ n_b·(n_b - 1), blocks of D rows and a last one of what remains."""
    blocks, rest = divmod(num_rows, head_dim)
    return blocks * head_dim * (head_dim - 1) + rest * (rest - 1)


def _haar_blocks(heads: int, num_rows: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Unit rows (heads, m, D): each block of D rows is an orthogonal matrix of its own Haar draw, the last one cut."""
    num_blocks = -(-num_rows // head_dim)
    q, r = torch.linalg.qr(_gaussian((heads, num_blocks, head_dim, head_dim), generator))
    # QR fixes the signs of R's diagonal by convention; without this factor Q is not uniform and the kernel is biased.
    q = q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1)).unsqueeze(-2)
    blocks: Tensor = q.flatten(1, 2)[:, :num_rows]
    return blocks


def _norms(rows: Tensor) -> Tensor:
    """Lengths of rows, (..., m, 1)."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return norms


def _gaussian(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard normal numbers in float64 on the CPU, whatever the default device and dtype."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
