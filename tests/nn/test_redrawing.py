"""When maps are drawn anew: every so many steps, alike everywhere, resumable, never in evaluation."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from layers import WIDTH, linear, tokens
from linattn.feature_maps import Centred, EluPlusOne, FavorPlus
from linattn.nn import Block, RedrawSchedule


def model(seed: int = 0) -> torch.nn.Sequential:
    """Two layers with draws of their own, and one without."""
    torch.manual_seed(seed)
    wrapped = Centred(FavorPlus(4, 8, seed=1), query_mean=torch.zeros(1, 4), key_mean=torch.zeros(1, 4))
    return torch.nn.Sequential(linear(FavorPlus(4, 8)), linear(EluPlusOne(4)), linear(wrapped))


def draws(of: torch.nn.Module) -> list[torch.Tensor]:
    """Every W, as it is now."""
    return [part.projection.clone() for part in of.modules() if isinstance(part, FavorPlus)]


def test_maps_are_drawn_every_so_many_steps() -> None:
    trained, x = model(), tokens(1, 5)
    schedule, seen = RedrawSchedule(trained, every=3, seed=5), [draws(trained)]
    before = trained(x)
    assert [schedule.step() for _ in range(3)] == [False, False, True]
    assert not torch.equal(trained(x), before)
    seen.append(draws(trained))
    for _ in range(3):
        schedule.step()
    seen.append(draws(trained))
    all_draws = [w for one in seen for w in one]
    assert len({w.sum().item() for w in all_draws}) == len(all_draws) == 6
    assert {w.dtype for w in all_draws} == {torch.float64}


def test_draws_depend_on_the_schedule_alone() -> None:
    """Not on what else was drawn, the ranks' own seeds included."""
    one, other = model(0), model(1)
    for trained in (one, other):
        schedule = RedrawSchedule(trained, every=2)
        for _ in range(4):
            torch.randn(7 if trained is one else 3)
            schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(draws(one), draws(other), strict=True))


@pytest.mark.parametrize("loads_model", [False, True])
def test_a_resumed_run_has_the_draws_of_an_uncut_one(loads_model: bool) -> None:
    uncut, cut = model(), model()
    whole = RedrawSchedule(uncut, every=2, seed=3)
    first = RedrawSchedule(cut, every=2, seed=3)
    for _ in range(5):
        whole.step(), first.step()
    resumed = model()
    if loads_model:
        resumed.load_state_dict(cut.state_dict())
    second = RedrawSchedule(resumed, every=9)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(draws(uncut), draws(resumed), strict=True))
    assert whole.step() == second.step() is True
    assert all(torch.equal(a, b) for a, b in zip(draws(uncut), draws(resumed), strict=True))


# Of torch's checkpoints; None for a plain call.
REENTRANT = pytest.mark.parametrize("reentrant", [None, False, True])


def called(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, reentrant: bool | None) -> torch.Tensor:
    """The function's result, by a checkpoint or without."""
    return function(x) if reentrant is None else checkpoint(function, x, use_reentrant=reentrant)


@REENTRANT
def test_a_redraw_between_forward_and_backward_is_refused(reentrant: bool | None) -> None:
    trained, x = model(), tokens(1, 5).requires_grad_()
    schedule = RedrawSchedule(trained, every=1)
    for _ in range(2):
        out = called(trained, x, reentrant)
        schedule.step()
        with pytest.raises(RuntimeError, match="redraw or fit after backward"):
            out.sum().backward()
        called(trained, x, reentrant).sum().backward()


def test_so_it_is_where_what_follows_is_trained_alone() -> None:
    """A checkpoint repeats frozen layers for the inputs of those after them."""
    frozen, head, x = model().requires_grad_(False), torch.nn.Linear(WIDTH, WIDTH).double(), tokens(1, 5)
    schedule = RedrawSchedule(frozen, every=1)
    out = checkpoint(torch.nn.Sequential(frozen, head), x, use_reentrant=False)
    schedule.step()
    with pytest.raises(RuntimeError, match="redraw or fit after backward"):
        out.sum().backward()


@REENTRANT
def test_redraws_within_a_forward_pass_are_repeated_with_it(reentrant: bool | None) -> None:
    trained, x, gradients = linear(FavorPlus(4, 8)), tokens(1, 5).requires_grad_(), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        trained.feature_map.redraw(5)
        return trained(x)

    for way in (None, reentrant):
        called(forward, x, way).sum().backward()
        gradients.append(x.grad)
        x.grad = None
    assert torch.equal(*gradients)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("is_copy", [False, True])
def test_threads_count_for_themselves(reentrant: bool, is_copy: bool) -> None:
    """As processes do: what was redrawn in one is trained in another."""
    trained, x, gradients = linear(FavorPlus(4, 8)), tokens(1, 5).requires_grad_(), []

    def train() -> None:
        called(copy.deepcopy(trained) if is_copy else trained, x, reentrant).sum().backward()
        gradients.append(x.grad)

    trained(x).sum().backward()
    trained.feature_map.redraw(1)
    x.grad = None
    trainer = threading.Thread(target=train)
    trainer.start()
    trainer.join()
    wanted = torch.autograd.grad(trained(x).sum(), x)[0]
    assert torch.equal(gradients[0], wanted)


def test_nothing_is_drawn_in_evaluation() -> None:
    trained = model().eval()
    schedule, before = RedrawSchedule(trained, every=1), draws(trained)
    with pytest.raises(RuntimeError, match=r"call model.train\(\)"):
        schedule.step()
    assert schedule.num_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(draws(trained), before, strict=True))


def test_a_compiled_block_takes_the_new_draw() -> None:
    torch.compiler.reset()
    block, x = Block(linear(FavorPlus(4, 8))), tokens(1, 5)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    schedule, before = RedrawSchedule(block, every=1), compiled(x)
    schedule.step()
    torch.testing.assert_close(compiled(x), block(x), rtol=1e-12, atol=1e-12)
    assert not torch.equal(block(x), before)


def test_wrong_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="has no map that is drawn"):
        RedrawSchedule(linear(EluPlusOne(4)), every=1)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        RedrawSchedule("x", every=1)
    for every in (0, 1.5, True):
        with pytest.raises(ValueError, match="every must be an integer of at least 1, got"):
            RedrawSchedule(model(), every=every)
    with pytest.raises(ValueError, match="seed must be an integer of at least 0, got -1"):
        RedrawSchedule(model(), every=1, seed=-1)
    schedule = RedrawSchedule(model(), every=1)
    for wrong in ({}, {"num_steps": 1, "every": 0, "seed": 0}, {"num_steps": -1, "every": 1, "seed": 0}):
        with pytest.raises(ValueError, match="has the integers num_steps, every, seed, got"):
            schedule.load_state_dict(wrong)
