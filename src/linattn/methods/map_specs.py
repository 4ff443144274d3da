"""Feature maps by their written form: "FavorPlus", "Hyperbolic(lengths='fixed')", "Centred(Taylor(order=2))"."""

import ast
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from linattn.feature_maps import FEATURE_MAPS, WRAPPERS, FeatureMap
from linattn.feature_maps.arguments import check_seed
from linattn.softmax.checking import did_you_mean

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
    def is_random(self) -> bool:
        """Whether the map is drawn from a seed."""
        return "seed" in self._parameters

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


def parse_map(text: str) -> MapSpec:
    """Read a map's written form: a name in any case, alone or with options as literals, or either inside wrappers."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise _no_form(text) from None
    wrappers = []
    while isinstance(node, ast.Call) and (wrapper := _exact(node.func, WRAPPERS)):
        if len(node.args) != 1 or node.keywords:
            raise ValueError(f"{text!r}: {wrapper} takes one feature map and no options, as in {wrapper}(FavorPlus)")
        wrappers.append(wrapper)
        node = node.args[0]
    head = node.func if isinstance(node, ast.Call) else node
    if not isinstance(head, ast.Name):
        raise _no_form(text)
    exact = _exact(head, FEATURE_MAPS)
    if exact is None:
        raise _no_map(head.id, text)
    if not isinstance(node, ast.Call):
        return MapSpec(exact, (), tuple(wrappers))
    if node.args:
        raise ValueError(f"{text!r}: write every option of {exact} by name, as in {exact}(option=value)")
    return MapSpec(exact, tuple(_read_option(keyword, exact, text) for keyword in node.keywords), tuple(wrappers))


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
    except ValueError:
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
