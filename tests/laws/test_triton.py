"""The kernels under laws, on a GPU, or else in Triton's interpreter, which has to be chosen before Triton is imported:
files of laws run in processes of their own, two in each.
"""

from __future__ import annotations

import platform
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import linattn
from grid import build, qkv
from linattn.attention.backends import BACKENDS, Call, choose
from linattn.attention.backends.triton import Triton
from linattn.attention.bound_map import BoundMap

# Where there are wheels of it, one that is missing is an error.
pytestmark = pytest.mark.skipif(
    find_spec("triton") is None and (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="Triton has no wheel for this platform",
)
FILES = sorted((Path(__file__).parent / "triton").glob("laws_*.py"))
SHARES = [FILES[::2], FILES[1::2]]


# Before anything has imported Triton.
PROGRAM = """
import os, sys, pytest
os.environ["TRITON_INTERPRET"] = sys.argv.pop()
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("paths", SHARES, ids=lambda paths: "-".join(path.stem for path in paths))
def test_laws_hold(paths: list[Path], run_program) -> None:
    # What an interpreter computes in masked lanes overflows, and numpy says so.
    options = ["-x", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    done = run_program(PROGRAM, *options, *paths, int(not torch.cuda.is_available()))
    assert done.returncode == 0, done.stdout[-8000:]


def test_it_refuses_with_every_reason() -> None:
    tokens = qkv(value_dim=300)
    message = (
        r"'triton' cannot run this call: .*on cpu.*torch.float64; it has no kernels for maps whose queries read one "
        r"group of the features, as Expansion; .*width 1 to 256, and these have 300; choose another"
    )
    with pytest.raises(ValueError, match=message):
        linattn.linear_attention(*tokens, build("Expansion"), enable_gqa=True, backend="triton")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_auto_leaves_it_out(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """On a GPU too, until one has run these laws, and even where it has no objection; fake tensors need no GPU."""
    monkeypatch.setattr(Triton, "objections", lambda *_: [])
    feature_map = build("FavorPlus")
    with FakeTensorMode():
        query, key, value = (torch.empty(1, 2, 3, 4, device=device) for _ in range(3))
        call = Call(BoundMap(feature_map, {}), query.unsqueeze(2), key, value, None, is_causal=False)
        assert choose("auto", call) is BACKENDS["blocked"]
        assert choose("triton", call) is BACKENDS["triton"]
