"""What experiments feed to attention, Gaussian tokens and pairs at an angle, and how they sum up what comes of it.

Letters: L tokens, D head width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn_lab.experiments.experiment import Figure


class Tokens(NamedTuple):
    """Queries, keys and values of one head, each (1, 1, L, D) float64."""

    query: Tensor
    key: Tensor
    value: Tensor


def generator(*parts: float | str) -> torch.Generator:
    """A CPU generator whose seed is a digest of what it is for: no two purposes share their numbers."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:7], "big"))


def seed(*parts: float | str) -> int:
    """A seed for a feature map, as `generator` derives its own."""
    return generator(*parts).initial_seed()


def gaussian_tokens(num_tokens: int, head_dim: int, sigma: float, *parts: float | str) -> Tokens:
    """Queries and keys of independent N(0, sigma²) entries, values of N(0, 1)."""
    source = generator("tokens", num_tokens, head_dim, *parts)
    query, key, value = torch.randn(3, 1, 1, num_tokens, head_dim, generator=source, dtype=torch.float64)
    return Tokens(sigma * query, sigma * key, value)


def pair_at_angle(norm_x: float, norm_y: float, degrees: float, head_dim: int) -> tuple[Tensor, Tensor]:
    """Two vectors, (1, D) float64, of given lengths and with a given angle between them."""
    x, y = torch.zeros(2, 1, head_dim, dtype=torch.float64)
    x[0, 0] = norm_x
    y[0, 0] = norm_y * math.cos(math.radians(degrees))
    y[0, 1] = norm_y * math.sin(math.radians(degrees))
    return x, y


def mean_square(difference: Tensor) -> float:
    """Mean of the squares of all entries."""
    return difference.double().square().mean().item()


def overall_relative_error(found: Tensor, exact: Tensor) -> float:
    """|found - exact| / |exact| in the Frobenius norm; `found` may be broadcast."""
    return math.sqrt(mean_square(found - exact) / mean_square(exact))


def mean_figure(sample: Tensor | Sequence[float], expected: float | None = None) -> Figure:
    """Mean of independent numbers, two at least, with its standard error."""
    numbers = sample if isinstance(sample, Tensor) else torch.tensor(sample, dtype=torch.float64)
    return Figure(numbers.mean().item(), numbers.std().item() / math.sqrt(len(numbers)), expected)


def over_runs(runs: Sequence[Tensor]) -> Figure:
    """Mean over runs and test sequences; its error joins that of the sequences, common to the runs, and of the runs."""
    shares = torch.stack(tuple(runs))
    of_sequences = shares.mean(0).std().item() / math.sqrt(shares.shape[1])
    of_runs = shares.mean(1).std().item() / math.sqrt(len(runs)) if len(runs) > 1 else 0.0
    return Figure(shares.mean().item(), math.hypot(of_sequences, of_runs))
