"""How benchmarks measure: verify, then time interleaved repeats in one process, and append one JSON row per claim."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results.jsonl"


def seconds(contenders: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, list[float]]:
    """Wall-clock seconds of each contender, interleaved after one warm-up each."""
    for run in contenders.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            found[name].append(time.perf_counter() - start)
    return found


def spread(samples: list[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}


def require(name: str, error: float, bound: float) -> None:
    """Refuse to time a wrong result."""
    if not error <= bound:
        raise SystemExit(f"{name}: relative error {error:.2e} exceeds {bound:.2e}; nothing was timed")


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the truth."""
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def record(claim: str, **figures: object) -> None:
    """Append a row to the result file and print it."""
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
    }
    row = {"claim": claim, **figures, "machine": machine}
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row))
