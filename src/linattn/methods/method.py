"""Methods by their written form: a feature map, with an exact window or without, or merged keys in its place.

Maps are written as "FavorPlus", "Hyperbolic(lengths='fixed')" or "Centred(Taylor(order=2))".
"Expansion(num_centres=16) + window 16" attends through the expansion, except to near keys, which get their softmax
weights. "window 128 + merged 256" has no map: a window of exact keys, and 256 merged keys for all others.
"""

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from linattn.attention.window import check_width, shares_normalizer
from linattn.feature_maps import FEATURE_MAPS, WRAPPERS, FeatureMap
from linattn.kv_cache import MergedKV
from linattn.kv_cache.config import begins_merged
from linattn.softmax.checking import check_seed, did_you_mean

# A plus outside brackets: "scale=1e+2" holds one inside.
_PLUS = re.compile(r"\+(?![^(]*\))")
# Parts that merged keys may be written with.
_OF_MERGED = ("sinks", "window")
_WINDOW = re.compile(r"window\s+([1-9][0-9]*)", re.IGNORECASE)
# What an audit sets itself, so that draws are comparable between maps, and what it measures with `fit`.
SET_ELSEWHERE = ("head_dim", "seed", "num_heads", "second_moment")


@dataclass(frozen=True)
class MapSpec:
    """A feature map still to be built for a head width, a number of features and a seed."""

    name: str  # a key of `linattn.feature_maps.FEATURE_MAPS`
    options: tuple[tuple[str, Any], ...] = ()  # keyword options as written, in the order written
    wrappers: tuple[str, ...] = ()  # keys of `linattn.feature_maps.WRAPPERS`, the outermost first

    @property
    def label(self) -> str:
        """The written form, with exact names."""
        options = ", ".join(f"{key}={value!r}" for key, value in self.options)
        inner = f"{self.name}({options})" if options else self.name
        return "".join(f"{wrapper}(" for wrapper in self.wrappers) + inner + ")" * len(self.wrappers)

    @property
    def takes_features(self) -> bool:
        """Whether the number of features is free; else the head width or an option fixes it."""
        return "num_features" in self._parameters and "num_features" not in dict(self.options)

    @property
    def _parameters(self) -> dict[str, inspect.Parameter]:
        """The constructor's parameters by name."""
        return dict(inspect.signature(FEATURE_MAPS[self.name]).parameters)

    def check_features(self, num_features: int | None) -> None:
        """Refuse a number of features where the width is the map's own, and none where it is free."""
        if self.takes_features != (num_features is not None):
            wanted = "needs a number of features; give one" if self.takes_features else "has a width of its own"
            raise ValueError(f"num_features is {num_features}, and {self.label} {wanted}")

    def build(
        self, head_dim: int, *, num_features: int | None, scale: float, seed: int, num_heads: int | None = None
    ) -> FeatureMap:
        """The map, not yet fitted; a learned one is untrained and frozen, since it is built to be measured."""
        self.check_features(num_features)
        offered = {"num_features": num_features, "scale": scale, "seed": check_seed(seed), "num_heads": num_heads}
        taken = {name: value for name, value in offered.items() if name in self._parameters and value is not None}
        # A scale among the options has precedence.
        feature_map = FEATURE_MAPS[self.name](head_dim, **{**taken, **dict(self.options)})
        for wrapper in reversed(self.wrappers):
            feature_map = WRAPPERS[wrapper](feature_map)
        return feature_map.requires_grad_(False)


@dataclass(frozen=True)
class Method:
    """A way to attend, still to be built for a head width."""

    map: MapSpec | None  # the feature map; None where merged keys take its place
    window: int | None = None  # width of the exact window beside the map; None for none
    merged: MergedKV | None = None  # the merged keys; None beside a map

    @property
    def label(self) -> str:
        """The written form, with exact names."""
        if self.merged is not None:
            return self.merged.label
        assert self.map is not None
        return self.map.label if self.window is None else f"{self.map.label} + window {self.window}"

    @property
    def takes_features(self) -> bool:
        """Whether the number of features is free; else the head width or an option fixes it, or there are none."""
        return self.map is not None and self.map.takes_features

    def build_map(
        self, head_dim: int, *, num_features: int | None, scale: float, seed: int, num_heads: int | None = None
    ) -> FeatureMap:
        """The map, not yet fitted, from `MapSpec.build`; refused where a window cannot share its normaliser."""
        if self.map is None:
            raise ValueError(f"{self.label} has no map; give a method with one, as FavorPlus")
        feature_map = self.map.build(head_dim, num_features=num_features, scale=scale, seed=seed, num_heads=num_heads)
        if self.window is not None and not shares_normalizer(feature_map):
            raise ValueError(
                f"{self.label}: {self.map.name} cannot share a normaliser with exact attention; take a map for the "
                "softmax kernel with positive weights, as Expansion or FavorPlus, or leave the window out"
            )
        return feature_map

    def build_kernel(
        self, head_dim: int, *, num_features: int | None, scale: float, seed: int, num_heads: int | None = None
    ) -> FeatureMap | MergedKV:
        """The map of `build_map`, or the merged keys, which have no features."""
        if self.merged is None:
            return self.build_map(head_dim, num_features=num_features, scale=scale, seed=seed, num_heads=num_heads)
        if num_features is not None:
            raise ValueError(f"{self.label} has no map, got num_features={num_features}; leave it out")
        return self.merged


def parse_method(text: str) -> Method:
    """Read a method's written form: that of a map, with "+ window W" or without, or that of merged keys."""
    parts = [part.strip() for part in _PLUS.split(text)]
    if begins_merged(text) or _word(parts[0]) in _OF_MERGED:
        return Method(None, merged=_parse_merged(text, parts))
    feature_map = parse_map(parts[0])
    if len(parts) == 1:
        return Method(feature_map)
    if len(parts) > 2:
        raise ValueError(f"{text!r} has {len(parts)} parts; write a map and a window, as {parts[0]} + window 32")
    match = _WINDOW.fullmatch(parts[1])
    if match is None:
        word = _word(parts[1])
        why = " (the word and a positive whole number)" if word == "window" else did_you_mean(word, ["window"])
        raise ValueError(f"{text!r}: {parts[1]!r} is no window{why}; write, for example, {parts[0]} + window 32")
    try:
        check_width(int(match[1]))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    return Method(feature_map, int(match[1]))


def _parse_merged(text: str, parts: Sequence[str]) -> MergedKV:
    """Merged keys, refused beside a map."""
    if _word(parts[0]) not in (*_OF_MERGED, "merged") and not _word(parts[0]).isdecimal():
        # A word that is no map's is named first.
        parse_map(parts[0])
        raise ValueError(
            f"{text!r}: merged keys take every key that is not near and leave none to a map; leave the map out, as in "
            "'window 32 + merged 128', or the merged keys"
        )
    try:
        return MergedKV.parse(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def _word(part: str) -> str:
    """The word that a part begins with."""
    return part.partition(" ")[0].lower()


def together(labels: Sequence[str]) -> str:
    """Written forms of layers, in order; one where all are alike."""
    return "; ".join(labels if len(set(labels)) > 1 else labels[:1])


def parse_map(text: str) -> MapSpec:
    """Read a map's written form: a name in any case, alone or with options as literals, or either inside wrappers."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, UnicodeEncodeError):
        raise _no_form(text) from None
    wrappers = []
    while isinstance(node, ast.Call) and (wrapper := _exact(node.func, WRAPPERS)):
        if len(node.args) != 1 or node.keywords:
            raise ValueError(f"{text!r}: {wrapper} takes one feature map and no options, as in {wrapper}(FavorPlus)")
        wrappers.append(wrapper)
        node = node.args[0]
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise _no_form(text)
    exact = _exact(call.func, FEATURE_MAPS)
    if exact is None:
        raise _no_map(call.func.id, text)
    if call.args:
        raise ValueError(f"{text!r}: write every option of {exact} by name, as in {exact}(option=value)")
    options = tuple(_read_option(keyword, exact, text) for keyword in call.keywords)
    if repeated := [name for name, count in Counter(name for name, _ in options).items() if count > 1]:
        raise ValueError(f"{text!r}: {repeated[0]} is written twice; write every option once")
    return MapSpec(exact, options, tuple(wrappers))


def _exact(node: ast.expr, known: Iterable[str]) -> str | None:
    """The known name that an expression is, written in any case."""
    written = node.id.lower() if isinstance(node, ast.Name) else None
    return next((name for name in known if name.lower() == written), None)


def _read_option(keyword: ast.keyword, name: str, text: str) -> tuple[str, Any]:
    """One option, checked against the constructor."""
    known = [option for option in inspect.signature(FEATURE_MAPS[name]).parameters if option not in SET_ELSEWHERE]
    if keyword.arg not in known:
        nearest = did_you_mean(str(keyword.arg), known)
        raise ValueError(
            f"{text!r}: {keyword.arg!r} is no option of {name} here{nearest}; its options are those of "
            f"{name}({', '.join(known)})"
        )
    try:
        return keyword.arg, ast.literal_eval(keyword.value)
    except (ValueError, TypeError):
        raise ValueError(f"{text!r}: {keyword.arg} must be a plain number, text, True, False or None") from None


def _no_form(text: str) -> ValueError:
    """Say which name at the beginning of a text is unknown, or that the text as a whole is no written form."""
    name = re.match(r"[^\W\d]\w*", text.strip())
    if name is not None and name[0].lower() not in {known.lower() for known in (*FEATURE_MAPS, *WRAPPERS)}:
        return _no_map(name[0], text)
    return ValueError(f"{text!r} is not a feature map's written form; {_forms()}")


def _no_map(name: str, text: str) -> ValueError:
    """Say that there is no map of a name, and which name is near, an exact part's among them."""
    nearest = did_you_mean(name, (*FEATURE_MAPS, *WRAPPERS, "window", "merged"))
    return ValueError(f"{text.strip()!r}: there is no feature map {name!r}{nearest}; {_forms()}")


def _forms() -> str:
    """Forms of a written map."""
    around = " or ".join(f"{wrapper}(…)" for wrapper in WRAPPERS)
    return f"write one of {', '.join(FEATURE_MAPS)}, with options as in Taylor(order=2), or {around} around one"
