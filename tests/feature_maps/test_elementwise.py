"""What elementwise maps promise beyond their kernel: sign, and that no query is dead."""

from __future__ import annotations

import math

import pytest
import torch

from linattn.feature_maps import Dpfp, ElementwisePolynomial, EluPlusOne, Exponential, Relu


def test_elu_plus_one_stays_positive_where_rounding_would_kill_it() -> None:
    x = torch.tensor([[-80.0, -20.0, 0.0, 5.0]])
    phi = EluPlusOne(4).query(x)
    torch.testing.assert_close(phi, torch.tensor([[math.exp(-80), math.exp(-20), 1.0, 6.0]]), rtol=1e-6, atol=0)


def test_elu_plus_one_has_slope_1_at_0() -> None:
    x = torch.zeros(1, 1, requires_grad=True)
    EluPlusOne(1).query(x).sum().backward()
    assert x.grad is not None
    assert x.grad.item() == 1


def test_dpfp_is_nonnegative_and_alive_for_negative_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 6, generator=generator)
    for nu in (1, 2, 11):
        feature_map = Dpfp(6, nu=nu)
        assert (feature_map.query(x) >= 0).all()
        assert (feature_map.query(-x.abs()).amax(-1) > 0).all()


def test_relu_has_its_floor_everywhere() -> None:
    assert Relu(3, floor=0.25).query(-torch.ones(2, 3)).tolist() == [[0.25] * 3] * 2


@pytest.mark.parametrize(("degree", "nonnegative"), [(1, False), (2, True), (3, False), (4, True)])
def test_powers_are_nonnegative_for_even_degrees(degree: int, nonnegative: bool) -> None:
    feature_map = ElementwisePolynomial(1, degree=degree)
    assert feature_map.nonnegative is nonnegative
    assert (feature_map.query(torch.tensor([[-3.0]])).item() >= 0) is nonnegative


def test_the_exponential_is_not_the_softmax_kernel() -> None:
    """D = 1, q = -1, k = (1, -1): the weights are the other way round."""
    q, k = torch.tensor([[-1.0]]), torch.tensor([[1.0], [-1.0]])
    kernel = Exponential(1).kernel(q, k)[0]
    softmax = torch.softmax((q @ k.mT)[0].double(), -1)
    torch.testing.assert_close(kernel / kernel.sum(), softmax.flip(0))
    assert not Exponential(1).softmax_kernel
