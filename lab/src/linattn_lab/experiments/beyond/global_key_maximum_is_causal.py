"""A maximum over all keys leaks future tokens into earlier rows, through the epsilon.

Dividing all key features by one number cancels between numerator and denominator, whatever it is, so a maximum over all
keys does no harm by itself. With an epsilon added to what is divided it does: a later key that raises the maximum
shrinks the earlier features beside the epsilon, and earlier outputs move towards averaging. A running maximum for each
feature needs no epsilon and reads the past alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from torch import Tensor

from linattn.attention import linear_attention
from linattn.feature_maps import FavorPlus
from linattn_lab.experiments.beyond._max_normalised import causal_max_normalised_attention
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import Tokens, gaussian_tokens, seed
from linattn_lab.experiments.judging import decide, in_series, value_at

CLAIM = "Subtracting the maximum over all keys, and adding an epsilon, leaves causal attention causal."
SOURCE = "assumed by the paper's code and the implementations that follow it (stabilised kernel features)"
AXES = Axes("factor on the last key", "largest change of an earlier output", log_y=True)

_EPSILON = 1e-6
_FACTOR = 3.0
_WITH = "maximum over all keys, epsilon 1e-6"
_WITHOUT = "maximum over all keys, no epsilon"
_RUNNING = "linear_attention: running maxima"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    draws: int
    factors: tuple[float, ...] = (2.0, 3.0, 4.0)
    num_tokens: int = 512
    num_features: int = 256
    head_dim: int = 64


QUICK = Config(draws=2, seconds=0.6)
FULL = Config(draws=20, seconds=6)


def rows(config: Config) -> Iterator[Measurement]:
    """What multiplying the last key alone does to the outputs before it."""
    for factor in config.factors:
        for series in (_WITH, _WITHOUT, _RUNNING):
            yield Measurement(series, factor, partial(_change, config, series, factor))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """Causal outputs do not change with the future, but for rounding."""
    leak, clean, running = (value_at(rows, series, _FACTOR) for series in (_WITH, _WITHOUT, _RUNNING))
    # Outputs are means of normal values: of order 1, largest about 4; weights are sums of R products.
    rounding = 2.0**-52 * FULL.num_tokens * FULL.num_features
    worst = max(row.value for row in in_series(rows, _WITH))
    return decide(
        holds=worst < rounding,
        fails=worst > rounding,
        figure=f"multiplying only the last key by {leak.x:.0f} changes an earlier output by {leak.value:.2g}, values "
        f"having deviation 1; without the epsilon by {clean.value:.0e}, with running maxima by {running.value:.0e}",
        tolerance=f"causal means within {rounding:.0e}: as many roundings of float64 as tokens times features",
    )


def _change(config: Config, series: str, factor: float) -> Figure:
    """Largest change over draws, tokens before the last, and channels."""
    changes = []
    for draw in range(config.draws):
        tokens = gaussian_tokens(config.num_tokens, config.head_dim, 1.0, "leak", config.seed, draw)
        tokens.key[..., -1, :] *= factor
        change = _attend(config, series, draw)(tokens) - _before(config, series, draw)
        changes.append(change[..., :-1, :].abs().max().item())
    return Figure(max(changes))


@lru_cache(maxsize=3 * FULL.draws)
def _before(config: Config, series: str, draw: int) -> Tensor:
    """The output of the tokens as they are."""
    tokens = gaussian_tokens(config.num_tokens, config.head_dim, 1.0, "leak", config.seed, draw)
    return _attend(config, series, draw)(tokens)


def _attend(config: Config, series: str, draw: int) -> Callable[[Tokens], Tensor]:
    """Causal attention as the series has it."""
    favor = FavorPlus(config.head_dim, config.num_features, seed=seed("leak", config.seed, draw))
    if series == _RUNNING:
        return lambda tokens: linear_attention(*tokens, favor, is_causal=True)
    epsilon = _EPSILON if series == _WITH else 0.0
    return lambda tokens: causal_max_normalised_attention(favor, tokens, epsilon)
