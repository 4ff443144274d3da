"""Claim: beyond inputs, outputs and gradients, 65,536 tokens need at most 128 MB forward and 256 MB with backward.

8 heads, D = 64, 256 features, float32; each case in a process of its own, by the kernel's high-water mark (Linux). The
result is verified at 512 tokens against the quadratic reference in float64.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import linattn
from measuring import record, relative_error, require

LENGTH, HEADS, HEAD_DIM, NUM_FEATURES = 65_536, 8, 64, 256
BOUNDS = {"forward": 128e6, "forward and backward": 256e6}


def status(field: str) -> int:
    """A memory figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def inputs(length: int, backward: bool) -> list[torch.Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, HEAD_DIM)
    return [torch.randn(*shape, generator=generator).requires_grad_(backward) for _ in range(3)]


def run(tokens: list[torch.Tensor], is_causal: bool, backward: bool) -> int:
    """Attend, differentiate, and return the bytes of what comes out."""
    feature_map = linattn.feature_maps.FavorPlus(HEAD_DIM, NUM_FEATURES)
    out = linattn.linear_attention(*tokens, feature_map, is_causal=is_causal)
    results = [out, *(torch.autograd.grad(out, tokens, torch.ones_like(out)) if backward else ())]
    return sum(x.nbytes for x in results)


def measure(is_causal: bool, backward: bool) -> None:
    """Print the peak extra bytes; runs in a process of its own, warmed up on a short input."""
    run(inputs(512, backward), is_causal, backward)
    tokens = inputs(LENGTH, backward)
    upstream = tokens[0].nbytes if backward else 0
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    results = run(tokens, is_causal, backward)
    print(status("VmHWM") - before - results - upstream)


def error(is_causal: bool) -> float:
    """Relative error at 512 tokens against the quadratic reference in float64."""
    feature_map, tokens = linattn.feature_maps.FavorPlus(HEAD_DIM, NUM_FEATURES), inputs(512, False)
    truth = linattn.linear_attention(
        *(x.double() for x in tokens), feature_map, is_causal=is_causal, backend="reference"
    )
    return relative_error(linattn.linear_attention(*tokens, feature_map, is_causal=is_causal), truth)


def main() -> None:
    """Verify and record every case."""
    for is_causal in (False, True):
        wrong = error(is_causal)
        require("memory_stays_small", wrong, 1e-4)
        for backward, bound in zip((False, True), BOUNDS.values(), strict=True):
            command = [sys.executable, __file__, str(int(is_causal)), str(int(backward))]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            extra = int(printed.splitlines()[-1])
            record(
                "peak extra memory at 65,536 tokens",
                direction="causal" if is_causal else "bidirectional",
                passes="forward and backward" if backward else "forward",
                shape=[1, HEADS, LENGTH, HEAD_DIM],
                num_features=NUM_FEATURES,
                error=wrong,
                extra_megabytes=extra / 1e6,
                bound_megabytes=bound / 1e6,
                holds=extra <= bound,
            )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(*(bool(int(x)) for x in sys.argv[1:]))
    else:
        main()
