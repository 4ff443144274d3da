"""A small Transformer that learns associative recall with exact attention, to be gone on with under another attention.

A sequence shows P pairs, a token each: a key, all different, and the value that belongs to it; then it asks for the
keys again in another order. The answer is the value. Sequences are drawn anew for every step: there is nothing to
memorise, and attention has to find one token among P.

Letters: B batch, L = 2P tokens, E width of the network, H heads, D = E/H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from linattn.attention import linear_attention
from linattn.feature_maps import FeatureMap, RandomFeatureMap
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import EXACT, FigureRow
from linattn_lab.experiments.inputs import generator, seed

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

WIDTH, HEADS, LAYERS = 64, 2, 2
HEAD_DIM = WIDTH // HEADS
_BATCH = 32
_RATE, _TUNING_RATE = 3e-3, 1e-3
_WARM_UP = 100
_TESTED = 1000


@dataclass(frozen=True)
class Recall:
    """The task, and how long exact attention is trained on it."""

    symbols: int
    pairs: int
    steps: int


class Network(nn.Module):
    """Pre-LN Transformer without a mask; which attention it uses is said at every call."""

    def __init__(self, task: Recall) -> None:
        super().__init__()
        self.pairs = task.pairs
        self.keys = nn.Embedding(task.symbols, WIDTH)
        # One more: the value that is asked for.
        self.values = nn.Embedding(task.symbols + 1, WIDTH)
        self.positions = nn.Parameter(torch.randn(2 * task.pairs, WIDTH))
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, task.symbols)

    def forward(self, keys: Tensor, values: Tensor, attend: Attend) -> Tensor:
        """Logits of the answers: (B, L) and (B, L) symbols -> (B, P, symbols)."""
        x = self.keys(keys) + self.values(values) + self.positions
        for block in self.blocks:
            x = block(x, attend)
        logits: Tensor = self.head(self.norm(x[:, self.pairs :]))
        return logits


class _Block(nn.Module):
    """Attention and a perceptron of width 2E, both behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """(B, L, E) -> (B, L, E)."""
        heads = self.project(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(query, key, value).transpose(1, 2).flatten(2))
        done: Tensor = x + self.perceptron(x)
        return done


def average(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention that ignores queries and keys."""
    return value.mean(2, keepdim=True).expand_as(value)


def attention_with(feature_map: FeatureMap) -> Attend:
    """Linear attention with a map, which may be redrawn between calls."""
    return lambda query, key, value: linear_attention(query, key, value, feature_map)


@lru_cache(maxsize=2)
def _pretrained(task: Recall) -> Network:
    """The network trained with exact attention."""
    network = untrained(task, "pretraining")
    train(network, task, softmax_attention, task.steps, "pretraining", rate=_RATE, warm_up=_WARM_UP)
    return network


def pretrained(task: Recall) -> Network:
    """A copy of the network trained with exact attention."""
    return deepcopy(_pretrained(task))


def untrained(task: Recall, *parts: float | str) -> Network:
    """A network with weights as torch initialises them."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed("recall", "weights", *parts))
        return Network(task)


def train(
    network: Network,
    task: Recall,
    attend: Attend,
    steps: int,
    *parts: float | str,
    rate: float = _TUNING_RATE,
    warm_up: int = 1,
) -> None:
    """So many steps of AdamW."""
    for _ in islice(training(network, task, attend, *parts, rate=rate, warm_up=warm_up), steps):
        pass


def training(
    network: Network, task: Recall, attend: Attend, *parts: float | str, rate: float = _TUNING_RATE, warm_up: int = 1
) -> Iterator[int]:
    """Steps of AdamW without end, each on sequences of its own; yields how many were taken."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate)
    source = generator("recall", "sequences", *parts)
    taken = 0
    while True:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (taken + 1) / warm_up)
        keys, values, answers = _sequences(task, _BATCH, source)
        loss = cross_entropy(network(keys, values, attend).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        taken += 1
        yield taken


def accuracy(network: Network, task: Recall, attend: Attend) -> Tensor:
    """Share of right answers in each of 1000 sequences, the same at every call: (sequences,) float64."""
    keys, values, answers = _sequences(task, _TESTED, generator("recall", "test"))
    with torch.no_grad():
        right: Tensor = network(keys, values, attend).argmax(-1) == answers
    return right.double().mean(1)


def tuning_curve(network: Network, task: Recall, attend: Attend, steps: Sequence[int], draw: int) -> dict[int, Tensor]:
    """Tune a network, and give its `accuracy` after every one of these numbers of steps, 0 the first."""
    found = {0: accuracy(network, task, attend)}
    for step in training(network, task, attend, "swap", draw):
        if step in steps:
            found[step] = accuracy(network, task, attend)
        if step == steps[-1]:
            break
    return found


@lru_cache(maxsize=64)
def swapped(
    task: Recall, kind: type[RandomFeatureMap], width: int, draw: int, steps: tuple[int, ...]
) -> dict[int, Tensor]:
    """The pretrained network tuned under one draw of a map: its accuracy after so many steps."""
    return tuning_curve(pretrained(task), task, attention_with(swap_map(kind, width, draw)), steps, draw)


@lru_cache(maxsize=4)
def baseline(task: Recall, series: str, steps: tuple[int, ...]) -> dict[int, Tensor]:
    """The pretrained network tuned as long under exact attention, or under averaging."""
    attend = softmax_attention if series == EXACT else average
    return tuning_curve(pretrained(task), task, attend, steps, 0)


def swap_map(kind: type[RandomFeatureMap], width: int, draw: int) -> RandomFeatureMap:
    """The map a network is tuned under."""
    return kind(HEAD_DIM, width, seed=seed("swap", kind.__name__, width, draw))


def regained(curve: Sequence[FigureRow], exact: float) -> tuple[float, float]:
    """Share of the drop regained at the end of a curve, and its standard error."""
    drop = exact - curve[0].value
    share = (curve[-1].value - curve[0].value) / drop
    last, first = ((row.standard_error or 0.0) for row in (curve[-1], curve[0]))
    return share, math.hypot(last, (1 - share) * first) / drop


def _sequences(task: Recall, number: int, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Keys (B, L), values (B, L) with those asked for marked, and answers (B, P)."""
    keys = torch.rand(number, task.symbols, generator=source).argsort(1)[:, : task.pairs]
    values = torch.randint(task.symbols, (number, task.pairs), generator=source)
    order = torch.rand(number, task.pairs, generator=source).argsort(1)
    asked = torch.full_like(order, task.symbols)
    return torch.cat((keys, keys.gather(1, order)), 1), torch.cat((values, asked), 1), values.gather(1, order)
