"""What a query reads does not grow with the keys: S and z have r·(Dv + 1) numbers, however many were folded into them.

Exact attention keeps N·(D + Dv) numbers and takes 2·N·(D + Dv) operations for a query. Constant means in N: the cost in
r, D and Dv is another claim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from torch import Tensor

from linattn.attention import State
from linattn.feature_maps import FavorPlus
from linattn.softmax import softmax_partial
from linattn_lab.experiments.counting import operations
from linattn_lab.experiments.experiment import EXACT, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import Tokens, gaussian_tokens
from linattn_lab.experiments.judging import decide, in_series

CLAIM = "All keys and values are compressed into S and z, and a query is a lookup in constant time."
SOURCE = 'derivation, section "Why Is Expanding |q+k|² the Key?"; the compression in the Chinese version'
AXES = Axes("tokens N folded before", "numbers kept, or operations of one query", log_x=True, log_y=True)

NUMBERS, OPERATIONS = "numbers kept", "operations of one query"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_tokens: tuple[int, ...]
    head_dim: int = 64
    num_features: int = 128


QUICK = Config(num_tokens=(1, 16, 256, 4096), seconds=0.3)
FULL = Config(num_tokens=(1, 16, 256, 4096, 65536), seconds=0.5)


def rows(config: Config) -> Iterator[Measurement]:
    """Both counts, beside those of exact attention, at every length."""
    for count in config.num_tokens:
        yield Measurement(NUMBERS, count, partial(_numbers, config, count))
        yield Measurement(OPERATIONS, count, partial(_operations, config, count))
        yield Measurement(f"{NUMBERS}, {EXACT}", count, partial(_exact_numbers, config, count))
        yield Measurement(f"{OPERATIONS}, {EXACT}", count, partial(_exact_operations, config, count))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Counts after the fewest and after the most tokens."""
    numbers, reads = in_series(rows, NUMBERS), in_series(rows, OPERATIONS)
    constant = all(len({row.value for row in counts}) == 1 for counts in (numbers, reads))
    return decide(
        holds=constant,
        fails=not constant,
        figure=f"after {numbers[0].x:,.0f} and after {numbers[-1].x:,.0f} tokens the state has {numbers[0].value:,.0f} "
        f"and {numbers[-1].value:,.0f} numbers, a query {reads[0].value:,.0f} and {reads[-1].value:,.0f} operations",
        tolerance="counted in what ran: equal or not",
    )


def _numbers(config: Config, num_tokens: int) -> Figure:
    """Numbers in S, z and the running maxima; expected r·(Dv + 2)."""
    _, state, _ = _folded(config, num_tokens)
    held = sum(part.numel() for part in (state.S, state.z, state.m))
    return Figure(held, expected=config.num_features * (config.head_dim + 2))


def _operations(config: Config, num_tokens: int) -> Figure:
    """Operations of φ(q), numerator and denominator; expected 2·r·(D + Dv + 1)."""
    favor, state, tokens = _folded(config, num_tokens)
    expected = 2 * config.num_features * (2 * config.head_dim + 1)
    return Figure(operations(lambda: state.read(favor, _last(tokens.query))), expected=expected)


def _exact_numbers(config: Config, num_tokens: int) -> Figure:
    """Keys and values."""
    tokens = _folded(config, num_tokens)[2]
    return Figure(tokens.key.numel() + tokens.value.numel())


def _exact_operations(config: Config, num_tokens: int) -> Figure:
    """Logits, and the mean of the values."""
    tokens = _folded(config, num_tokens)[2]
    return Figure(operations(lambda: softmax_partial(_last(tokens.query), tokens.key, tokens.value)))


def _last(query: Tensor) -> Tensor:
    """The latest query."""
    return query[:, :, -1:]


@lru_cache(maxsize=1)
def _folded(config: Config, num_tokens: int) -> tuple[FavorPlus, State, Tokens]:
    """A map, its state after so many keys, and the tokens."""
    tokens = gaussian_tokens(num_tokens, config.head_dim, 0.5, "lookup", config.seed)
    favor = FavorPlus(config.head_dim, config.num_features)
    empty = State.empty(
        favor, batch_size=1, num_heads=1, value_dim=config.head_dim, dtype=tokens.key.dtype, device=tokens.key.device
    )
    return favor, empty.absorb(favor, tokens.key, tokens.value), tokens
