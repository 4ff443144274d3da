"""Costs: numbers kept per head, by a map and by softmax, and seconds, measured; letters as in methods/__init__.py."""

import time
from collections.abc import Callable, Mapping

from linattn.feature_maps import FeatureMap


def map_state_numbers(feature_map: FeatureMap, *, value_dim: int, window: int | None = None) -> int:
    """Numbers in a head's state, two blocks of a window's keys among them: R·(Dv + 1) + M + 2W·(D + Dv)."""
    sums = feature_map.num_features * (value_dim + 1) + feature_map.num_exponents
    return sums + 2 * (window or 0) * (feature_map.head_dim + value_dim)


def exact_state_numbers(num_tokens: int, *, head_dim: int, value_dim: int) -> int:
    """Numbers that exact attention keeps per head, every key and value: L·(D + Dv)."""
    return num_tokens * (head_dim + value_dim)


def seconds(
    contenders: Mapping[str, Callable[[], object]], *, repeats: int, rehearse: bool = False
) -> dict[str, list[float]]:
    """Wall-clock seconds of each contender after a warm-up, interleaved: a busier machine is slower for all."""
    # On an accelerator a call must wait for its own result. To rehearse is to call each once, untimed, before every
    # timed call: for contenders that hand gigabytes back to the system, which the next one's time would include.
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    for run in contenders.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            if rehearse:
                run()
            start = time.perf_counter()
            run()
            samples[name].append(time.perf_counter() - start)
    return samples
