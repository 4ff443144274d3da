"""Random cases by hand: `python tests/fuzz.py --cases 100000 [--seed S] [--workers 2] [--minutes M]`, or one by number
with `--case N`, which prints its calls and, if it fails, why.

Every case is drawn from its number; a run takes the numbers from S on. `tests/test_fuzz.py` runs the first ones.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator

import torch

from fuzzing import running

_SECONDS_BETWEEN_LINES = 15.0


def main() -> int:
    """Run cases; the exit status says whether all passed."""
    options = _options().parse_args()
    torch.set_num_threads(1)
    if options.case is not None:
        return _one(options.case)
    started, failed, done = time.monotonic(), [], Counter[str]()
    told = started
    for end in _ends(options):
        done[end.kind] += 1
        if end.symptom:
            failed.append(end.number)
            _say(f"case {end.number} ({end.kind}) failed: {end.symptom}")
        now = time.monotonic()
        if now - told > _SECONDS_BETWEEN_LINES:
            told = now
            _say(f"{done.total()} cases, {len(failed)} failed, {now - started:.0f} s")
        if options.minutes is not None and now - started > 60 * options.minutes:
            break
    _say(", ".join(f"{kind} {count}" for kind, count in sorted(done.items())))
    _say(f"{done.total() - len(failed)} passed, {len(failed)} failed")
    if failed:
        _say(f"failing cases: {' '.join(str(number) for number in sorted(failed))}")
    return int(bool(failed))


def _options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run random cases of attention against a dense oracle.")
    parser.add_argument("--case", type=int, help="run this case alone and print its calls")
    parser.add_argument("--cases", type=int, default=10_000, help="how many cases (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="the first case's number (default 0)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    return parser


def _one(number: int) -> int:
    """Run one case and print it."""
    end = running.run(number)
    _say(f"case {number}, {end.kind}:\n{end.calls}")
    _say(end.trace or ("refused, as documented" if end.refused else "passed"))
    return int(bool(end.symptom))


def _ends(options: argparse.Namespace) -> Iterator[running.End]:
    """The cases as they end."""
    numbers = range(options.seed, options.seed + options.cases)
    if options.workers == 1:
        yield from map(running.run, numbers)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.workers, torch.set_num_threads, (1,)) as pool:
        yield from pool.imap_unordered(running.run, numbers, chunksize=16)


def _say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
