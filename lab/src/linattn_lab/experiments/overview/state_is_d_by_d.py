"""A map of width d keeps S = Σ φ(k)vᵀ, d×d, and z = Σ φ(k), d numbers, however long the sequence.

The overview leaves z out. An exponential map keeps the largest exponent of every feature beside them, another d
numbers: what S and z are relative to, so that nothing overflows; the others keep one such number. A map of width r
keeps r×d_v.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from linattn.attention import State, linear_attention_with_state
from linattn.feature_maps import EluPlusOne, Exponential, FeatureMap
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import gaussian_tokens
from linattn_lab.experiments.judging import decide, in_series

CLAIM = "The N×N attention matrix need not be stored: only a d×d matrix is."
SOURCE = 'overview, section "Advantages"'
AXES = Axes("tokens N", "numbers kept per head", log_x=True, log_y=True)

_MATRIX = "attention matrix, N×N"
_NAMES = ("elu(x) + 1", "exp(x/√d)")
_PARTS = ("S", "z", "exponents")


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    num_tokens: tuple[int, ...]
    head_dim: int = 64


QUICK = Config(num_tokens=(64, 512, 4096), seconds=0.2)
FULL = Config(num_tokens=(64, 256, 1024, 4096, 16384, 65536), seconds=2)


def rows(config: Config) -> Iterator[Measurement]:
    """What the state holds after so many tokens, by part, and what it replaces."""
    dim = config.head_dim
    for num_tokens in config.num_tokens:
        for which, name in enumerate(_NAMES):
            for part, expected in zip(_PARTS, (dim * dim, dim, _map(which, dim).num_exponents), strict=True):
                series = f"{part}, {name}"
                yield Measurement(series, num_tokens, partial(_kept, config, num_tokens, which, part, expected))
        yield Measurement(_MATRIX, num_tokens, partial(Figure, float(num_tokens**2)))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """S has d² numbers at every length, and what is kept beside it is no matrix."""
    matrices = [row for name in _NAMES for row in in_series(rows, f"S, {name}")]
    beside = [row for part in _PARTS[1:] for name in _NAMES for row in in_series(rows, f"{part}, {name}")]
    constant = all(row.value == row.expected for row in matrices + beside)
    most = max(
        sum(row.value for row in rows if row.series.endswith(name) and row.x == matrices[0].x) for name in _NAMES
    )
    longest = in_series(rows, _MATRIX)[-1]
    return decide(
        holds=constant,
        fails=not constant,
        figure=f"S has {matrices[-1].value:.0f} numbers after {matrices[0].x:.0f} tokens and after {longest.x:.0f}; "
        f"at most {max(row.value for row in beside):.0f} each for z and for the exponents stand beside it: "
        f"{most:.0f} in all, where the matrix would have {longest.value:.1e}",
        tolerance="counts, hence exact: d² for S, d for z, one exponent or d of them, at every N",
    )


def _map(which: int, head_dim: int) -> FeatureMap:
    """The map of a name."""
    return (EluPlusOne, Exponential)[which](head_dim)


def _kept(config: Config, num_tokens: int, which: int, part: str, expected: int) -> Figure:
    """Numbers in one part of the state."""
    state = _state(config, num_tokens, which)
    sizes = dict(zip(_PARTS, (state.S.numel(), state.z.numel(), state.m.numel()), strict=True))
    return Figure(float(sizes[part]), expected=float(expected))


@lru_cache(maxsize=1)
def _state(config: Config, num_tokens: int, which: int) -> State:
    """The state after a sequence of so many tokens."""
    tokens = gaussian_tokens(num_tokens, config.head_dim, 1.0, "state", config.seed)
    return linear_attention_with_state(*tokens, _map(which, config.head_dim)).state
