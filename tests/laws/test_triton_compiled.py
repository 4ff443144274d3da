"""Every kernel compiles for the GPUs it is shipped for, none of which has to be there: products by matrix instructions,
sums in registers, operands in shared memory.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    # Where there are wheels of it, one that is missing is an error.
    pytest.mark.skipif(
        find_spec("triton") is None and (sys.platform, platform.machine()) != ("linux", "x86_64"),
        reason="Triton has no wheel for this platform",
    ),
    # All calls are compiled by one process.
    pytest.mark.xdist_group("compiled kernels"),
]
SCRIPT = Path(__file__).parent / "triton" / "compiled.py"
# Bytes of shared memory that a block may have (CUDA's compute capabilities), and of stack: 32 registers.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
STACK = 128
KERNELS = {
    "key_offsets", "key_states", "row_outputs", "row_gradients", "state_gradients", "query_gradients", "key_gradients"
}  # fmt: skip
# Whose sums are no products.
EXACT_KERNELS = ("row_gradients", "key_offsets")
IN_FULL = {
    ("float16", 256, 80, "query_gradients"),
    ("float16", 256, 80, "key_gradients"),
}
# Capability, dtype, width of heads, map: FavorPlus has powers, a trained map's exponents are given to the backward
# pass, of Relu features are given.
CALLS = [
    (80, "bfloat16", 64, "FavorPlus"),
    (89, "bfloat16", 64, "FavorPlus"),
    (90, "bfloat16", 64, "FavorPlus"),
    (100, "bfloat16", 64, "FavorPlus"),
    (90, "bfloat16", 128, "FavorPlus"),
    (90, "float16", 64, "FavorPlus"),
    (90, "float32", 64, "FavorPlus"),
    (80, "bfloat16", 128, "FavorPlus"),
    (90, "bfloat16", 256, "FavorPlus"),
    (90, "float16", 128, "FavorPlus"),
    (80, "float16", 128, "FavorPlus"),
    (100, "float16", 128, "FavorPlus"),
    (90, "float32", 128, "FavorPlus"),
    (80, "float16", 256, "FavorPlus"),
    (89, "float32", 256, "FavorPlus"),
    (90, "float16", 256, "FavorPlus"),
    (100, "float32", 256, "FavorPlus"),
    (90, "bfloat16", 64, "LearnedExponential"),
    (90, "bfloat16", 64, "Relu"),
]


def name(call: tuple[int, str, int, str]) -> str:
    """A call in one word."""
    return "-".join(map(str, call))


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, int | str]]:
    """What became of every kernel of every call."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *map(name, CALLS)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("call", CALLS, ids=name)
def test_kernels_compile_within_a_gpu(compiled: list[dict[str, int | str]], call: tuple[int, str, int, str]) -> None:
    capability, dtype, width, _ = call
    rows = [row for row in compiled if row["call"] == name(call)]
    # One token has a kernel of its own, unless a linear map or followed parameters leave it to the others.
    own = {"token_step"} if call[-1] == "FavorPlus" else set()
    assert {row["kernel"] for row in rows} == KERNELS | own
    for row in rows:
        assert row["stack"] <= STACK, row
        assert row["shared"] <= SHARED[capability], row
        # float32 is multiplied exactly, which no matrix instruction does; given features are not multiplied first.
        # TF32 finds no room for the gradients of rows 256 wide on 8.0 and 8.9.
        is_exact = (dtype, width, capability, row["kernel"]) in IN_FULL
        if dtype != "float32" and not is_exact and row["kernel"] not in EXACT_KERNELS:
            assert row["products"] > 0, row
