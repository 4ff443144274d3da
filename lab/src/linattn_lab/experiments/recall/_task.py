"""Multi-query associative recall, by Zoology's protocol, and its variant in which keys are given a second value.

A context shows P pairs, two tokens each: a key, then its value. Keys come from [1, V/2), values from [V/2, V), none of
either twice. Then each key is shown once more, somewhere at an even distance from the context's end, and the next token
is to be the key's value. Of the slots for queries, pairs of tokens counted from n = 1, near ones are the likelier:
without replacement, with probabilities ∝ a·n^(a-1). Between queries stand random tokens, or token 0.

In the variant the pairs are followed by `num_updates` of the keys with another value each: the later value is right.

Letters: B sequences, P pairs, V size of the vocabulary, L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
"""The label where nothing is asked, which torch's cross_entropy ignores."""


@dataclass(frozen=True)
class Recall:
    """The task at one size.

    Attributes:
        vocab_size: V, even.
        num_tokens: L, even.
        num_pairs: P.
        num_updates: how many of the keys are given a second value.
        power: a; 1 makes all slots equally likely.
        random_non_queries: whether tokens that are neither pairs nor queries are random, of all V, or all 0.
    """

    vocab_size: int
    num_tokens: int
    num_pairs: int
    num_updates: int = 0
    power: float = 0.01
    random_non_queries: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes that hold no such sequence."""
        if self.vocab_size % 2 or self.num_tokens % 2:
            raise ValueError(f"the vocabulary and the length must be even, got {self.vocab_size} and {self.num_tokens}")
        if not 0 <= self.num_updates <= self.num_pairs or self.num_pairs < 1:
            raise ValueError(
                f"there must be a pair at least, and no more updates than pairs, got {self.num_pairs} and "
                f"{self.num_updates}"
            )
        if self.num_pairs > self.vocab_size // 2 - 1:
            raise ValueError(
                f"{self.num_pairs} different keys need a vocabulary of {2 * self.num_pairs + 2} at least, got "
                f"{self.vocab_size}"
            )
        if self.num_slots < self.num_pairs:
            raise ValueError(
                f"{self.num_pairs} pairs, {self.num_updates} updates and as many queries as pairs need "
                f"{self.context_size + 2 * self.num_pairs} tokens at least, got {self.num_tokens}"
            )
        if self.power <= 0:
            raise ValueError(f"the power must be positive, got {self.power}")

    @property
    def context_size(self) -> int:
        """Tokens before the first slot."""
        return 2 * (self.num_pairs + self.num_updates)

    @property
    def num_slots(self) -> int:
        """Places where a query may stand."""
        return (self.num_tokens - self.context_size) // 2


class Sequences(NamedTuple):
    """Sequences and what is asked of them.

    Attributes:
        tokens: (B, L) int64.
        labels: (B, L) int64, the value at a query, `IGNORED` elsewhere.
        places: (B, P) int64, where each pair's query stands, in the order of the pairs.
        shown: (B, P) int64, where the value that is right stands.
    """

    tokens: Tensor
    labels: Tensor
    places: Tensor
    shown: Tensor

    @property
    def answers(self) -> Tensor:
        """(B, P) int64, the values asked for, in the order of the pairs."""
        return self.labels.gather(1, self.places)


def sequences(task: Recall, number: int, source: torch.Generator) -> Sequences:
    """Draw sequences.

    Args:
        task: their size.
        number: B.
        source: what they are drawn from.
    """
    half, pairs = task.vocab_size // 2, task.num_pairs
    keys = 1 + _without_replacement(torch.ones(half - 1), number, pairs, source)
    values = half + _without_replacement(torch.ones(half), number, pairs, source)
    shown = torch.arange(1, 2 * pairs, 2).repeat(number, 1)
    context = [torch.stack((keys, values), -1)]
    if task.num_updates:
        updated = _without_replacement(torch.ones(pairs), number, task.num_updates, source)
        # A step of 1 to V/2 - 1 around the circle of values: any other one.
        steps = torch.randint(1, half, updated.shape, generator=source)
        later = half + (values.gather(1, updated) - half + steps) % half
        context.append(torch.stack((keys.gather(1, updated), later), -1))
        values = values.scatter(1, updated, later)
        shown = shown.scatter(1, updated, torch.arange(2 * pairs + 1, task.context_size, 2).repeat(number, 1))
    slots = _without_replacement(slot_weights(task), number, pairs, source)
    places = task.context_size + 2 * slots
    tokens = torch.zeros(number, task.num_tokens, dtype=torch.int64)
    if task.random_non_queries:
        tokens = torch.randint(task.vocab_size, tokens.shape, generator=source)
    tokens[:, : task.context_size] = torch.cat(context, 1).flatten(1)
    tokens.scatter_(1, places, keys)
    labels = torch.full_like(tokens, IGNORED).scatter_(1, places, values)
    return Sequences(tokens, labels, places, shown)


def slot_weights(task: Recall) -> Tensor:
    """Probabilities of the slots, a·n^(a-1) over their sum: (slots,) float64."""
    weights = task.power * torch.arange(1, task.num_slots + 1, dtype=torch.float64) ** (task.power - 1)
    return weights / weights.sum()


def _without_replacement(weights: Tensor, number: int, size: int, source: torch.Generator) -> Tensor:
    """Rows of `size` different indices, drawn one after the other with these weights: (number, size)."""
    # The first of exponential clocks of such rates, then the first of the rest, and so on.
    clocks = torch.empty(number, len(weights), dtype=torch.float64).exponential_(generator=source)
    return (clocks / weights).argsort(1)[:, :size]
