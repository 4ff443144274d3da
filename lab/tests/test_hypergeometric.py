"""The series behind the moments, against scipy and against identities.

Letters: D head width.
"""

from __future__ import annotations

import pytest
import scipy.special
import torch

from linattn_lab.variance import damped_1f1, log_1f1

Z = torch.tensor([0.0, 1e-6, 0.3, 2.0, 17.0, 90.0], dtype=torch.float64)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 64])
def test_1f1_of_an_orthogonal_pair(dim: int) -> None:
    expected = torch.from_numpy(scipy.special.hyp1f1(dim, dim / 2, Z.numpy())).log()
    torch.testing.assert_close(log_1f1(dim, dim / 2, Z), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 64])
def test_negative_arguments_to_an_absolute_1e_13(dim: int) -> None:
    damped = torch.from_numpy(scipy.special.hyp1f1(dim, dim / 2, -Z.numpy()))
    torch.testing.assert_close(damped_1f1(dim, dim / 2, Z), damped, rtol=0, atol=1e-13)
