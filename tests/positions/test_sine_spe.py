"""SineSPE: the mean over draws is the learned kernel, and draws are the seed's."""

from __future__ import annotations

import torch

from grid import tokens
from linattn.positions import SineSpe


def spe(num_realizations: int, seed: int = 0) -> SineSpe:
    """Two heads of waves unlike each other."""
    made = SineSpe(3, num_realizations, 2, num_heads=2, seed=seed).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for parameter in (made.phase, made.gain, made.frequency):
        parameter += torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def test_the_mean_is_the_kernel() -> None:
    """E q̂·k̂ = Σ_d q_d P_d(m - n) k_d for every query head of a group, by 100,000 realisations."""
    number = 100_000
    encoding = spe(number)
    q, k = tokens(1, 4, 3, 3, seed=1), tokens(1, 2, 3, 3, seed=2)
    at = torch.tensor([40, 47, 66])
    q_hat, k_hat = encoding(q, k, at)
    found = q_hat.unflatten(1, (2, 2)) @ k_hat.unsqueeze(2).mT
    similarity = encoding.similarity(at.unsqueeze(1) - at)  # (3, 3, H, D)
    expected = torch.einsum("bhgmd,mnhd,bhnd->bhgmn", q.unflatten(1, (2, 2)), similarity, k)
    # Each of the products of two Gaussians has at most this deviation.
    deviation = (2 * q_hat.square().mean() * k_hat.square().mean() * number).sqrt()
    assert float((found - expected).abs().max()) < 5 * float(deviation)
    assert float(expected.abs().max()) > 50 * float(deviation)


def test_similarity_at_0_is_the_phases() -> None:
    encoding = spe(4)
    assert float(encoding.similarity(torch.arange(9)).abs().max()) <= 1
    encoding.phase.zero_()
    torch.testing.assert_close(encoding.similarity(torch.tensor(0)), torch.ones(2, 3, dtype=torch.float64))


def test_draws_are_the_seeds() -> None:
    first, again, other = spe(4), spe(4), spe(4, seed=1)
    assert torch.equal(first.noise, again.noise)
    assert not torch.equal(first.noise, other.noise)
    other.load_state_dict(first.state_dict())
    assert torch.equal(first.noise, other.noise)
    again.redraw(1)
    assert torch.equal(again.noise, spe(4, seed=1).noise)
