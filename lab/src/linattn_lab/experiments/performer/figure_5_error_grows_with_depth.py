"""An approximate attention in every layer: the errors of the layers add up like independent ones, as √layers.

The network is pre-LN with random weights, as torch initialises linear layers (variance 1/(3·fan-in)) but without
biases; queries and keys are taken from weights of variance 1/(3·fan-in) and of 1/fan-in. Residual streams carry an
error on unchanged, layer norms keep it from growing faster. Attention with random weights is close to uniform, so
averaging the values is the better approximation here at every depth: figure 5 of the paper has no such baseline.

Letters: L tokens, E width of the network, H heads, D = E/H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from linattn.attention import linear_attention
from linattn.feature_maps import FavorPlus, FeatureMap, Hyperbolic, Taylor
from linattn.softmax import softmax_attention
from linattn_lab.experiments.experiment import UNIFORM, Axes, Figure, FigureRow, Measurement, Sizes, Verdict
from linattn_lab.experiments.inputs import generator, mean_figure, seed
from linattn_lab.experiments.judging import STANDARD_ERRORS, decide, in_series, slope, value_at
from linattn_lab.experiments.performer._recall import Attend, average

CLAIM = "With more layers the error of the Performer's output grows."
SOURCE = "Performer paper (arXiv 2009.14794), section 4.2, figure 5 (left) and figure 14; the baselines are added"
AXES = Axes("layers", "relative error of the hidden state", log_x=True, log_y=True)

_WIDTH, _HEADS, _NUM_TOKENS = 256, 4, 256
_HEAD_DIM = _WIDTH // _HEADS
_DEPTHS = (1, 2, 4, 6, 8, 12)
# Variance of weights times their fan-in: torch's own, and what keeps queries and keys at N(0, 1).
_DEFAULT, _UNIT = 1 / 3, 1.0
_SCALES = {_DEFAULT: "default weights", _UNIT: "queries and keys N(0, 1)"}

_MAPS: dict[str, Callable[[int], FeatureMap]] = {
    "FAVOR+, r = 64": lambda seed: FavorPlus(_HEAD_DIM, 64, seed=seed),
    "FAVOR+, r = 256": lambda seed: FavorPlus(_HEAD_DIM, 256, seed=seed),
    "hyperbolic, fixed lengths, r = 256": lambda seed: Hyperbolic(_HEAD_DIM, 256, lengths="fixed", seed=seed),
    "Taylor of order 1": lambda seed: Taylor(_HEAD_DIM, order=1),
}
_JUDGED = tuple(name for name in _MAPS if name.startswith("FAVOR+"))


@dataclass(frozen=True)
class Config(Sizes):
    """Sizes of the experiment."""

    networks: int


QUICK = Config(networks=3, seconds=3)
FULL = Config(networks=20, seconds=30)


class _Layer(NamedTuple):
    """Weights of one layer, each applied from the right."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    up: Tensor
    down: Tensor


def rows(config: Config) -> Iterator[Measurement]:
    """The error after so many layers, for every map and both scales of the logits."""
    for scale in _SCALES:
        for name in (UNIFORM, *_MAPS):
            for depth in _DEPTHS:
                yield Measurement(_series(name, scale), depth, partial(_error, config, name, scale, depth))


def verdict(rows: Sequence[FigureRow]) -> Verdict:
    """The exponent of growth with depth of FAVOR+ at both widths and scales."""
    slopes = [slope(in_series(rows, _series(name, scale))) for name in _JUDGED for scale in _SCALES]
    least, most = min(slopes), max(slopes)
    errors = [value_at(rows, _series(name, _DEFAULT), _DEPTHS[-1]).value for name in (_JUDGED[-1], UNIFORM)]
    return decide(
        holds=all(found - STANDARD_ERRORS * error > 0.25 for found, error in slopes),
        fails=any(found + STANDARD_ERRORS * error < 0.25 for found, error in slopes),
        figure=f"the error grows as layers^{least[0]:.2f} to layers^{most[0]:.2f}; after {_DEPTHS[-1]} layers of "
        f"default weights it is {errors[0]:.3f} with 256 features and {errors[1]:.3f} with the values averaged instead",
        tolerance=f"independent errors of equal size add up as layers^½, no growth is layers^0: {STANDARD_ERRORS:.0f} "
        f"standard errors over networks (at most {max(error for _, error in slopes):.3f}) from the middle between them",
    )


def _series(name: str, scale: float) -> str:
    """Name of a curve."""
    return f"{name}, {_SCALES[scale]}"


def _error(config: Config, name: str, scale: float, depth: int) -> Figure:
    """Mean over networks of the relative error after `depth` layers."""
    return mean_figure(torch.tensor([_errors(scale, network)[name][depth - 1] for network in range(config.networks)]))


@lru_cache(maxsize=64)
def _errors(scale: float, network: int) -> dict[str, tuple[float, ...]]:
    """For every map the relative error after each layer of one network, with a draw of its own in every layer."""
    layers = _weights(scale, network)
    attends: dict[str, list[Attend]] = {UNIFORM: [average] * len(layers)}
    for name, build in _MAPS.items():
        seeds = [seed("figure 5", name, network, layer) for layer in range(len(layers))]
        attends[name] = [partial(linear_attention, feature_map=build(one)) for one in seeds]
    exact = _states([softmax_attention] * len(layers), layers, network)
    return {
        name: tuple(
            ((x - y).norm() / y.norm()).item() for x, y in zip(_states(each, layers, network), exact, strict=True)
        )
        for name, each in attends.items()
    }


def _states(attends: Sequence[Attend], layers: Sequence[_Layer], network: int) -> tuple[Tensor, ...]:
    """Hidden states (L, E) after each layer: attention and a perceptron of width 4E, both behind a layer norm."""
    x = torch.randn(_NUM_TOKENS, _WIDTH, generator=generator("figure 5", "inputs", network))
    states = []
    for attend, layer in zip(attends, layers, strict=True):
        normed = layer_norm(x, (_WIDTH,))
        query, key, value = (_heads(normed @ weight) for weight in (layer.query, layer.key, layer.value))
        x = x + attend(query, key, value)[0].transpose(0, 1).flatten(1) @ layer.out
        x = x + gelu(layer_norm(x, (_WIDTH,)) @ layer.up) @ layer.down
        states.append(x)
    return tuple(states)


def _weights(scale: float, network: int) -> list[_Layer]:
    """Gaussian weights of every layer; those of queries and keys have variance scale/fan-in, the others torch's own."""
    source = generator("figure 5", "weights", network)

    def drawn(fan_in: int, fan_out: int, variance: float = _DEFAULT) -> Tensor:
        """One matrix."""
        return torch.randn(fan_in, fan_out, generator=source) * math.sqrt(variance / fan_in)

    return [
        _Layer(
            query=drawn(_WIDTH, _WIDTH, scale),
            key=drawn(_WIDTH, _WIDTH, scale),
            value=drawn(_WIDTH, _WIDTH),
            out=drawn(_WIDTH, _WIDTH),
            up=drawn(_WIDTH, 4 * _WIDTH),
            down=drawn(4 * _WIDTH, _WIDTH),
        )
        for _ in range(_DEPTHS[-1])
    ]


def _heads(x: Tensor) -> Tensor:
    """(L, E) -> (1, H, L, D)."""
    return x.view(1, _NUM_TOKENS, _HEADS, _HEAD_DIM).transpose(1, 2)
