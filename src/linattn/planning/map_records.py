"""Feature maps as plain JSON values: what a map was built with, not what it has drawn, measured or learned since."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from linattn.feature_maps import FEATURE_MAPS, WRAPPERS, FeatureMap

_KINDS: dict[str, Any] = {**FEATURE_MAPS, **WRAPPERS}


def describe(feature_map: FeatureMap) -> dict[str, Any]:
    """A map as a name and the options of its constructor, those of an inner map inside.

        rebuild(describe(m)) with m's state_dict is m: the same `repr`, `fingerprint`, queries and keys, to the bit

    Options that the map holds as tensors (its seed, means, centres, landmarks, moments) are left out, fitted or not:
    they are in `state_dict`, with the draws and the learned weights.

    Cost: none worth naming.

    Args:
        feature_map: one of the library's own maps, fitted, redrawn or trained as it may be.

    Returns:
        {"name": …, "options": {…}} of numbers, texts, booleans and such records again; written as JSON and read, it is
        the same.

    Raises:
        ValueError: if the map, or one inside it, is of a class that is not the library's own.

    Example:
        >>> from linattn.feature_maps import Centred, Taylor
        >>> describe(Taylor(4, order=1, scale=0.5))
        {'name': 'Taylor', 'options': {'head_dim': 4, 'order': 1, 'scale': 0.5}}
        >>> describe(Centred(Taylor(4)))["options"]["inner"]["name"]
        'Taylor'

    Source: the signatures of the constructors in `linattn.feature_maps`.
    """
    kind = type(feature_map)
    if _KINDS.get(kind.__name__) is not kind:
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} is not one of linattn's own maps, so that a file could not say how "
            "to build it again; keep the model as a pickle (torch.save), or keep the map's state_dict and the code "
            "that builds it"
        )
    options = {name: getattr(feature_map, name) for name in inspect.signature(kind).parameters}
    return {
        "name": kind.__name__,
        "options": {
            name: describe(value) if isinstance(value, FeatureMap) else value
            for name, value in options.items()
            if value is not None and not isinstance(value, Tensor)
        },
    }


def rebuild(record: Any) -> FeatureMap:
    """The map that `describe` described, as its constructor leaves it: `load_state_dict` gives it its tensors.

    Cost: the map's constructor; O(R D²) for orthogonal draws.

    Args:
        record: what `describe` gave, read from JSON or not.

    Returns:
        The map: random ones drawn from seed 0, others not fitted or not trained, learned weights trainable.

    Raises:
        ValueError: if it is no such record, names no map of the library, or the constructor refuses its options.

    Example:
        >>> rebuild({"name": "Taylor", "options": {"head_dim": 4, "order": 1, "scale": 0.5}})
        Taylor(head_dim=4, order=1, scale=0.5)

    Source: none, a format.
    """
    if not isinstance(record, dict) or set(record) != {"name", "options"} or not isinstance(record["options"], dict):
        raise ValueError(f"a feature map's record has a name and options, got {record!r}")
    name = record["name"]
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"there is no feature map {name!r}; this linattn has {', '.join(_KINDS)}")
    options = {
        option: rebuild(value) if isinstance(value, dict) else value for option, value in record["options"].items()
    }
    try:
        built: FeatureMap = kind(**options)
    except TypeError as error:
        raise ValueError(f"{name} cannot be built from {record['options']!r}: {error}") from error
    return built
