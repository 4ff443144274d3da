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
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import linattn
from grid import build, qkv
from linattn.attention.backends import Call, choose
from linattn.attention.backends.triton import Triton
from linattn.attention.bound_map import BoundMap
from linattn.feature_maps import Expansion
from linattn.feature_maps._grouped import GroupedFeatureMap

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
        r"'triton' cannot run this call: .*on cpu.*torch.float64; it has kernels for expansions of order 0 and 1.*"
        r"width 1 to 128, and these have 300; choose another"
    )
    with pytest.raises(ValueError, match=message):
        linattn.linear_attention(*tokens, build("Expansion-2"), enable_gqa=True, backend="triton")


def test_it_refuses_expansions_it_has_no_kernels_for() -> None:
    """Wide ones, those whose centres are trained, and other maps of groups."""
    wide = Expansion(160, 2, centres=torch.zeros(2, 160))
    trained = Expansion(8, 2, centres=torch.zeros(2, 8))
    trained.centres.requires_grad_()
    for feature_map, message in (
        (wide, "heads up to 128 wide, and this has 160"),
        (trained, "centres as constants, and gradients follow these"),
        (OneGroup(8), "kernels for Expansion alone"),
    ):
        tokens = qkv(head_dim=feature_map.head_dim, dtype=torch.float32)
        with pytest.raises(ValueError, match=message):
            linattn.linear_attention(*tokens, feature_map, enable_gqa=True, backend="triton")


class OneGroup(GroupedFeatureMap):
    """A user's map of one group: φ(q)·φ(k) = 1."""

    nonnegative = True

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, 1, 1)

    def places(self) -> Tensor:
        return torch.zeros(1, 1)

    def group(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[:-1], dtype=torch.int64)

    def local_query(self, x: Tensor, place: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., :1] * 0 + 1, x[..., 0] * 0

    def least_normalizer(self, z: Tensor) -> Tensor:
        return z[..., 0]

    def key(self, x: Tensor) -> Tensor:
        return x[..., :1] * 0 + 1

    def key_log_weight(self, x: Tensor) -> Tensor:
        return x[..., :1] * 0

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        return (q[..., :1] * 0 + 1) @ (k[..., :1] * 0 + 1).mT


@pytest.mark.parametrize("objections", [[], ["a reason"]])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_auto_takes_it_on_a_gpu_where_it_may(
    monkeypatch: pytest.MonkeyPatch, device: str, objections: list[str]
) -> None:
    """Decided by where the tensors are; fake ones are on a GPU that need not be there."""
    monkeypatch.setattr(Triton, "objections", lambda *_: objections)
    feature_map = build("FavorPlus")
    with FakeTensorMode():
        query, key, value = (torch.empty(1, 2, 3, 4, device=device) for _ in range(3))
        call = Call(BoundMap(feature_map, {}), query.unsqueeze(2), key, value, None, is_causal=False)
        assert isinstance(choose("auto", call), Triton) == (device == "cuda" and not objections)
