"""Feature maps as plain JSON values: what a map was built with, not what it has drawn, measured or learned since."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from linattn.feature_maps import FEATURE_MAPS, WRAPPERS, FeatureMap

_KINDS: dict[str, Any] = {**FEATURE_MAPS, **WRAPPERS}
# Numbers that a map's tensors, or its state of values as wide as queries, may hold: 1 GB in float64. Far above what
# models use, and far below what a broken record asks for.
_MOST_NUMBERS = 2**27
# Maps whose features are monomials in the D coordinates, up to a degree.
_OF_MONOMIALS = ("TensorPolynomial", "Taylor", "Expansion")


def describe(feature_map: FeatureMap) -> dict[str, Any]:
    """A map as a record {"name": …, "options": {…}} of plain JSON values; its tensors are left to `state_dict`."""
    kind = type(feature_map)
    if _KINDS.get(kind.__name__) is not kind:
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} is not one of linattn's own maps, so that a file could not say how "
            "to build it again; keep the model as a pickle (torch.save), or keep the map's state_dict and the code "
            "that builds it"
        )
    arguments = {name: getattr(feature_map, name) for name in inspect.signature(kind).parameters}
    plain = {name: value for name, value in arguments.items() if value is not None and not isinstance(value, Tensor)}
    options = {name: describe(value) if isinstance(value, FeatureMap) else value for name, value in plain.items()}
    return {"name": kind.__name__, "options": options}


def rebuild(record: Any) -> FeatureMap:
    """The map of a record of `describe` as constructed: random ones drawn from seed 0, until `load_state_dict`."""
    if not isinstance(record, dict) or set(record) != {"name", "options"} or not isinstance(record["options"], dict):
        raise ValueError(f"a feature map's record has a name and options, got {record!r}")
    name = record["name"]
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"there is no feature map {name!r}; this linattn has {', '.join(_KINDS)}")
    check_size(name, record["options"])
    options = {name: rebuild(x) if isinstance(x, dict) else x for name, x in record["options"].items()}
    try:
        built: FeatureMap = kind(**options)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{name} cannot be built from {record['options']!r}: {error}") from error
    if missing := sorted(name for name in describe(built)["options"] if record["options"].get(name) is None):
        raise ValueError(f"{name} cannot be built from {record['options']!r}: {', '.join(missing)} is missing")
    return built


def check_size(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a map that would hold more than 2**27 numbers, before it is built: a file may say anything."""
    counts = {name: value for name, value in options.items() if type(value) is int and name != "seed"}
    if max(counts.values(), default=0) > _MOST_NUMBERS or _log_size(name, counts) > math.log(_MOST_NUMBERS):
        named = " and ".join(f"{option} {value}" for option, value in counts.items())
        raise ValueError(f"{name} would hold more than {_MOST_NUMBERS} numbers with {named}")


def _log_size(name: str, counts: Mapping[str, int]) -> float:
    """The logarithm of H·D·max(D, R), R from whatever the map's constructor takes it from."""
    width = max(counts.get("head_dim", 1), 1)
    log_features = sum(math.log(max(counts.get(option, 1), 1)) for option in ("num_features", "num_centres", "nu"))
    if name in _OF_MONOMIALS:
        degree = max(counts.get("degree", counts.get("order", 2)), 0)
        log_features += math.lgamma(width + degree + 1) - math.lgamma(width + 1) - math.lgamma(degree + 1)
        # Each monomial is stored as the numbers of its factors.
        log_features += math.log(max(degree, 1))
    return math.log(max(counts.get("num_heads", 1), 1)) + math.log(width) + max(math.log(width), log_features)
