"""The kernels under laws, on a GPU, or else in Triton's interpreter, which has to be chosen before Triton is imported:
each file of laws runs in a process of its own.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import linattn
from grid import build, qkv

# Where there are wheels of it, one that is missing is an error.
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None and (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="Triton has no wheel for this platform",
)
FILES = sorted((Path(__file__).parent / "triton").glob("laws_*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_laws_hold(path: Path) -> None:
    # What an interpreter computes in masked lanes overflows, and numpy says so.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::RuntimeWarning",
        str(path),
    ]
    environment = os.environ | {"TRITON_INTERPRET": str(int(not torch.cuda.is_available()))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:]


def test_it_refuses_with_every_reason() -> None:
    tokens = qkv(value_dim=300)
    message = (
        r"'triton' cannot run this call: .*on cpu.*torch.float64; it has no kernel for maps whose queries read one "
        r"group.*width 1 to 256 in torch.float64, and these have 300; choose another"
    )
    with pytest.raises(ValueError, match=message):
        linattn.linear_attention(*tokens, build("Expansion"), enable_gqa=True, backend="triton")


# What "auto" looks at is where the tensors are, and a tensor is on a GPU where there is one alone.
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_auto_takes_it_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from linattn.attention.backends.triton import Triton

    used = []
    monkeypatch.setattr(Triton, "absorb", lambda *_: used.append(1))
    with pytest.raises(AttributeError):
        linattn.linear_attention(*(x.float().cuda() for x in qkv()), build("FavorPlus").cuda(), enable_gqa=True)
    assert used
