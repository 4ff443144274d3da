"""Weighted keys (k, v, β), each standing for many, and how they are merged; letters as in exact/__init__.py.

A weighted key adds exp(q·k + β) to the denominator and exp(q·k + β)·v to the numerator; an exact key has β = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.attention.exact.keys import Tokens
from linattn.attention.exact.partitioning import partition
from linattn.attention.exact.query_moments import QueryMoments
from linattn.attention.softmax import exponentials


def reduced(tokens: Tokens, moments: QueryMoments, num_merged: int) -> Tokens:
    """At most `num_merged` weighted keys in place of these (B, H, n, ·); O(n²·D + n·D²).

    The pairs that are merged are those of least Ward cost in the metric of the queries' covariance, with the weights at
    the mean query for masses. Which they are is a constant for gradients.
    """
    if tokens.bias.shape[2] <= num_merged:
        return tokens
    log_weight = tilt(tokens, moments.mean).detach()
    return merged(tokens, clusters(tokens, moments, log_weight, num_merged), moments.mean, num_merged)


def clusters(tokens: Tokens, moments: QueryMoments, log_mass: Tensor, num_merged: int) -> Tensor:
    """The number (B, H, n) of each key's cluster, `num_merged` for absent ones."""
    with torch.no_grad():
        log_weight = tilt(tokens, moments.mean)
        # Around their mean: differences of large products would lose digits.
        key = tokens.key - tokens.key.mean(2, keepdim=True)
        products = key @ moments.covariance @ key.mT
        squares = products.diagonal(dim1=-2, dim2=-1)
        distance = squares.unsqueeze(-1) + squares.unsqueeze(-2) - products - products.mT
        found: Tensor = partition(distance, log_weight, log_mass, num_merged)
    return found


def tilt(tokens: Tokens, mean: Tensor) -> Tensor:
    """t = q̄·k + β (B, H, n): the logarithms of the keys' weights at the mean query (B, H, D)."""
    return (tokens.key @ mean.unsqueeze(-1)).squeeze(-1) + tokens.bias


def merged(tokens: Tokens, number: Tensor, mean: Tensor, num_merged: int) -> Tokens:
    """One weighted key for each cluster of keys, by number (B, H, n); free places have bias -inf.

        k = Σ p_i k_i,   v = Σ p_i v_i,   β = log Σ exp(t_i) - q̄·k,   p = softmax(t) within the cluster, t = q̄·k + β

    At the mean query q̄ the denominator, its gradient in q, and the numerator are those of the keys merged. Several
    merges at one mean query are one: only who is with whom matters. O(n·C·(D + Dv)) for C clusters; differentiable in
    keys, values, biases and the mean query.
    """
    place = torch.arange(num_merged, device=number.device)
    member = number.unsqueeze(2) == place.unsqueeze(-1)  # (B, H, C, n)
    log_weight = tilt(tokens, mean)
    weights, peak = exponentials(torch.where(member, log_weight.unsqueeze(2), -torch.inf))
    total = weights.sum(-1, keepdim=True)
    safe = torch.where(total == 0, 1, total)
    shares = weights / safe
    key, value = shares @ tokens.key, shares @ tokens.value
    bias = (safe.log() + peak - key @ mean.unsqueeze(-1)).squeeze(-1)
    # A key that stays alone keeps its bias to the bit, however often it is looked at.
    alone = torch.where(member, tokens.bias.unsqueeze(2), 0).sum(-1)
    size = member.sum(-1)
    return Tokens(key, value, torch.where(size == 0, -torch.inf, torch.where(size == 1, alone, bias)))
