"""Extra peak memory of one call: by the kernel's high-water mark in a fresh process, or by CUDA's own count.

The figure is the peak of a call less what was there before it, the inputs; the call's results are part of it. On Linux
it counts resident memory, in a process of its own: one with a history keeps memory that was freed, and what a call
takes of that does not show. There, every buffer from 64 kB on goes back to the kernel when it is freed, and a short
call before the measured one loads libraries and starts threads.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from linattn_lab.bench.contenders import LINEAR, draw_inputs, exact_run, fitted_method, linear_run
from linattn_lab.bench.settings import Settings

# glibc's allocator: nothing from 64 kB on is kept once freed. MKL: no buffers of its own are kept either.
CHILD_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MKL_DISABLE_FAST_MM": "1"}

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
# Enough to load every library and start every thread, short enough to take little memory.
_WARM_UP_TOKENS = 512


def can_measure(settings: Settings) -> bool:
    """Whether memory is wanted, and this system tells.

    Source: proc(5), clear_refs.
    """
    return settings.memory and (settings.device == "cuda" or _CLEAR.exists())


def how_measured(settings: Settings) -> str:
    """What the memory figures mean, or why there are none, for a benchmark's header."""
    if not can_measure(settings):
        return "not measured on this system" if settings.memory else "not measured, as asked for"
    if settings.device == "cuda":
        return "peak of a call less what was allocated before it, its results included, by torch's CUDA allocator"
    return (
        "peak resident memory of a call less that before it, its results included, in a process of its own "
        "(VmHWM after clear_refs, less VmRSS before)"
    )


def extra_peak(run: Callable[[], object], device: str = "cpu") -> int:
    """Extra peak memory of a call in this process.

    On the CPU right only in a process under `CHILD_SETTINGS`: `measure` makes one.

    Raises:
        OSError: on the CPU of a system other than Linux.

    Source: proc(5), clear_refs.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        results = run()
        peak = torch.cuda.max_memory_allocated() - allocated
        del results
        return peak
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    before = _resident("VmRSS")
    _CLEAR.write_text("5", encoding="ascii")
    results = run()
    peak = _resident("VmHWM") - before
    del results
    return peak


def measure(settings: Settings, length: int, contender: str) -> int:
    """Extra peak memory of one contender at one length; on the CPU in a process of its own.

    Raises:
        RuntimeError: if the process fails.
    """
    if settings.device == "cuda":
        return _measure_here(settings, length, contender)
    asked = [asdict(settings), length, contender, torch.get_num_threads()]
    what = f"the memory of {contender} attention at {length:,} tokens"
    try:
        return int(in_a_process(f"from {__name__} import print_extra_peak; print_extra_peak()", asked, what))
    except RuntimeError as error:
        raise RuntimeError(f"{error}; --no-memory leaves it out") from None


def in_a_process(code: str, asked: Any, what: str) -> str:
    """What a fresh process under `CHILD_SETTINGS` prints as the measure of something; it is asked in JSON."""
    # -P: the folder the user stands in must not lend its modules.
    command = [sys.executable, "-P", "-c", code, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **CHILD_SETTINGS})
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"the process that measures {what} ended with {done.returncode}: {last}")
    return done.stdout


def _measure_here(settings: Settings, length: int, contender: str) -> int:
    """The same in this process, after a short call."""
    build = linear_run if contender == LINEAR else exact_run
    few = draw_inputs(settings, min(length, _WARM_UP_TOKENS))
    build(settings, few, fitted_method(settings, few))()
    del few
    inputs = draw_inputs(settings, length)
    return extra_peak(build(settings, inputs, fitted_method(settings, inputs)), settings.device)


def _resident(field: str) -> int:
    """A memory figure of this process, in bytes."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def print_extra_peak() -> None:
    """In that process: the figure of one contender at one length."""
    values, length, contender, threads = json.loads(sys.argv[-1])
    torch.set_num_threads(threads)
    settings = Settings(**{**values, "lengths": tuple(values["lengths"])})
    sys.stdout.write(f"{_measure_here(settings, length, contender)}\n")
