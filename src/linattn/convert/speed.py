"""How long a converted model takes beside the one it came from, on the same batch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from linattn.convert.running import Batch, run
from linattn.planning.timing import seconds

_REPEATS = 3


@dataclass(frozen=True)
class Speed:
    """Forward passes over one batch of texts, a model's and the original's in turn.

    Attributes:
        batch_size: texts of the batch.
        num_tokens: their length, padding included.
        seconds: of the converted model's passes.
        exact_seconds: of the original model's.
        threads: torch's threads.
        device: where the models were.
    """

    batch_size: int
    num_tokens: int
    seconds: tuple[float, ...]
    exact_seconds: tuple[float, ...]
    threads: int
    device: str

    @property
    def ratio(self) -> float:
        """The converted model's time over the original's, medians.

        Example:
            >>> Speed(4, 512, (3.0, 1.0, 2.0), (4.0, 4.0, 4.0), 2, "cpu").ratio
            0.5
        """
        return statistics.median(self.seconds) / statistics.median(self.exact_seconds)


def measure_speed(model: nn.Module, original: nn.Module, batch: Batch) -> Speed:
    """Time both models on a batch: three passes each after a warm-up, without gradients."""
    with torch.no_grad():
        live = run(original, batch).live
        passes = {name: partial(_finished, one, batch) for name, one in (("linear", model), ("exact", original))}
        found = seconds(passes, repeats=_REPEATS)
    size, length = live.shape
    times = tuple(found["linear"]), tuple(found["exact"])
    return Speed(size, length, *times, torch.get_num_threads(), live.device.type)


def _finished(model: nn.Module, batch: Batch) -> None:
    """A pass, waited for."""
    if run(model, batch).live.is_cuda:
        torch.cuda.synchronize()
