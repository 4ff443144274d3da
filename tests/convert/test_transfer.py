"""Attention transfer and distillation: their losses fall, and padding changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import kl_div

from linattn.convert import predictions
from linattn.convert.distilling import distil, distillation, teacher_outputs
from linattn.convert.predictions import token_divergence
from linattn.convert.running import own_texts, run
from linattn.convert.samples import from_batches
from linattn.convert.transfer import build_maps, record, row_divergence, transfer
from linattn.hf import linearize_, restore_
from linattn.methods.measures import softmax_log_rows
from linattn.methods.method import parse_method
from linattn.processes import Processes
from linattn.training.loop import train

# Seconds of the tests' clock, of which a step takes one.
STEPS = 50


@pytest.fixture
def learning(build, padded, clock):
    """A function that gives a teacher, its linear copy with maps that learn, and the samples of both."""

    def of(family, written, batches=padded, **options):
        teacher, student = build(family, **options), build(family, **options)
        method = parse_method(written)
        layers = linearize_(student, method="Exponential").replaced
        restore_(student)
        maps = build_maps([method] * len(layers), layers, record(teacher, batches[0]), num_features=None, seed=0)
        following = iter(maps)
        linearize_(student, method=lambda _: next(following))
        return teacher, student, maps, layers, from_batches(batches, seed=0)

    return of


def ticking(training, clock):
    """The training, a step of which takes a second."""
    step = training.loss

    def loss(number):
        clock.now += 1
        return step(number)

    object.__setattr__(training, "loss", loss)
    return training


@pytest.mark.parametrize("written", ["LearnedExponential(num_features=8)", "Hedgehog"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_transfer_makes_rows_the_exact_ones(learning, clock, family, written):
    teacher, student, maps, layers, samples = learning(family, written)
    kept = [weight.clone() for weight in teacher.parameters()]
    training = transfer(student, maps, layers, teacher, samples, seconds=STEPS, learning_rate=1e-2)
    found = train(ticking(training, clock), None, lambda *_: None)
    assert found.steps == STEPS
    assert found.best_loss < 0.97 * found.first_loss
    assert found.best_loss == pytest.approx(training.validate())
    # Only the maps learn.
    of_maps = {id(weight) for feature_map in maps for weight in feature_map.parameters()}
    others = [weight for weight in student.parameters() if id(weight) not in of_maps]
    assert all(torch.equal(a, b) for a, b in zip(others, kept, strict=True))


def by_hand(teacher, maps, layers, texts):
    """Sum over layers of the mean over texts of the mean over rows, every text alone."""
    total = 0.0
    for feature_map, layer in zip(maps, layers, strict=True):
        losses = []
        for text in texts:
            call = record(teacher, text)[layer.module_name]
            length = call.query.shape[2]
            visible = torch.ones(length, length, dtype=torch.bool)
            visible = visible.tril() if call.is_causal else visible
            exact = softmax_log_rows(call.query, call.key, visible, scale=call.scale)
            groups = call.query.unflatten(1, (call.key.shape[1], -1))
            kernel = feature_map.kernel(groups.flatten(2, 3), call.key).unflatten(2, groups.shape[2:4]).flatten(1, 2)
            weights = kernel.masked_fill(~visible, 0)
            losses.append(row_divergence(exact, (weights / weights.sum(-1, keepdim=True)).double()))
        total += float(torch.stack(losses).mean())
    return total


# BERT counts padding on the left as positions.
@pytest.mark.parametrize(("family", "left"), [("bert", False), ("llama", False), ("llama", True)])
def test_transfers_loss_is_that_of_every_text_alone(learning, padded, family, left):
    batches = [{name: x.flip(1) if left else x for name, x in batch.items()} for batch in padded]
    for batch in batches if family == "llama" else ():
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    teacher, student, maps, layers, samples = learning(family, "LearnedExponential(num_features=8)", batches)
    training = transfer(student, maps, layers, teacher, samples, seconds=1, learning_rate=1e-2)
    alone = [
        {"input_ids": ids[mask][None]}
        for batch in [samples.training(0)]
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    ]
    with torch.no_grad():
        assert float(training.loss(0)) == pytest.approx(by_hand(teacher, maps, layers, alone), rel=2e-5)


def test_long_texts_beside_a_short_one(learning, clock):
    """Of a long text every other row or so is looked at; a short one beside it always has rows."""
    draw = torch.Generator().manual_seed(0)
    mask = (torch.arange(300) < torch.tensor([[300], [1]])).long()
    batch = {"input_ids": torch.randint(3, 64, (2, 300), generator=draw) * mask, "attention_mask": mask}
    teacher, student, maps, layers, samples = learning("bert", "LearnedExponential(num_features=4)", [batch] * 16)
    training = transfer(student, maps, layers, teacher, samples, seconds=1, learning_rate=1e-2)
    with torch.no_grad():
        losses = [float(training.loss(step)) for step in range(6)]
    assert all(loss > 0 for loss in losses)
    # Three sets of rows, in turn.
    assert losses[:3] == losses[3:]
    assert len(set(losses)) == 3


@pytest.mark.parametrize(
    ("family", "written"), [("bert", "FavorPlus(num_features=8)"), ("llama", "LearnedExponential(num_features=8)")]
)
def test_distillation_makes_the_outputs_the_teachers(learning, clock, family, written):
    teacher, student, maps, _, samples = learning(family, written)
    weights = list(student.parameters()), 3e-3
    training = distil(student, weights, maps, teacher, samples, seconds=STEPS, map_learning_rate=2e-3)
    assert [rate for _, rate in training.parameters] == [3e-3, 2e-3][: 1 + (family == "llama")]
    grouped = [id(weight) for weights, _ in training.parameters for weight in weights]
    assert sorted(grouped) == sorted(map(id, student.parameters()))
    found = train(ticking(training, clock), None, lambda *_: None)
    assert found.best_loss < 0.985 * found.first_loss
    assert found.best_loss == pytest.approx(training.validate())
    losses = []
    for batch in samples.validation:
        theirs = teacher_outputs(teacher, batch)
        assert (theirs.predictions is not None) == (family == "llama")
        assert not theirs.states[-1].requires_grad
        with torch.no_grad():
            ours = run(student, batch)
            divergence = token_divergence(ours.predictions, theirs.predictions) if family == "llama" else None
        losses.append(float(distillation(ours.states, theirs.states, theirs.live, divergence)))
    assert sum(losses) / len(losses) == pytest.approx(found.best_loss)


def test_of_a_large_vocabulary_some_tokens_are_compared(learning, monkeypatch):
    """Drawn in a step, the same ones whenever it is done again; evenly spread in validation."""
    teacher, student, maps, _, samples = learning("llama", "FavorPlus(num_features=8)")
    weights = list(student.parameters()), 3e-3
    training = distil(student, weights, maps, teacher, samples, seconds=STEPS, map_learning_rate=2e-3)
    whole, room = training.loss(1).item(), 5
    monkeypatch.setattr(predictions, "_MOST", room * 64)
    monkeypatch.setattr(predictions, "_SAMPLED", 1)
    assert training.loss(1).item() == training.loss(1).item() != whole
    found = []
    with torch.no_grad():
        for batch in samples.validation:
            ours, theirs = run(student, batch), run(teacher, batch)
            chosen = [place * len(ours.predictions.states) // room for place in range(room)]
            pair = (one.predictions.log_probabilities(one.predictions.states[chosen]) for one in (ours, theirs))
            divergence = kl_div(*pair, log_target=True, reduction="none").sum(-1).mean()
            found.append(float(distillation(ours.states, theirs.states, theirs.live, divergence)))
    assert training.validate() == pytest.approx(sum(found) / len(found))


def test_processes_share_out_the_texts_of_a_batch():
    batch = {"input_ids": torch.tensor([[1], [2], [3], [4]])}
    assert own_texts(batch, Processes(1, 2))["input_ids"].tolist() == [[2], [4]]
