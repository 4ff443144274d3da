"""Every listed map, alone and inside others, with options of its own, fitted, trained or as built.

Letters: B batch, Hkv key/value heads, L tokens, D head width, R features.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from fuzzing.dice import Dice
from fuzzing.tokens import Sizes, draw_vectors
from fuzzing.weights import takes_from_call
from linattn.feature_maps import FEATURE_MAPS, Balanced, Centred, FeatureMap, FittedMap, Oprf, Sderf
from linattn.methods.method import parse_map

# Maps on the softmax kernel's scale whose weights sum to a positive number: those that may have a window beside them.
POSITIVE_SOFTMAX = ("Taylor(order=2", "FavorPlus", "Hyperbolic", "Oprf", "Sderf", "LearnedExponential", "Expansion")
SIGNED_SOFTMAX = ("Taylor(order=1", "Trigonometric")
_POSITIVE = ("Exponential", "EluPlusOne", "Relu", "Dpfp", "RandomRelu", "Hedgehog", "Shifted")
_POSITIVE += tuple(
    f"{name}(degree={degree}" for name in ("ElementwisePolynomial", "TensorPolynomial") for degree in (2, 4)
)
_WRAPPED = ("Taylor", "FavorPlus", "Hyperbolic", "Trigonometric", "Oprf", "Sderf", "LearnedExponential")


class Shifted(FeatureMap):
    """A user's own map: exponents are the inputs themselves, so that a key's rise is as large as asked for."""

    exponential = True

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, head_dim)

    def query(self, x: Tensor) -> Tensor:
        return x

    def key(self, x: Tensor) -> Tensor:
        return x - 0.5

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.exp(self.query(q)) @ torch.exp(self.key(k)).mT


@dataclass(frozen=True)
class DrawnMap:
    """A map, and how it came about."""

    map: FeatureMap
    written: str
    story: str

    @property
    def softmax(self) -> bool:
        """Whether it stands for the softmax kernel."""
        return self.positive_softmax or any(f"({name}" in f"({self.written}" for name in SIGNED_SOFTMAX)

    @property
    def positive_softmax(self) -> bool:
        """Whether it may have a window beside it."""
        return any(f"({name}" in f"({self.written}" for name in POSITIVE_SOFTMAX)

    @property
    def positive(self) -> bool:
        """Whether the weights of any keys sum to a positive number, or to 0."""
        return self.positive_softmax or any(f"({name}" in f"({self.written}" for name in _POSITIVE)

    @property
    def is_expansion(self) -> bool:
        """Whether its parts are expanded around their own mean keys."""
        return "Expansion" in self.written

    @property
    def from_call(self) -> bool:
        """Whether it takes statistics from each call."""
        return takes_from_call(self.map)

    @property
    def unfinished(self) -> bool:
        """Whether it cannot be used before `fit`."""
        return any(
            (isinstance(part, Balanced) and part.transform is None)
            or (isinstance(part, Oprf) and bool(part.mean_square.isnan()))
            or (isinstance(part, Sderf) and part.second_moment is None)
            for part in self.map.modules()
        )

    def __str__(self) -> str:
        return f"{self.written}{self.story}"


def draw_map(
    dice: Dice,
    sizes: Sizes,
    dtype: torch.dtype,
    *,
    softmax: bool = False,
    positive: bool = False,
    fitted: bool = False,
) -> DrawnMap:
    """Any map; one that may have a window (`softmax`), of positive sums, one usable in any call (`fitted`)."""
    while True:
        if not softmax and dice.chance(0.06):
            return DrawnMap(Shifted(sizes.head_dim), "Shifted", "")
        written = _written(dice, sizes.head_dim)
        named = DrawnMap(Shifted(1), written, "")
        if (softmax and not named.positive_softmax) or (positive and not named.positive):
            continue
        return _built(dice, written, sizes, dtype, fitted=fitted)


def _written(dice: Dice, head_dim: int) -> str:
    """A map's written form, options and wrappers included."""
    # Maps with a path of their own through the backends more often.
    often = dict.fromkeys(FEATURE_MAPS, 1.0) | {"Expansion": 4.0, "LearnedExponential": 2.0, "FavorPlus": 2.0}
    name = dice.weighted({name: share for name, share in often.items() if name != "Dpfp" or head_dim > 1})
    scale = {"scale": dice.pick(0.1, 1.0)} if dice.chance(0.3) else {}
    rows = {"num_features": 2 * dice.integer(1, 6)}
    draw = {"draw": dice.pick("iid", "orthogonal")} if dice.chance(0.5) else {}
    lengths = {"lengths": dice.pick("chi", "fixed")} if dice.chance(0.5) else {}
    options = {
        "Relu": {"floor": dice.pick(0.0, 1e-3, 0.5)},
        "ElementwisePolynomial": {"degree": dice.integer(1, 4)},
        "Dpfp": {"nu": dice.integer(1, 2 * head_dim - 1)},
        "TensorPolynomial": {"degree": dice.integer(1, 3), "constant": dice.pick(0.0, 1.0, 0.5)} | scale,
        "Taylor": {"order": dice.pick(1, 2)} | scale,
        "FavorPlus": rows | draw | lengths | scale,
        "Hyperbolic": rows | draw | lengths | scale,
        "Trigonometric": rows | draw | scale,
        "Oprf": rows | draw | scale,
        "Sderf": rows | draw | scale,
        "RandomRelu": rows | draw | lengths | {"floor": dice.pick(0.0, 1e-3, 0.5)},
        "Expansion": {"num_centres": dice.integer(1, 5), "order": dice.pick(0, 1, 2)} | scale,
        "LearnedExponential": rows | scale,
        "Hedgehog": scale,
    }.get(name, {})
    inner = f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else name
    if name not in _WRAPPED or dice.chance(0.55):
        return inner
    return dice.pick(f"Centred({inner})", f"Balanced({inner})", f"Centred(Balanced({inner}))")


def _built(dice: Dice, written: str, sizes: Sizes, dtype: torch.dtype, *, fitted: bool) -> DrawnMap:
    """The map of a written form, fitted or not, trained or not, cast, copied or loaded."""
    spec, story = parse_map(written), []
    found = spec.build(
        sizes.head_dim,
        num_features=4 if spec.takes_features else None,
        scale=sizes.head_dim**-0.5,
        seed=dice.integer(0, 99),
        num_heads=sizes.kv_heads if dice.chance(0.3) else None,
    )
    if getattr(found, "num_heads", None) is not None:
        story.append(f"num_heads={found.num_heads}")
    _train(dice, found, story)
    if isinstance(found, FittedMap) and (fitted or dice.chance(0.9)):
        heads = sizes.kv_heads if dice.chance(0.7) else 1
        parts = [part for part in found.modules() if getattr(part, "num_heads", None) is not None]
        heads = sizes.kv_heads if parts else heads
        sample = [draw_vectors(dice, (1, n, 20, sizes.head_dim), torch.float64, tame=True) for n in (heads, heads)]
        if isinstance(found, Centred) and not fitted and dice.chance(0.25):
            if isinstance(found.inner, FittedMap):
                found.inner.fit(*sample)
            story.append("inner map fitted")
        else:
            found.fit(*sample)
            story.append(f"fitted on {heads} heads")
    if dtype == torch.float64:
        found = found.double()
    elif dice.chance(0.2):
        found = found.to(dtype)
        story.append(f"cast to {dtype}")
    if dice.chance(0.1):
        found = copy.deepcopy(found)
        story.append("copied")
    return DrawnMap(found, written, f" [{', '.join(story)}]" if story else "")


def _train(dice: Dice, found: FeatureMap, story: list[str]) -> None:
    """Leave parameters as training might."""
    parameters = list(found.parameters())
    if not parameters:
        return
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.1 * dice.normal(*parameter.shape)
    found.requires_grad_(dice.chance(0.5))
    story.append("trainable" if parameters[0].requires_grad else "frozen")
