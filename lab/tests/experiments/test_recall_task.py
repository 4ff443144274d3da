"""Sequences of associative recall: what the protocol says of each, and how they are distributed."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chi2

from linattn_lab.experiments.inputs import generator
from linattn_lab.experiments.judging import STANDARD_ERRORS
from linattn_lab.experiments.recall._networks import QUICK_TRAINING, held_out
from linattn_lab.experiments.recall._task import IGNORED, Recall, sequences, slot_weights

PLAIN, OVERWRITTEN = Recall(32, 48, 7), Recall(32, 64, 8, num_updates=5)
# As rare as what lies outside four standard errors.
RARE = math.erfc(STANDARD_ERRORS / math.sqrt(2))


def drawn(task, number=200):
    """Sequences of a test's own."""
    return sequences(task, number, generator("test", repr(task)))


def is_plausible(counts, expected):
    """Whether counts are those of a multinomial with these expectations, by a chi-square test."""
    statistic = ((counts - expected).square() / expected).sum().item()
    return statistic < chi2.isf(RARE, len(counts) - 1)


@pytest.mark.parametrize("task", [PLAIN, OVERWRITTEN], ids=["plain", "overwritten"])
def test_the_answer_is_the_last_value_shown_after_the_key(task):
    shown = drawn(task)
    for tokens, labels, where in zip(*(x.tolist() for x in (shown.tokens, shown.labels, shown.shown)), strict=True):
        context = tokens[: task.context_size]
        values = dict(zip(context[::2], context[1::2], strict=True))
        asked = {place: label for place, label in enumerate(labels) if label != IGNORED}
        assert len(asked) == task.num_pairs
        assert sorted(tokens[place] for place in asked) == sorted(values)
        assert all(values[tokens[place]] == label for place, label in asked.items())
        assert all(place >= task.context_size and place % 2 == 0 for place in asked)
        assert [context[place] for place in where] == [values[key] for key in context[: 2 * task.num_pairs : 2]]


@pytest.mark.parametrize("task", [PLAIN, OVERWRITTEN], ids=["plain", "overwritten"])
def test_keys_and_values_come_each_from_their_half_and_none_twice(task):
    shown = drawn(task)
    first = shown.tokens[:, : 2 * task.num_pairs].unflatten(1, (-1, 2))
    for tokens, low, high in ((first[..., 0], 1, 16), (first[..., 1], 16, 32)):
        assert tokens.min() == low
        assert tokens.max() == high - 1
        assert (tokens.sort(1).values.diff() > 0).all()
        counts = tokens.flatten().bincount(minlength=high)[low:]
        assert counts.min() > 0


def test_an_update_shows_a_key_again_with_another_value():
    shown = drawn(OVERWRITTEN, 2000)
    pairs = shown.tokens[:, : OVERWRITTEN.context_size].unflatten(1, (-1, 2))
    first, later = pairs[:, : OVERWRITTEN.num_pairs], pairs[:, OVERWRITTEN.num_pairs :]
    same = later[:, :, None, 0] == first[:, None, :, 0]
    assert (same.sum(2) == 1).all()
    assert (same.sum(1) <= 1).all()
    values = first[:, :, 1].unsqueeze(1).expand(-1, later.shape[1], -1)[same].view_as(later[..., 1])
    assert (values != later[..., 1]).all()
    # Any other value is as likely: a step around the circle of 16.
    steps = ((later[..., 1] - values) % 16).flatten().bincount(minlength=16)[1:].double()
    assert is_plausible(steps, torch.full((15,), steps.sum().item() / 15, dtype=torch.float64))


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_one_gap_follows_the_power_law(power):
    task = Recall(32, 26, 1, power=power)
    number = 40_000
    slots = (drawn(task, number).places[:, 0] - 2) // 2
    n = torch.arange(1, 13, dtype=torch.float64)
    law = power * n ** (power - 1)
    assert is_plausible(slots.bincount(minlength=12).double(), number * law / law.sum())


def test_two_gaps_are_drawn_without_replacement():
    task = Recall(32, 20, 2)
    number = 40_000
    slots = (drawn(task, number).places - 4) // 2
    weights = slot_weights(task)
    # The first by the weights, the second by those of the rest.
    joint = weights[:, None] * weights / (1 - weights[:, None])
    joint.fill_diagonal_(0)
    assert joint.sum().item() == pytest.approx(1.0)
    counts = (8 * slots[:, 0] + slots[:, 1]).bincount(minlength=64).double()
    off = ~torch.eye(8, dtype=torch.bool).flatten()
    assert counts[~off].sum() == 0
    assert is_plausible(counts[off], number * joint.flatten()[off])


def test_between_queries_stands_nothing_or_anything():
    empty = drawn(Recall(32, 48, 7, random_non_queries=False))
    is_asked = empty.labels != IGNORED
    assert (empty.tokens[:, 14:][~is_asked[:, 14:]] == 0).all()
    full = drawn(PLAIN, 2000)
    others = full.tokens[:, 14:][full.labels[:, 14:] == IGNORED]
    counts = others.bincount(minlength=32).double()
    assert is_plausible(counts, torch.full((32,), len(others) / 32, dtype=torch.float64))


def test_no_answer_follows_its_query():
    shown = drawn(PLAIN, 4000)
    after = shown.tokens.gather(1, shown.places + 1)
    found = (after == shown.answers).double()
    assert abs(found.mean() - 1 / 32) < STANDARD_ERRORS * math.sqrt(1 / 32 * 31 / 32 / found.numel())


def test_what_is_tested_was_not_trained_on():
    task = QUICK_TRAINING.task(QUICK_TRAINING.pairs[0])
    seen = sequences(task, 4000, generator("recall", "sequences", 0, "tuning")).tokens
    seen_contexts = {tuple(row) for row in seen[:, : task.context_size].tolist()}
    assert not seen_contexts & {tuple(row) for row in held_out(task).tokens[:, : task.context_size].tolist()}


def test_the_same_generator_gives_the_same():
    assert all(torch.equal(x, y) for x, y in zip(drawn(OVERWRITTEN), drawn(OVERWRITTEN), strict=True))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((31, 48, 7), "must be even"),
        ((32, 47, 7), "must be even"),
        ((32, 48, 0), "a pair at least"),
        ((32, 48, 2, 3), "no more updates than pairs"),
        ((12, 48, 6), "vocabulary of 14 at least"),
        ((32, 26, 7), "need 28 tokens at least, got 26"),
        ((32, 48, 7, 0, 0.0), "power must be positive"),
    ],
)
def test_sizes_that_hold_no_sequence_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        Recall(*sizes)
