"""Claim: beyond inputs, outputs and gradients, 65,536 tokens need at most 128 MB forward and 256 MB with backward.

8 heads, D = 64, 256 features, float32; each case in a process of its own, by the kernel's high-water mark (Linux). The
result is verified against the quadratic reference in float64.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

import linattn
from linattn_lab.bench.memory import CHILD_SETTINGS, extra_peak
from measuring import favor, record, tokens, verified

LENGTH = 65_536
BOUNDS = {"forward": 128e6, "forward and backward": 256e6}


def run(inputs: list[torch.Tensor], is_causal: bool, backward: bool) -> list[torch.Tensor]:
    """Attend, differentiate, and return what comes out."""
    out = linattn.linear_attention(*inputs, favor(), is_causal=is_causal)
    return [out, *(torch.autograd.grad(out, inputs, torch.ones_like(out)) if backward else ())]


def measure(is_causal: bool, backward: bool) -> None:
    """Print the peak extra bytes; runs in a process of its own, warmed up on a short input."""
    run(tokens(512, gradients=backward), is_causal, backward)
    inputs = tokens(LENGTH, gradients=backward)
    # The output, and with a backward pass three gradients and the one that came in.
    results = inputs[0].nbytes * (5 if backward else 1)
    print(extra_peak(lambda: run(inputs, is_causal, backward)) - results)


def main() -> None:
    """Verify and record every case."""
    for is_causal in (False, True):
        wrong = verified(favor(), is_causal=is_causal)
        for backward, bound in zip((False, True), BOUNDS.values(), strict=True):
            command = [sys.executable, __file__, str(int(is_causal)), str(int(backward))]
            printed = subprocess.run(
                command, capture_output=True, text=True, check=True, env=os.environ | CHILD_SETTINGS
            ).stdout
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
