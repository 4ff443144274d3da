"""A language model learns, is judged on what it has not read, and goes on where it was cut off."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from linattn.feature_maps import RandomFeatureMap
from linattn_lab.pretraining import TrainConfig, pretrain
from linattn_lab.pretraining.looks import Looks
from linattn_lab.pretraining.scoring import score, windows

CONFIG = TrainConfig(context=16, batch_size=8, steps=120, learning_rate=2e-2)
KINDS = {
    "linear": {},
    "learned": {"method": "LearnedExponential + window 4", "positions": None, "gate": "ForgetGate"},
    "softmax": {"pattern": "s"},
    "hybrid": {"pattern": "ls", "dropout": 0.1},
}


LOOKS = Looks.of(CONFIG, lambda: None)


def looked_at(model, corpus):
    """Bits per byte on what looks read."""
    return score(model, windows(corpus.validation, 16, LOOKS.num_bytes(CONFIG))).bits


class CutError(Exception):
    """What a kill is to a test."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_learns_what_texts_have_in_common(build, corpus, kind):
    model, told = build(**KINDS[kind]), []
    found = pretrain(model, corpus, CONFIG, notify=lambda *words: told.append(words))
    assert not model.training
    assert found.trained.steps == len(told) == 120
    # Letters alone, each as frequent as it is, cost more than two bits; words, of which letters follow, do not.
    assert found.test.bits < found.frequency_bits - 0.3 < found.uniform_bits
    again = score(model, windows(corpus.test, 16, LOOKS.num_tested(CONFIG, 120, 0.0)))
    assert again == found.test
    assert looked_at(model, corpus) == found.trained.best_loss
    assert found.tokens_per_second == pytest.approx(120 * 16 * 8 / found.trained.seconds)
    assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_cut_off_is_one_that_was_not(build, corpus, kind, tmp_path):
    """To the bit, draws of maps and of dropout too."""
    options = KINDS[kind]
    redraw = 5 if "method" not in options and "pattern" not in options else None
    # As many looks and checkpoints as steps.
    config = replace(CONFIG, steps=11, redraw_every=redraw)
    whole = build(**options)
    expected = pretrain(whole, corpus, config)
    cuts = [3, 6, 9]

    def cut(name, share, progress):
        if cuts and progress.step == cuts[0]:
            cuts.pop(0)
            raise CutError

    for _ in range(3):
        with pytest.raises(CutError):
            pretrain(build(**options), corpus, config, work=tmp_path, notify=cut)
        # Another process has random numbers of its own.
        torch.rand(5)
    model = build(**options)
    found = pretrain(model, corpus, config, work=tmp_path, notify=cut)
    assert not cuts
    assert found.test == expected.test
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in whole.state_dict().items())


def test_redraws(build, corpus):
    """The draw at the end is that of the step at which the weights were best."""
    fixed, redrawn = build(), build()
    first = [one.projection.clone() for one in redrawn.modules() if isinstance(one, RandomFeatureMap)]
    few = replace(CONFIG, steps=40)
    pretrain(fixed, corpus, few)
    pretrain(redrawn, corpus, replace(few, redraw_every=10))
    for model, same in ((fixed, True), (redrawn, False)):
        maps = [one.projection for one in model.modules() if isinstance(one, RandomFeatureMap)]
        assert [torch.equal(a, b) for a, b in zip(maps, first, strict=True)] == [same] * len(maps)
    with pytest.raises(ValueError, match="has no map that is drawn"):
        pretrain(build(pattern="s"), corpus, replace(CONFIG, redraw_every=10))


def test_an_interrupt_keeps_the_best(build, corpus):
    model = build()

    def stop(name, share, progress):
        if progress.step == 30:
            raise KeyboardInterrupt

    found = pretrain(model, corpus, CONFIG, notify=stop)
    assert (found.trained.steps, found.trained.stopped) == (30, True)
    assert looked_at(model, corpus) == found.trained.best_loss


def test_other_settings_are_refused_and_more_time_is_not(build, corpus, tmp_path):
    config = replace(CONFIG, steps=None, minutes=1e-6)
    pretrain(build(), corpus, config, work=tmp_path)
    pretrain(build(), corpus, replace(config, minutes=2e-6), work=tmp_path)
    with pytest.raises(ValueError, match=r"unfinished training with other settings \(learning_rate: 0.02, now 0.1\)"):
        pretrain(build(), corpus, replace(config, learning_rate=0.1), work=tmp_path)
    other = build()
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    with pytest.raises(ValueError, match=r"with other settings \(weights: "):
        pretrain(other, corpus, config, work=tmp_path)
    with pytest.raises(ValueError, match=r"with other settings \(model: .*'gate'"):
        pretrain(build(gate="ForgetGate"), corpus, config, work=tmp_path)


def test_more_steps_go_on_from_the_checkpoint(build, corpus, tmp_path):
    config, told = replace(CONFIG, steps=40), []
    first = pretrain(build(), corpus, config, work=tmp_path)
    longer = replace(config, steps=80)
    found = pretrain(build(), corpus, longer, work=tmp_path, notify=lambda name, share, progress: told.append(progress))
    assert (told[0].step, found.trained.steps) == (41, 80)
    assert found.trained.first_loss == first.trained.first_loss
    assert found.trained.best_loss < first.trained.best_loss


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, steps=20), replace(CONFIG, steps=None, minutes=2.0)])
@pytest.mark.parametrize("seconds", [1e-4, 0.1, 2.0])
def test_looks_and_test_take_a_tenth_of_the_time_each(monkeypatch, config, seconds):
    """A window of a look takes so many seconds, and a window of training three times as many."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("linattn_lab.pretraining.looks.time", SimpleNamespace(perf_counter=lambda: clock.now))

    def read_one():
        clock.now += seconds

    looks = Looks.of(config, read_one)
    if config.steps is None:
        total = config.budget.total
        # Looks are twelve times their time apart, or further.
        number = 2 + total / max(config.budget.seconds_per_look, 13 * looks.num_windows * seconds)
    else:
        total = 3 * config.steps * config.batch_size * seconds
        number = 1 + config.steps // config.budget.steps_per_look
    steps = config.steps or int(total / (3 * config.batch_size * seconds))
    least = 1 if config.steps is None and seconds > 0.3 else 0
    # Where a window alone takes long, one is read all the same; four of the test.
    assert (number - least) * looks.num_windows * seconds <= 0.1 * total
    tested = looks.num_tested(config, steps, total) // config.context
    assert tested == 4 or tested * seconds <= 0.1 * total


def test_what_fits_no_training_is_refused(build, corpus):
    with pytest.raises(ValueError, match="a model of bytes has vocab_size=256, got 300"):
        pretrain(build(vocab_size=300), corpus, CONFIG)
    with pytest.raises(ValueError, match=r"weights in torch.bfloat16, wanted torch.float32; call model.float\(\)"):
        pretrain(build().bfloat16(), corpus, CONFIG)
    for name in ("minutes", "learning_rate"):
        for number in (0, -1, float("nan"), "4", None):
            with pytest.raises(ValueError, match=f"{name} must be a finite number > 0, got {number!r}"):
                TrainConfig(**{name: number})
    for name in ("context", "batch_size", "steps", "redraw_every"):
        for number in (0, 2.5, "4"):
            with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {number!r}"):
                TrainConfig(**{name: number})
