"""Compile the kernels of calls, forward and backward, for GPUs that need not be there; print what became of each.

    TRITON_INTERPRET=0 python tests/laws/triton/compiled.py CAPABILITY-DTYPE-WIDTH-MAP ...

One line of JSON for each call and kernel: registers, stack and shared memory in bytes, matrix instructions. The
launches are the shipped ones, stopped before a device would have to be there.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import linattn
from linattn_triton import launching, tiles
from linattn_triton.objections import objections

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
PRODUCTS = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")
LENGTH = 256


class Driver:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Kernels are compiled once for a device.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def describe(compiled: Any) -> dict[str, int]:
    """Registers, stack, shared memory and matrix instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOL, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK"))
    products = sum(compiled.asm["ptx"].count(name) for name in PRODUCTS)
    return {"registers": registers, "stack": stack, "shared": compiled.metadata.shared, "products": products}


def compile_instead(call: str, capability: int) -> None:
    """Have launches compile and print."""
    done = set()

    def launch(kernel: Any, programs: int, arguments: Sequence[Any], tuning: tiles.Tuning) -> None:
        flags = tuple(x for x in arguments if isinstance(x, bool))
        if (kernel.__name__, *flags) in done:
            return
        done.add((kernel.__name__, *flags))
        options = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
        found = describe(kernel.warmup(*arguments, grid=(1,), **options))
        sys.stdout.write(json.dumps({"call": call, "kernel": kernel.__name__} | found) + "\n")
        sys.stdout.flush()

    launching.launch = launch
    launching.capability = lambda _: divmod(capability, 10)


def compile_call(call: str) -> None:
    """Compile the kernels of a causal call, and of one token."""
    capability, dtype, width, name = call.split("-")
    head_dim = int(width)
    driver.set_active(Driver(int(capability)))
    compile_instead(call, int(capability))
    kind = linattn.feature_maps.FEATURE_MAPS[name]
    feature_map = kind(head_dim) if name == "Relu" else kind(head_dim, 256)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(1, 2, LENGTH, head_dim, generator=generator) for _ in range(3)]
    leaves = [x.to(getattr(torch, dtype)).requires_grad_() for x in tokens]
    linattn.linear_attention(*leaves, feature_map, is_causal=True, backend="triton").sum().backward()
    with torch.no_grad():
        linattn.linear_attention_with_state(*(x[:, :, :1] for x in leaves), feature_map, backend="triton")


def main() -> None:
    """Compile the calls in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("call", nargs="+")
    # Tensors lie on the CPU; no kernel runs.
    sys.modules[objections.__module__].is_interpreted = lambda: True
    for call in parser.parse_args().call:
        compile_call(call)


if __name__ == "__main__":
    main()
