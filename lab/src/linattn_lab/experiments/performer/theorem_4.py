"""m = Θ(d log d) hides a factor that is exponential in the squared length of queries and keys.

For queries and keys of length at most R the theorem asks for m of the order of (d/δ²)·log(4d^(3/4)·R/δ) projections,
with δ = ε·exp(-R²/√d): the factor exp(2R²/√d)/ε² does not depend on the number of tokens, nor on d where R = d^(1/4).
Tokens with standard normal entries have R = √d, and it is exp(2√d)/ε². That is no weakness of the proof: the variance
of one entry between orthogonal vectors of that length is (cosh(2√d) - 1)/m, and no m near d log d makes it small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch.nn.functional import normalize

from linattn.feature_maps import Trigonometric, features
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens, mean_figure, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, value_at
from linattn_lab.experiments.pairs import Pair, Projection, closed_error

CLAIM = (
    "m = Θ(d log d) random projections suffice to approximate the attention matrix accurately with orthogonal "
    "trigonometric features, whatever the number of tokens."
)
SOURCE = "Performer paper (arXiv 2009.14794), section 3: theorem 4 and what precedes it"
AXES = Axes("head width d", "projections needed for an error of 0.1, over d·log d", log_x=True, log_y=True)

EPSILON = 0.1
LENGTHS: dict[str, Callable[[float], float]] = {"√d": math.sqrt, "d^(1/4)": lambda dim: dim**0.25}
"""R, the lengths of queries and keys: those of standard normal tokens, and the longest whose logits stay bounded."""
_LONG, _SHORT = LENGTHS


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    draws: int
    head_dims: tuple[int, ...] = (16, 32, 64, 128, 256)
    measured: tuple[int, ...] = (16, 64)
    num_tokens: int = 64


QUICK = Config(draws=200, seconds=1.5)
FULL = Config(draws=1000, seconds=7)


def rows(config: Config) -> Iterator[Measurement]:
    """What the theorem asks for, what one entry's variance asks for, and what d log d leave to be desired."""
    for length in LENGTHS:
        for dim in config.head_dims:
            yield Measurement(f"theorem, lengths {length}", dim, partial(_theorem, length, dim))
            yield Measurement(f"variance of one entry, lengths {length}", dim, partial(_variance, length, dim))
        for dim in config.measured:
            yield Measurement(f"largest entry error, lengths {length}", dim, partial(_measured, config, length, dim))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """How the need grows over d log d, and whether d log d projections do."""
    low, high = (float(pick(QUICK.head_dims)) for pick in (min, max))
    growth = {
        (what, length): value_at(rows, f"{what}, lengths {length}", high).value
        / value_at(rows, f"{what}, lengths {length}", low).value
        for what in ("theorem", "variance of one entry")
        for length in LENGTHS
    }
    asked = value_at(rows, f"theorem, lengths {_LONG}", 64).value * _budget(64)
    left = value_at(rows, f"largest entry error, lengths {_LONG}", 64)
    misses = left.value - STANDARD_ERRORS * (left.standard_error or 0) > 1
    long = [growth[what, _LONG] for what in ("theorem", "variance of one entry")]
    short = [growth[what, _SHORT] for what in ("theorem", "variance of one entry")]
    return decide(
        holds=max(long) <= 1 and not misses,
        fails=min(long) > high and misses,
        figure=f"from d = {low:.0f} to {high:.0f} the projections that an entry between vectors of length √d needs "
        f"grow {long[1]:.1e} times more than d·log d does, those of the theorem {long[0]:.1e} times (at d = 64: "
        f"{asked:.1e}); for lengths d^(1/4) {short[1]:.2f} and {short[0]:.2f} times; d·log d = {_budget(64):.0f} "
        f"projections of tokens of length 8 miss an entry by {EPSILON * math.sqrt(left.value):.0f}, not {EPSILON}",
        tolerance="Θ(d·log d) allows no growth over d·log d; refuted where it exceeds d itself, hence every d²·log d, "
        f"and where the measured error exceeds ε by {STANDARD_ERRORS:.0f} standard errors",
    )


def projections_of_the_theorem(dim: int, length: float) -> float:
    """(d/δ²)·log(4d^(3/4)·R/δ) with δ = ε·exp(-R²/√d)."""
    delta = EPSILON * math.exp(-(length**2) / math.sqrt(dim))
    return dim / delta**2 * math.log(4 * dim**0.75 * length / delta)


def _budget(dim: int) -> float:
    """d·log d."""
    return dim * math.log(dim)


def _theorem(length: str, dim: int) -> Figure:
    """What the theorem asks for, over d·log d."""
    return Figure(projections_of_the_theorem(dim, LENGTHS[length](dim)) / _budget(dim))


def _variance(length: str, dim: int) -> Figure:
    """Independent rows that bring an entry of 1, between orthogonal vectors, to a deviation ε, over d·log d."""
    norm = LENGTHS[length](dim) / dim**0.25
    pair = Pair(norm, norm, 90)
    return Figure(closed_error("trigonometric", pair, Projection(1, dim, "iid")) / EPSILON**2 / _budget(dim))


def _measured(config: Config, length: str, dim: int) -> Figure:
    """(Largest error of an entry with ⌈d·log d⌉ projections, over ε)²: geometric mean over draws."""
    tokens = gaussian_tokens(config.num_tokens, dim, 1.0, "entries", config.seed)
    query, key = (LENGTHS[length](dim) * normalize(x[0], dim=-1) for x in tokens[:2])
    own = seed("entries", config.seed, dim, length)
    cosines = Trigonometric(dim, 2 * math.ceil(_budget(dim)), seed=own, num_heads=config.draws)
    estimate = features(cosines, query, "query") @ features(cosines, key, "key").mT
    largest = (estimate - cosines.kernel(query, key)).abs().flatten(1).amax(1)
    # The error falls as 1/√m; logarithms, because its square has a heavy tail.
    logs = mean_figure(2 * (largest / EPSILON).log())
    value = math.exp(logs.value)
    return Figure(value, value * (logs.standard_error or 0))
