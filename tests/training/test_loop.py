"""The training loop: the best weights are kept, an interrupt ends it well, a run cut off goes on as if it had not."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from linattn.training import Seconds, Steps, Training, WorkFolder, loop, train
from linattn.training.loop import learning_rate_factor

AIM = torch.tensor([3.0, -1.0, 2.0])


class Point(nn.Module):
    """Three weights, on their way to `AIM`; the same weight under a second name, as tied weights are."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(3))
        self.tied = self.place
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def distance(point):
    return (point.place - AIM).square().sum()


@pytest.fixture
def training(clock):
    """A function that gives a training in which a step takes half a second, and a look a quarter."""

    def of(point, *, rate=0.1, seconds=60.0, loss=None, validate=None, groups=None):
        def step(number):
            clock.now += 0.5
            # A batch of its own at every step, so that a step done twice or left out is seen.
            return distance(point) * (1 + number % 7) if loss is None else loss(number)

        def look():
            clock.now += 0.25
            return float(distance(point).detach()) if validate is None else validate()

        return Training("distillation", point, groups or [([point.place], rate)], step, look, Seconds(seconds))

    return of


def quiet(name, share, progress):
    """Nobody listens."""


def test_a_convex_problem_is_solved(training):
    point = Point()
    told = []
    found = train(training(point), None, lambda *told_of: told.append(told_of))
    assert found.first_loss == 14.0
    assert found.best_loss == float(distance(point).detach()) < 1e-2
    assert (found.name, found.stopped) == ("distillation", False)
    assert found.seconds >= 60
    assert found.steps == len(told)
    shares = [share for _, share, _ in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert told[-1][:2] == ("distillation", 1.0)
    assert told[-1][2].best == found.best_loss
    assert [progress.step for _, _, progress in told] == list(range(1, found.steps + 1))


def test_gradients_that_are_off_are_followed_in_training_alone(training):
    point, other = Point(), Point()
    train(training(point), None, quiet)
    with torch.no_grad():
        train(training(other), None, quiet)
        assert not torch.is_grad_enabled()
    assert torch.equal(point.place, other.place)


def test_the_best_weights_are_kept_and_not_the_last(training):
    point, seen = Point(), []

    def validate():
        # After the fourth look every other place seems better than this one.
        seen.append(point.place.detach().clone())
        return 10.0 + len(seen) if len(seen) > 4 else 10.0 - len(seen)

    found = train(training(point, validate=validate), None, quiet)
    assert found.best_loss == 6
    assert len(seen) > 10
    assert torch.equal(point.place, seen[3])
    assert not torch.equal(point.place, seen[-1])


def test_training_that_only_harms_is_undone(training):
    point = Point()
    found = train(training(point, loss=lambda step: -distance(point)), None, quiet)
    assert (found.best_loss, found.first_loss) == (14.0, 14.0)
    assert not point.place.any()


def test_long_looks_take_a_tenth_of_the_time(training, clock):
    point, looks = Point(), []

    def validate():
        clock.now += 4.0
        looks.append(clock.now)
        return 1.0

    # With the quarter of a second that every look takes here: 4.25.
    train(training(point, validate=validate, seconds=400.0), None, quiet)
    between = [later - earlier for earlier, later in pairwise(looks[1:-1])]
    assert between
    # Twelve times that, in whole steps, and the look.
    assert set(between) == {4.25 + 51.0}


def test_a_look_that_is_nan_is_no_best(training):
    losses = iter([5.0, 4.0, math.nan, 3.0, *[9.0] * 100])
    found = train(training(Point(), validate=lambda: next(losses)), None, quiet)
    assert found.best_loss == 3.0


def test_learning_rates(training):
    rates = [learning_rate_factor(step, 0.0) for step in range(22)]
    assert rates == pytest.approx([(step + 1) / 20 for step in range(20)] + [1.0, 1.0])
    falling = [learning_rate_factor(100, share / 10) for share in range(11)]
    assert falling == sorted(falling, reverse=True)
    assert falling[5] == pytest.approx(0.51)
    assert falling[-1] == learning_rate_factor(100, 3.0) == pytest.approx(0.02)


@pytest.mark.parametrize(("first", "lowered"), [(9.0, 1.0), (1.0, 1.0), (0.25, 0.5), (0.0, 0.0), (-1e-9, 0.0)])
def test_a_small_loss_lowers_the_rate_by_its_root(training, first, lowered):
    """AdamW's first step has the length of the rate, of which it is given a twentieth."""
    point, looks = Point(), iter([first, -1.0])
    found = train(
        training(point, loss=lambda _: point.place.sum(), validate=lambda: next(looks), seconds=0.5), None, quiet
    )
    assert found.steps == 1
    torch.testing.assert_close(point.place.detach(), torch.full((3,), -0.1 / 20 * lowered))


def test_every_group_has_its_rate(training):
    point = Point()
    other = nn.Parameter(torch.zeros(3))
    point.register_parameter("other", other)
    groups = [([point.place], 1e-3), ([other], 1e-1)]
    looks = iter([2.0, 1.0, *[2.0] * 100])
    both = training(
        point, groups=groups, loss=lambda step: point.place.sum() + other.sum(), validate=lambda: next(looks), seconds=1
    )
    train(both, None, quiet)
    assert point.place.any()
    torch.testing.assert_close(other.detach() / point.place.detach(), torch.full((3,), 100.0))


@pytest.mark.parametrize("work", [False, True])
def test_an_interrupt_ends_it_with_the_best_so_far(training, tmp_path, work):
    point = Point()

    def loss(step):
        if step == 30:
            raise KeyboardInterrupt
        return distance(point)

    folder = WorkFolder(tmp_path / "work", {}, kind="conversion") if work else None
    found = train(training(point, loss=loss), folder, quiet)
    assert found.stopped
    assert found.steps == 30
    assert found.best_loss == float(distance(point).detach()) < 14.0


@pytest.mark.usefixtures("interruptible")
def test_a_signal_waits_for_the_step(training, tmp_path):
    """Raised in the middle of TensorBoard's queue it would hang the end of the training."""
    point, before = Point(), signal.getsignal(signal.SIGINT)

    def loss(step):
        if step == 30:
            signal.raise_signal(signal.SIGINT)
        return distance(point)

    # Between two looks there may be a twentieth of a training.
    long = replace(training(point, loss=loss), budget=Steps(100_000))
    found = train(long, WorkFolder(tmp_path / "work", {}, kind="conversion"), quiet)
    assert (found.stopped, found.steps) == (True, 31)
    assert found.best_loss == float(distance(point).detach()) < found.first_loss
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("interruptible")
def test_a_signal_before_the_first_step(training):
    def validate():
        signal.raise_signal(signal.SIGINT)
        return 1.0

    found = train(training(Point(), validate=validate), None, quiet)
    assert (found.stopped, found.steps, found.best_loss) == (True, 0, 1.0)


@pytest.mark.usefixtures("interruptible")
def test_ignored_signals_stay_so(training):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    point = Point()
    found = train(training(point, loss=lambda step: signal.raise_signal(signal.SIGINT) or distance(point)), None, quiet)
    assert not found.stopped


def test_an_interrupt_in_a_checkpoint_leaves_no_draft(training, tmp_path, monkeypatch):
    folder, save = WorkFolder(tmp_path / "work", {}, kind="conversion"), loop.write
    calls = []

    def interrupted(*args, **options):
        calls.append(None)
        save(*args, **options)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "write", interrupted)
    point = Point()
    assert train(training(point), folder, quiet).stopped
    checkpoints = list((tmp_path / "work" / "checkpoints" / "distillation").iterdir())
    assert len(checkpoints) == 2
    assert all(checkpoint.name.startswith("step-") for checkpoint in checkpoints)


def test_what_is_not_finite_is_refused(training):
    point = Point()
    with pytest.raises(RuntimeError, match=r"distillation: the gradient is not finite at step 3 \(loss nan\); lower"):
        train(training(point, loss=lambda step: distance(point) * (math.nan if step == 3 else 1)), None, quiet)
    with pytest.raises(RuntimeError, match="the loss is nan before the first step"):
        train(training(point, validate=lambda: math.nan), None, quiet)


def test_nothing_is_left_on_the_model(training):
    point = Point()
    train(training(point), None, quiet)
    assert point.place.grad is None
    assert torch.equal(point.passing, torch.ones(2))


def test_processes_without_a_group_are_refused(training, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="a launcher started 2 processes, and no group of them was made"):
        train(training(Point()), None, quiet)


def test_curves(training, tmp_path):
    folder = WorkFolder(tmp_path / "work", {}, kind="conversion")
    found = train(training(Point()), folder, quiet)
    curves = EventAccumulator(str(folder.logs / "distillation")).Reload()
    tags = {"loss", "learning rate", "validation loss", "best validation loss"}
    assert set(curves.Tags()["scalars"]) == tags
    for tag in tags:
        steps = [event.step for event in curves.Scalars(tag)]
        assert steps == sorted(set(steps))
    assert [event.step for event in curves.Scalars("loss")] == list(range(1, found.steps + 1))
    assert curves.Scalars("validation loss")[0].value == 14.0
    best = [event.value for event in curves.Scalars("best validation loss")]
    assert best == sorted(best, reverse=True)
    assert best[-1] == pytest.approx(found.best_loss)


class CutError(Exception):
    """What a kill is to a test."""


def cut_at(point, *places):
    """A loss that is cut off at these steps, once each."""
    left = list(places)

    def loss(step):
        if left and step == left[0]:
            left.pop(0)
            raise CutError
        return distance(point) * (1 + step % 7)

    return loss


def test_a_training_cut_off_twice_is_one_that_was_not(training, tmp_path):
    whole = Point()
    expected = train(training(whole), WorkFolder(tmp_path / "whole", {}, kind="conversion"), quiet)
    parts = Point()
    loss, looks = cut_at(parts, 9, 31), []
    for _ in range(2):
        with pytest.raises(CutError):
            train(training(parts, loss=loss), WorkFolder(tmp_path / "parts", {}, kind="conversion"), quiet)
        looks.append(int(max((tmp_path / "parts" / "checkpoints" / "distillation").iterdir()).name[5:]))
        # Another process knows nothing of these weights, nor of this process's random numbers.
        with torch.no_grad():
            parts.place.fill_(torch.randn(()).item())
    assert 0 < looks[0] <= 9 < looks[1] <= 31
    found = train(training(parts, loss=loss), WorkFolder(tmp_path / "parts", {}, kind="conversion"), quiet)
    assert found == expected
    assert torch.equal(parts.place, whole.place)
    curves = EventAccumulator(str(tmp_path / "parts" / "logs" / "distillation")).Reload()
    steps = [event.step for event in curves.Scalars("loss")]
    assert steps == list(range(1, expected.steps + 1))
    # Files of curves are read by name, which the second of their beginning begins.
    seconds = [path.name.split(".")[3] for path in (tmp_path / "parts" / "logs" / "distillation").iterdir()]
    assert len(set(seconds)) == len(seconds) == 3


def test_a_training_cut_off_whose_last_checkpoint_is_damaged_is_one_that_was_not(training, tmp_path):
    whole, parts = Point(), Point()
    expected = train(training(whole), WorkFolder(tmp_path / "whole", {}, kind="conversion"), quiet)
    with pytest.raises(CutError):
        train(training(parts, loss=cut_at(parts, 31)), WorkFolder(tmp_path / "parts", {}, kind="conversion"), quiet)
    *_, before, last = sorted((tmp_path / "parts" / "checkpoints" / "distillation").iterdir())
    (last / "tensors.safetensors").write_bytes(b"damaged")
    seen = []
    found = train(
        training(parts, loss=lambda step: seen.append(step) or distance(parts) * (1 + step % 7)),
        WorkFolder(tmp_path / "parts", {}, kind="conversion"),
        quiet,
    )
    assert seen[0] == int(before.name[5:]) < int(last.name[5:])
    assert found == expected
    assert torch.equal(parts.place, whole.place)


def test_a_finished_training_is_not_trained_again(training, tmp_path):
    point = Point()
    first = train(training(point), WorkFolder(tmp_path, {}, kind="conversion"), quiet)
    place = point.place.detach().clone()
    with torch.no_grad():
        point.place.zero_()

    def refuse(step):
        raise AssertionError

    again = train(training(point, loss=refuse), WorkFolder(tmp_path, {}, kind="conversion"), quiet)
    assert again == first
    assert torch.equal(point.place, place)
    longer = train(training(point, seconds=90.0), WorkFolder(tmp_path, {}, kind="conversion"), quiet)
    assert longer.steps > first.steps
    assert longer.first_loss == first.first_loss


def by_steps(training, point, total, **options):
    return replace(training(point, **options), budget=Steps(total))


def test_a_number_of_steps_is_done_whatever_the_clock_says(training):
    point, looks = Point(), []

    def validate():
        looks.append(None)
        return float(distance(point).detach())

    found = train(by_steps(training, point, 60, validate=validate), None, quiet)
    # Before the first step, and after every fourth.
    assert (found.steps, len(looks)) == (60, 16)


def test_steps_cut_off_by_another_clock_are_those_that_were_not(training, clock, tmp_path):
    """What a kill leaves is a checkpoint at some moment between two looks; looks are at steps all the same."""
    whole, parts = Point(), Point()
    expected = train(by_steps(training, whole, 400), None, quiet)
    loss, cuts = cut_at(parts, 159, 299), []

    def slower(step):
        clock.now += 2 * (step % 7)
        return loss(step)

    for _ in range(2):
        with pytest.raises(CutError):
            train(by_steps(training, parts, 400, loss=slower), WorkFolder(tmp_path, {}, kind="conversion"), quiet)
        cuts.append(int(max((tmp_path / "checkpoints" / "distillation").iterdir()).name[5:]))
        with torch.no_grad():
            parts.place.fill_(torch.randn(()).item())
    assert any(cut % 20 for cut in cuts)
    found = train(by_steps(training, parts, 400, loss=slower), WorkFolder(tmp_path, {}, kind="conversion"), quiet)
    assert (found.steps, found.best_loss, found.first_loss) == (400, expected.best_loss, expected.first_loss)
    assert torch.equal(parts.place, whole.place)


def test_a_long_training_is_kept_every_minute(training, tmp_path):
    """Between two looks of a training by steps many minutes may pass."""
    point, steps = Point(), []
    folder = WorkFolder(tmp_path, {}, kind="conversion")
    draft = folder.draft
    folder.draft = lambda name, progress: (steps.append(progress.step), draft(name, progress))[1]
    train(by_steps(training, point, 3000, rate=1e-3), folder, quiet)
    # A step takes half a second, a look more.
    assert max(b - a for a, b in pairwise([0, *steps])) == 120
