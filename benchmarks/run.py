"""Run every benchmark, each in a process of its own, and collect the rows in results.jsonl.

    python run.py [NAME …]

A benchmark's rows take the place of its former ones when it has ended well; those of one that failed stay as they were,
and it is named at the end.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import measuring
from result_file import put_in_place, read_rows, write_rows

HERE = Path(__file__).parent
NOT_CLAIMS = {"run", "measuring", "ranks", "result_file"}
# Hours, or a GPU: run by themselves.
LONG = {"language_models_at_equal_time", "gpu_kernels", "bounded_cache_on_a_gpu"}
ONE = "--one"


def names() -> list[str]:
    """All benchmarks."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_CLAIMS | LONG)


def run_one(name: str, results: Path) -> None:
    """Run a benchmark in this process, its rows going to another file."""
    measuring.RESULTS = results
    claim = HERE / f"{name}.py"
    sys.argv = [str(claim)]
    runpy.run_path(str(claim), run_name="__main__")


def run_all(chosen: list[str], results: Path) -> list[str]:
    """Run benchmarks one after the other, and give the names of those that failed or measured nothing."""
    failed = []
    for name in chosen:
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            fresh = Path(folder) / "results.jsonl"
            command = [sys.executable, str(HERE / "run.py"), ONE, name, str(fresh)]
            ended = subprocess.run(command, cwd=HERE, check=False).returncode
            rows = read_rows(fresh)
        if ended != 0 or not rows:
            failed.append(name)
            continue
        # Read again each time: another run may have added to it meanwhile.
        write_rows(results, put_in_place(read_rows(results), rows, lambda row, of=name: row.get("benchmark") == of))
    return failed


def main() -> int:
    """1 if any benchmark failed, else 0."""
    words = sys.argv[1:]
    if words[:1] == [ONE]:
        run_one(words[1], Path(words[2]))
        return 0
    unknown = sorted(set(words) - set(names()))
    if unknown:
        sys.exit(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(names())}")
    failed = run_all(words or names(), measuring.RESULTS)
    if failed:
        print(f"failed, former figures kept: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
