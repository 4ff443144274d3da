"""Claim: merged keys take a twentieth of exact attention's time at 16,384 tokens, causally a sixth.

8 heads, D = 64, 128 merged keys, float32, in compiled code, beside torch's scaled_dot_product_attention and beside
merging in plain torch. Merging is what is left of the time when as many keys are read by that kernel. Verified first:
with as many merged keys as tokens the output is exact, and with fewer it is that of plain torch.
Memory at 65,536 tokens beyond inputs and output in a process of its own, by the kernel's high-water mark (Linux).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import torch
from torch.nn import functional as F

import linattn
from linattn_lab.bench.memory import CHILD_SETTINGS, extra_peak
from measuring import ratios, record, relative_error, require, seconds, spread, tokens

LENGTH, LONG, REPEATS, NUM_MERGED = 16_384, 65_536, 9, 128
# Compiled code keeps no attention sinks beside exact keys.
ALONE, BESIDE, CAUSAL = (linattn.MergedKV(window, NUM_MERGED, None, num_sinks=0) for window in (None, 32, 128))


def attend(
    inputs: list[torch.Tensor], config: linattn.MergedKV, *, is_causal: bool = False, backend: str = "compiled"
) -> torch.Tensor:
    """The op."""
    return linattn.merged_attention(*inputs, config, is_causal=is_causal, backend=backend)


def verify() -> float:
    """The largest error where there are enough merged keys, and the largest difference from plain torch."""
    inputs, worst = tokens(700), 0.0
    for is_causal in (False, True):
        truth = linattn.softmax_attention(*(x.double() for x in inputs), is_causal=is_causal)
        found = attend(inputs, linattn.MergedKV(32, 700, None, num_sinks=0), is_causal=is_causal)
        worst = max(worst, relative_error(found, truth))
        for config in (CAUSAL,) if is_causal else (ALONE, BESIDE):
            pair = (attend(inputs, config, is_causal=is_causal, backend=name) for name in ("compiled", "torch"))
            worst = max(worst, relative_error(*pair))
    require("merged keys", worst, 1e-5)
    return worst


def measure_memory(is_causal: bool) -> None:
    """Print the peak extra bytes; runs in a process of its own, warmed up on a short input."""
    config = CAUSAL if is_causal else BESIDE
    with torch.no_grad():
        attend(tokens(2048), config, is_causal=is_causal)
        inputs = tokens(LONG)
        print(extra_peak(lambda: attend(inputs, config, is_causal=is_causal)) - inputs[0].nbytes)


@torch.no_grad()
def main() -> None:
    """Verify, time, record."""
    error, inputs = verify(), tokens(LENGTH)
    few = [x[:, :, :NUM_MERGED] for x in inputs[1:]]
    timed = seconds(
        {
            "exact": lambda: F.scaled_dot_product_attention(*inputs),
            "merged": lambda: attend(inputs, ALONE),
            "window": lambda: attend(inputs, BESIDE),
            "read": lambda: F.scaled_dot_product_attention(inputs[0], *few),
            "merged in torch": lambda: attend(inputs, ALONE, backend="torch"),
            "window in torch": lambda: attend(inputs, BESIDE, backend="torch"),
            "exact causal": lambda: F.scaled_dot_product_attention(*inputs, is_causal=True),
            "causal": lambda: attend(inputs, CAUSAL, is_causal=True),
            "causal in torch": lambda: attend(inputs, CAUSAL, is_causal=True, backend="torch"),
        },
        repeats=REPEATS,
    )
    merging = [1 - a / b for a, b in zip(timed["read"], timed["merged"], strict=True)]
    rows = (
        ("exact attention over 128 merged keys", ratios(timed["exact"], timed["merged"]), "×", ">= 20"),
        ("merged keys with a window of 32 over those without", ratios(timed["window"], timed["merged"]), "×", "<= 1.5"),
        ("share of the time that goes into merging", spread(merging), "", "<= 0.3"),
        (
            "causal exact attention over window 128 + merged 128",
            ratios(timed["exact causal"], timed["causal"]),
            "×",
            ">= 6",
        ),
        *(
            (
                f"merging in compiled code over that in plain torch, {what}",
                ratios(timed[name], timed[f"{name} in torch"]),
                "×",
                "<= 0.8",
            )
            for what, name in (
                ("128 merged keys", "merged"),
                ("with a window of 32", "window"),
                ("causal, window 128", "causal"),
            )
        ),
    )
    medians = {name: statistics.median(found) for name, found in timed.items()}
    for claim, figure, unit, bound in rows:
        record(f"{claim}, {LENGTH:,} tokens", figure=figure, unit=unit, bound=bound, error=error, seconds=medians)
    for is_causal in (False, True):
        command, settings = [sys.executable, __file__, str(int(is_causal))], os.environ | CHILD_SETTINGS
        printed = subprocess.run(command, capture_output=True, text=True, check=True, env=settings).stdout
        kind = "causal, window 128" if is_causal else "bidirectional, window 32"
        record(
            f"peak extra memory of 128 merged keys at {LONG:,} tokens, {kind}",
            figure=int(printed.splitlines()[-1]) / 1e6,
            unit="MB",
            bound="<= 192",
            error=error,
        )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        measure_memory(bool(int(sys.argv[1])))
    else:
        main()
