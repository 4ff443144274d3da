"""Run every benchmark, each in a process of its own, and collect the rows in results.jsonl."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from measuring import RESULTS

HERE = Path(__file__).parent
NOT_CLAIMS = {"run.py", "measuring.py"}


def main() -> int:
    """The number of benchmarks that failed."""
    previous = RESULTS.with_suffix(".previous.jsonl")
    if RESULTS.exists():
        RESULTS.replace(previous)
    failed = 0
    for claim in sorted(path for path in HERE.glob("*.py") if path.name not in NOT_CLAIMS):
        print(f"== {claim.stem}", flush=True)
        failed += subprocess.run([sys.executable, str(claim)], cwd=HERE, check=False).returncode != 0
    previous.unlink(missing_ok=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
