"""The series of random features whose rows have one length, against scipy and against an identity."""

from __future__ import annotations

import math

import pytest
import scipy.special
import torch

from linattn.feature_maps.random_features import log_0f1

Z = torch.tensor([0.0, 1e-6, 0.3, 2.0, 17.0, 90.0], dtype=torch.float64)


@pytest.mark.parametrize("b", [0.5, 1.0, 4.0, 32.0])
def test_0f1(b: float) -> None:
    expected = torch.from_numpy(scipy.special.hyp0f1(b, Z.numpy())).log()
    torch.testing.assert_close(log_0f1(b, Z), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("b", [0.5, 32.0, 64.0])
def test_large_arguments_stay_finite(b: float) -> None:
    """0F1(;b;z) = Γ(b)·z^((1-b)/2)·I_{b-1}(2√z), far above the largest float64."""
    z = torch.tensor([4e5, 1.6e6], dtype=torch.float64)
    root = 2 * z.sqrt()
    log_bessel = torch.from_numpy(scipy.special.ive(b - 1, root.numpy())).log() + root
    expected = math.lgamma(b) + (1 - b) / 2 * z.log() + log_bessel
    assert (expected > math.log(torch.finfo(torch.float64).max)).all()
    torch.testing.assert_close(log_0f1(b, z), expected, rtol=1e-13, atol=0)
