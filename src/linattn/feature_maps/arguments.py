"""Checks of constructor arguments shared by the feature maps; letters as in feature_maps/__init__.py."""

import math

from linattn.softmax.checking import as_float


def check_count(name: str, value: int, at_least: int = 1) -> int:
    """Return an integer that is at least `at_least`, or refuse it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")
    return value


def check_seed(seed: int) -> int:
    """Return a seed that an int64 holds, or refuse it."""
    if check_count("seed", seed, at_least=0) >= 2**63:
        raise ValueError(f"seed must be below 2**63, got {seed!r}")
    return seed


def check_number(name: str, value: float, *, positive: bool = False) -> float:
    """Return a finite number that is ≥ 0, or > 0 when `positive`, as a float, or refuse it."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else as_float(value)
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise ValueError(f"{name} must be a finite number {'> 0' if positive else '>= 0'}, got {value!r}")
    return number


def temperature(scale: float | None, head_dim: int) -> float:
    """The factor on q·k: `scale`, or D**-0.5 when it is None."""
    return head_dim**-0.5 if scale is None else check_number("scale", scale, positive=True)
