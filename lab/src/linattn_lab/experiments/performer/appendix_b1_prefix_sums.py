"""Prefix sums give the causal masked form exactly, from a state of constant size.

    S_t = Σ_{j≤t} φ(k_j)v_jᵀ,  z_t = Σ_{j≤t} φ(k_j),   out_t = φ(q_t)ᵀS_t / φ(q_t)ᵀz_t = [tril(φ(Q)φ(K)ᵀ)V]_t / row sum

An identity of finite sums: only rounding separates both sides, in whatever pieces the prefix sums are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from linattn.attention import State, linear_attention, linear_attention_with_state
from linattn.feature_maps import FavorPlus
from linattn_lab.experiments.experiment import Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import Tokens, gaussian_tokens
from linattn_lab.experiments.judging import decide, in_series

CLAIM = (
    "Causal attention with random features is computed by prefix sums instead of a masked matrix, with memory O(r·d) "
    "whatever the number of tokens."
)
SOURCE = "Performer paper (arXiv 2009.14794), section 2.5.1 and appendix B.1"
AXES = Axes(
    "tokens L", "largest difference over the largest output; numbers kept between tokens", log_x=True, log_y=True
)

_PIECES = ("in blocks", "token by token")
_DIFFERENCE = "difference from the masked matrix, "
_KEPT = "numbers kept, prefix sums"
_CACHE = "numbers kept, softmax attention"


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    lengths: tuple[int, ...]
    num_features: int = 32
    head_dim: int = 16
    sigma: float = 1.0


QUICK = Config(lengths=(16, 65, 256, 513), seconds=0.5)
FULL = Config(lengths=(16, 65, 256, 513, 1024), seconds=1)


def rows(config: Config) -> Iterator[Measurement]:
    """The difference from the masked matrix, and what is kept from one token to the next."""
    for length in config.lengths:
        for pieces in _PIECES:
            yield Measurement(_DIFFERENCE + pieces, length, partial(_difference, config, pieces, length))
        yield Measurement(_KEPT, length, partial(_kept, config, length))
        yield Measurement(_CACHE, length, partial(Figure, 2.0 * length * config.head_dim))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The largest difference against the rounding of a sum, and whether the state grows."""
    differences = [row for pieces in _PIECES for row in in_series(rows, _DIFFERENCE + pieces)]
    worst = max(differences, key=lambda row: row.value)
    kept, cached = in_series(rows, _KEPT), in_series(rows, _CACHE)
    constant = kept[-1].value == kept[0].value
    bound = 2.0**-52 * kept[-1].x
    return decide(
        holds=worst.value <= bound and constant,
        fails=worst.value > 2 * bound or not constant,
        figure=f"both sides differ by {worst.value:.0e} at most ({worst.series}, L = {worst.x:.0f}); "
        f"{kept[0].value:.0f} numbers are kept at L = {kept[0].x:.0f}, {kept[-1].value:.0f} at L = {kept[-1].x:.0f}, "
        f"where softmax attention keeps {cached[-1].value:.0f} (all keys and values)",
        tolerance=f"one rounding of float64 for each of L positive terms, {bound:.0e} of the largest output; none for "
        "what is kept",
    )


def _favor(config: Config) -> FavorPlus:
    """The map that is used throughout."""
    return FavorPlus(config.head_dim, config.num_features, seed=config.seed)


@lru_cache(maxsize=2)
def _masked(config: Config, length: int) -> tuple[Tokens, Tensor]:
    """Tokens, and attention over them by the masked matrix."""
    tokens = gaussian_tokens(length, config.head_dim, config.sigma, "prefix", config.seed)
    return tokens, linear_attention(*tokens, _favor(config), is_causal=True, backend="reference")


def _difference(config: Config, pieces: str, length: int) -> Figure:
    """Largest difference between prefix sums and the masked matrix, over the largest output."""
    tokens, masked = _masked(config, length)
    if pieces == _PIECES[0]:
        # One call, which cuts the sums as suits it.
        found = linear_attention(*tokens, _favor(config), is_causal=True)
    else:
        found = _token_by_token(config, tokens)
    return Figure(((found - masked).abs().max() / masked.abs().max()).item())


def _token_by_token(config: Config, tokens: Tokens) -> Tensor:
    """A stream of single tokens through the state."""
    favor, found = _favor(config), []
    state: State | None = None
    for query, key, value in zip(*(x.split(1, dim=2) for x in tokens), strict=True):
        out, state = linear_attention_with_state(query, key, value, favor, state)
        found.append(out)
    return torch.cat(found, dim=2)


def _kept(config: Config, length: int) -> Figure:
    """Numbers in the state after all tokens; expected are r·(d + 1) sums and an exponent for each feature."""
    tokens, _ = _masked(config, length)
    state: State = linear_attention_with_state(*tokens, _favor(config)).state
    sums = config.num_features * (config.head_dim + 2)
    return Figure(float(sum(x.numel() for x in (state.S, state.z, state.m))), None, float(sums))
