"""Recall tasks: what is asked was told, and only the right answer hits."""

from __future__ import annotations

import pytest
import torch

from linattn_lab.constant_memory.passages import TokenText
from linattn_lab.constant_memory.recall import MULTI_QUERY, NEEDLES, REPEATED, TASKS, tasks

LENGTH = 1600


@pytest.fixture(scope="module")
def found(tiny, words):
    loaded = tiny("llama")
    return {task.name: task for task in tasks(loaded, TokenText.of(loaded, words), LENGTH).whole}


def text_of(tokens):
    return bytes(tokens.tolist()).decode()


@pytest.mark.parametrize("name", TASKS)
def test_every_answer_stands_in_the_text_before(found, name):
    task = found[name]
    assert task.tokens.shape == (1, LENGTH)
    first = task.questions[0].start
    for one in task.questions:
        answer = text_of(task.tokens[0, one.start : one.stop])
        cue = text_of(task.tokens[0, one.start - 12 : one.start])
        before = text_of(task.tokens[0, : first - 12])
        assert cue + answer in before
        if name != MULTI_QUERY:
            assert before.index(cue + answer) / len(before) == pytest.approx(one.depth, abs=0.1)


def test_numbers_are_asked_whole_and_all_differ(found):
    for name, count in ((NEEDLES, 5), (MULTI_QUERY, 16)):
        task = found[name]
        answers = {text_of(task.tokens[0, one.start : one.stop]) for one in task.questions}
        assert len(answers) == count
        assert all(answer.isdigit() and len(answer) == 5 for answer in answers)
    told = text_of(found[MULTI_QUERY].tokens[0, :700])
    assert all(text_of(found[MULTI_QUERY].tokens[0, q.start : q.stop]) in told for q in found[MULTI_QUERY].questions)


def test_repeated_stretches_are_the_text_s_own(found, words):
    task = found[REPEATED]
    assert len(task.questions) == 5
    for one in task.questions:
        assert text_of(task.tokens[0, one.start - 16 : one.stop]) in words.content
        assert one.stop - one.start == 32


@pytest.mark.parametrize("name", TASKS)
def test_hits(found, name):
    task = found[name]
    right = torch.nn.functional.one_hot(task.tokens[0, task.positions + 1], 256).float()
    assert task.hits(right) == [1.0] * len(task.questions)
    assert task.hits(right.roll(1, 1)) == [0.0] * len(task.questions)
    # One token of the first answer wrong.
    right[0] = right[0].roll(1)
    size = task.questions[0].stop - task.questions[0].start
    assert task.hits(right) == [pytest.approx(1 - 1 / size)] + [1.0] * (len(task.questions) - 1)


def test_no_room_for_text(tiny, words):
    loaded = tiny("llama")
    whole, left_out = tasks(loaded, TokenText.of(loaded, words), 700)
    assert [task.name for task in whole] == [REPEATED, NEEDLES]
    assert "another number of --tokens" in left_out[MULTI_QUERY]
