"""Claim: `import linattn` takes at most 1.1 times as long as `import torch`, which it needs.

Each import in a process of its own, turn by turn, timed inside it; the first turn, which reads files anew and
compiles them, as an installer does, is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from measuring import ratios, record, require

REPEATS = 11
_TIMED = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
_RESULT = (
    "import torch, linattn; q = torch.ones(1, 1, 9, 4); "
    "print((linattn.linear_attention(q, q, q, linattn.feature_maps.EluPlusOne(4)) - q).abs().max().item())"
)


def printed(code: str, compiled: str) -> float:
    """The number that a process of its own prints; what it compiles is kept in a folder."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**settings, "PYTHONPYCACHEPREFIX": compiled}
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Verify, time, record."""
    samples: dict[str, list[float]] = {"linattn": [], "torch": []}
    with tempfile.TemporaryDirectory() as compiled:
        error = printed(_RESULT, compiled)
        require("what was imported", error, 1e-6)
        for _ in range(REPEATS + 1):
            for name, times in samples.items():
                times.append(printed(_TIMED.format(name), compiled))
    ours, torchs = (samples[name][1:] for name in ("linattn", "torch"))
    record(
        "time of `import linattn` over that of `import torch`",
        figure=ratios(ours, torchs),
        unit="×",
        bound="<= 1.1",
        error=error,
    )


if __name__ == "__main__":
    main()
