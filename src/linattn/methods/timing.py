"""How long calls take: contenders in turn, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def seconds(
    contenders: Mapping[str, Callable[[], object]], *, repeats: int, rehearse: bool = False
) -> dict[str, list[float]]:
    """Wall-clock seconds of each contender, interleaved after one warm-up each.

    Interleaved, so that a machine that grows slower or busier meanwhile is slower for all.

    Cost: repeats + 1 calls of each contender, 2·repeats + 1 if rehearsed.

    Args:
        contenders: calls by name; on an accelerator a call must wait for its own result.
        repeats: timed calls of each, at least 1.
        rehearse: call each contender once, untimed, before every timed call: for contenders that hand gigabytes back
            to the system, which the next contender's time would include.

    Returns:
        `repeats` figures per name, in seconds, in the order measured.

    Raises:
        ValueError: if `repeats` is less than 1.

    Example:
        >>> calls = []
        >>> found = seconds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
        >>> "".join(calls), len(found["a"])
        ('ababab', 2)
    """
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


def spread(samples: list[float]) -> dict[str, float]:
    """Median, minimum and maximum.

    Args:
        samples: at least one number.

    Returns:
        The three by their names.

    Raises:
        statistics.StatisticsError: if there is no sample.

    Example:
        >>> spread([3.0, 1.0, 2.0])
        {'median': 2.0, 'min': 1.0, 'max': 3.0}
    """
    # Imported here: it loads decimal arithmetic, which `import linattn` needs not.
    import statistics

    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}
