"""What a conversion minimises, against its definitions in float64, and padding leaves no trace."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import kl_div

from linattn.convert.distilling import distillation, squared_relative_error
from linattn.convert.transfer import row_divergence

LIVE = torch.tensor([[True, True, False, True], [False, True, True, True]])


def rows(*shape, seed=0):
    """Logarithms of rows that sum to 1, in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def states(seed, width=5):
    return torch.randn(2, 4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def poisoned(x):
    """The same where tokens are live, and nan where they are padding."""
    return torch.where(LIVE.unsqueeze(-1), x, torch.nan)


def test_row_divergence_is_torchs():
    log_p, log_a = rows(2, 3, 4, 6), rows(2, 3, 4, 6, seed=1)
    expected = kl_div(log_a, log_p, log_target=True, reduction="none").sum(-1).mean()
    torch.testing.assert_close(row_divergence(log_p, log_a.exp()), expected)
    assert row_divergence(log_p, log_p.exp()).abs() < 1e-15


def test_row_divergence_where_keys_are_hidden():
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    log_p = rows(1, 1, 4, 4).masked_fill(hidden, -torch.inf).log_softmax(-1)
    a = rows(1, 1, 4, 4, seed=1).masked_fill(hidden, -torch.inf).log_softmax(-1).exp().requires_grad_()
    found = row_divergence(log_p, a)
    by_hand = [
        sum(math.exp(log_p[0, 0, i, j]) * (log_p[0, 0, i, j] - math.log(a.detach()[0, 0, i, j])) for j in range(i + 1))
        for i in range(4)
    ]
    assert found.item() == pytest.approx(sum(by_hand) / 4)
    found.backward()
    assert a.grad.isfinite().all()
    assert not a.grad[0, 0][hidden].any()


def test_row_divergence_of_weights_that_underflowed():
    log_p = torch.tensor([0.5, 0.5]).log()
    a = torch.tensor([1.0, 0.0], requires_grad=True)
    found = row_divergence(log_p, a)
    assert found.item() == pytest.approx(math.log(0.5) - 0.5 * math.log(torch.finfo(torch.float32).tiny))
    found.backward()
    assert a.grad.tolist() == [-0.5, 0.0]


def test_squared_relative_error_by_hand_and_at_any_scale():
    ours, theirs = states(0), states(1)
    difference = sum((ours - theirs)[b, i].square().sum() for b in range(2) for i in range(4) if LIVE[b, i])
    size = sum(theirs[b, i].square().sum() for b in range(2) for i in range(4) if LIVE[b, i])
    found = squared_relative_error(ours, theirs, LIVE)
    torch.testing.assert_close(found, difference / size)
    torch.testing.assert_close(squared_relative_error(1e3 * ours, 1e3 * theirs, LIVE), found)
    assert squared_relative_error(theirs, theirs, LIVE) == 0


def test_distillation_is_half_the_last_layer_and_half_all():
    ours, theirs = [states(n) for n in range(3)], [states(n) for n in range(3, 6)]
    errors = [squared_relative_error(a, b, LIVE) for a, b in zip(ours, theirs, strict=True)]
    found = distillation(ours, theirs, LIVE)
    torch.testing.assert_close(found, errors[-1] / 2 + sum(errors) / 6)
    torch.testing.assert_close(distillation(ours, theirs, LIVE, torch.tensor(2.0)), found + 2)
    with pytest.raises(ValueError, match="longer"):
        distillation(ours[:2], theirs, LIVE)


def test_padding_leaves_no_trace():
    ours, theirs = states(0), states(1)
    dirty = poisoned(ours).requires_grad_()
    found = squared_relative_error(dirty, poisoned(theirs), LIVE)
    assert found == squared_relative_error(ours, theirs, LIVE)
    found.backward()
    assert dirty.grad.isfinite().all()
    assert not dirty.grad[~LIVE].any()


def test_gradients():
    log_p, a = rows(1, 2, 2, 3), rows(1, 2, 2, 3, seed=1).exp().requires_grad_()
    assert torch.autograd.gradcheck(lambda a: row_divergence(log_p, a), a)
    ours, theirs = states(0).requires_grad_(), states(1)
    assert torch.autograd.gradcheck(lambda x: squared_relative_error(x, theirs, LIVE), ours)
    assert torch.autograd.gradcheck(lambda x: distillation([x.sin(), x], [theirs, theirs], LIVE, x.sum()), ours)
