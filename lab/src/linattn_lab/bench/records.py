"""What a benchmark writes, as JSON lines: one header row, then one row per length."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from linattn_lab.records.jsonl import Form


@dataclass(frozen=True)
class BenchHeader:
    """The circumstances of a benchmark.

    Attributes:
        versions: version of python, torch and linattn by name.
        processor: the processor's name.
        device: "cpu" or "cuda".
        device_name: the accelerator's name; the processor's on the CPU.
        threads: torch's threads.
        map: the method's written form: a map, with a window or without, or merged keys.
        map_repr: the map as Python shows it, before it is fitted.
        num_features: R, the width of the map; 0 without one.
        state_numbers: numbers that a head keeps of a text of any length; exact attention keeps 2·D of each token.
        batch: B, the batch size.
        num_heads: H, query heads, of as many key/value heads.
        head_dim: D, of queries, keys and values.
        dtype: of queries, keys, values and results.
        is_causal: whether later keys are hidden.
        backward: whether the gradients of queries, keys and values are measured with the output.
        lengths: L, numbers of tokens, ascending.
        repeats: timed calls of each contender at each length, interleaved after one warm-up each.
        seed: the map's draw and the inputs follow from it.
        num_verified: the first tokens of two heads, at most this many, enter the errors.
        error_bound: the largest error at which anything was timed; null where the map's weights have both signs, or
            keys are in few bits.
        exact_limit: exact attention is left out from the length on where one call is predicted to take more seconds.
        memory: what the rows' memory figures mean, or why there are none.
    """

    versions: dict[str, str]
    processor: str
    device: str
    device_name: str
    threads: int
    map: str
    map_repr: str
    num_features: int
    state_numbers: int
    batch: int
    num_heads: int
    head_dim: int
    dtype: str
    is_causal: bool
    backward: bool
    lengths: list[int]
    repeats: int
    seed: int
    num_verified: int
    error_bound: float | None
    exact_limit: float
    memory: str


@dataclass(frozen=True)
class LengthRow:
    """Linear and exact attention at one length.

    Attributes:
        length: L, the number of tokens.
        error: relative error of linear attention's output against its own definition in float64, of the worse head.
        gradient_error: the same for the gradients of queries, keys and values together; null without backward.
        approximation_error: relative error of linear attention against exact attention, mean over heads; random
            inputs, so that it says nothing of a trained model.
        uniform_error: the same for uniform attention.
        linear_seconds: seconds of each timed call of linear attention.
        exact_seconds: the same for exact attention; null where it was left out.
        exact_predicted: the seconds for which exact attention was left out; null where it was not.
        linear_memory: extra peak memory of a call of linear attention in bytes, its results included; null where not
            measured.
        exact_memory: the same for exact attention.
    """

    length: int
    error: float
    gradient_error: float | None
    approximation_error: float
    uniform_error: float
    linear_seconds: list[float]
    exact_seconds: list[float] | None
    exact_predicted: float | None
    linear_memory: int | None
    exact_memory: int | None


BENCH: Form[BenchHeader, LengthRow] = Form("a benchmark", BenchHeader, {"length": LengthRow})


def partial_path(path: Path, header: BenchHeader) -> Path:
    """Where the rows of an unfinished benchmark wait: beside its file, those of other settings beside them."""
    digest = hashlib.sha256(repr(header).encode()).hexdigest()[:8]
    return path.with_suffix(f".partial-{digest}{path.suffix}")
