"""The benchmark: at each length, verify, time both contenders in turn, and measure the memory of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

from linattn.methods.measures import seconds
from linattn_lab.bench import memory
from linattn_lab.bench.contenders import EXACT, LINEAR, Inputs, draw_inputs, exact_run, fitted_method, linear_run
from linattn_lab.bench.errors import NUM_VERIFIED, verify
from linattn_lab.bench.records import BenchHeader, LengthRow
from linattn_lab.bench.settings import Settings
from linattn_lab.circumstances import processor, versions
from linattn_lab.costs import exact_flops_per_token, flops_per_token, state_numbers

_EXACT_LIMIT = 60.0


class Bench:
    """Linear against exact attention on given shapes, ready to be measured."""

    header: BenchHeader  # the circumstances, complete before anything is measured

    def __init__(self, settings: Settings, *, exact_limit: float = _EXACT_LIMIT) -> None:
        """Build the map once, so that a bad option fails before the work begins."""
        self._settings = settings
        built = settings.build()
        machine = processor()
        self.header = BenchHeader(
            versions=versions("torch", "linattn", "linattn-compiled"),
            processor=machine,
            device=settings.device,
            device_name=torch.cuda.get_device_name() if settings.device == "cuda" else machine,
            threads=torch.get_num_threads(),
            map=settings.method.label,
            map_repr=repr(built.feature_map or settings.method.merged),
            num_features=built.num_features,
            state_numbers=state_numbers(built, value_dim=settings.head_dim, is_causal=settings.is_causal),
            batch=settings.batch,
            num_heads=settings.heads,
            head_dim=settings.head_dim,
            dtype=settings.dtype,
            is_causal=settings.is_causal,
            backward=settings.backward,
            lengths=list(settings.lengths),
            repeats=settings.repeats,
            seed=settings.seed,
            num_verified=NUM_VERIFIED,
            error_bound=settings.error_bound(built),
            exact_limit=exact_limit,
            memory=memory.how_measured(settings),
        )

    def operations(self, length: int) -> float:
        """Floating-point operations of one call of each contender, for an estimate of the time left.

        Returns:
            The count; exact attention is counted even where it will be left out.
        """
        settings, head_dim = self._settings, self._settings.head_dim
        one = flops_per_token(settings.build(), value_dim=head_dim, is_causal=settings.is_causal)
        exact = exact_flops_per_token(length, head_dim=head_dim, value_dim=head_dim, is_causal=settings.is_causal)
        return float(settings.batch * settings.heads * length * (one + exact))

    def rows(self, kept: Sequence[LengthRow], announce: Callable[[str], None]) -> Iterator[LengthRow]:
        """Measure every length that is not among those kept.

        Cost: per length and contender, repeats + 1 calls; for memory one more in a process of its own.

        Args:
            kept: rows measured before, under the same header.
            announce: told in words what begins.
        """
        before = list(kept)
        done = {row.length for row in before}
        for length in self._settings.lengths:
            if length not in done:
                row = self._row(length, self._predict(before, length), announce)
                before.append(row)
                yield row

    def _row(self, length: int, predicted: float | None, announce: Callable[[str], None]) -> LengthRow:
        """One length."""
        settings = self._settings
        left_out = predicted is not None and predicted > self.header.exact_limit
        announce(f"L = {length:,}: verifying")
        inputs = draw_inputs(settings, length)
        errors = verify(settings, inputs)
        announce(f"L = {length:,}: timing")
        found = self._time(inputs, with_exact=not left_out)
        if memory.can_measure(settings):
            announce(f"L = {length:,}: memory")
        return LengthRow(
            length=length,
            error=errors.error,
            gradient_error=errors.gradient_error,
            approximation_error=errors.approximation_error,
            uniform_error=errors.uniform_error,
            linear_seconds=found[LINEAR],
            exact_seconds=found.get(EXACT),
            exact_predicted=predicted if left_out else None,
            linear_memory=self._memory(length, LINEAR),
            exact_memory=None if left_out else self._memory(length, EXACT),
        )

    def _time(self, inputs: Inputs, *, with_exact: bool) -> dict[str, list[float]]:
        """Seconds of each contender."""
        built = fitted_method(self._settings, inputs)
        runs = {LINEAR: linear_run(self._settings, inputs, built)}
        if with_exact:
            runs[EXACT] = exact_run(self._settings, inputs, built)
        return seconds(runs, repeats=self._settings.repeats)

    def _memory(self, length: int, contender: str) -> int | None:
        """Bytes of one contender, where they can be measured."""
        return memory.measure(self._settings, length, contender) if memory.can_measure(self._settings) else None

    def _predict(self, before: Sequence[LengthRow], length: int) -> float | None:
        """Seconds of a call of exact attention, grown as L² from the last length it was timed at."""
        timed = [row for row in before if row.exact_seconds is not None and row.length < length]
        if not timed:
            return None
        last = max(timed, key=lambda row: row.length)
        return median(last.exact_seconds or []) * (length / last.length) ** 2
