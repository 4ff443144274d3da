"""Claim: beyond inputs, outputs and gradients, 65,536 tokens need at most 128 MB forward and 256 MB with backward.

8 heads, D = 64, 256 features, float32; each case in a process of its own, by the kernel's high-water mark (Linux). The
result is verified against the quadratic reference in float64.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import linattn
from measuring import favor, record, tokens, verified

LENGTH = 65_536
BOUNDS = {"forward": 128e6, "forward and backward": 256e6}


def status(field: str) -> int:
    """A memory figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def run(inputs: list[torch.Tensor], is_causal: bool, backward: bool) -> int:
    """Attend, differentiate, and return the bytes of what comes out."""
    out = linattn.linear_attention(*inputs, favor(), is_causal=is_causal)
    results = [out, *(torch.autograd.grad(out, inputs, torch.ones_like(out)) if backward else ())]
    return sum(x.nbytes for x in results)


def measure(is_causal: bool, backward: bool) -> None:
    """Print the peak extra bytes; runs in a process of its own, warmed up on a short input."""
    run(tokens(512, gradients=backward), is_causal, backward)
    inputs = tokens(LENGTH, gradients=backward)
    upstream = inputs[0].nbytes if backward else 0
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    results = run(inputs, is_causal, backward)
    print(status("VmHWM") - before - results - upstream)


def main() -> None:
    """Verify and record every case."""
    for is_causal in (False, True):
        wrong = verified(favor(), is_causal=is_causal)
        for backward, bound in zip((False, True), BOUNDS.values(), strict=True):
            command = [sys.executable, __file__, str(int(is_causal)), str(int(backward))]
            # Memory that the warm-up freed must go back to the system, or its reuse would not show.
            environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "0"}
            printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
            extra = int(printed.splitlines()[-1])
            record(
                f"peak extra memory at 65,536 tokens, {'causal' if is_causal else 'bidirectional'}, "
                f"{'forward and backward' if backward else 'forward'}",
                figure=extra / 1e6,
                unit="MB",
                bound=f"<= {bound / 1e6:.0f}",
                length=LENGTH,
                error=wrong,
            )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(*(bool(int(x)) for x in sys.argv[1:]))
    else:
        main()
