"""Retrieval tasks: what is asked was told, at its depth, and only the right answer scores."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from linattn_lab.kv_audit.facts import DEPTHS, facts
from linattn_lab.kv_audit.passages import TokenText
from linattn_lab.kv_audit.ruler import COMMON, FREQUENT, MANY_NEEDLES, NEEDLE, TASKS, VARIABLES, Prompt, longest
from linattn_lab.kv_audit.texts import audit_texts

LENGTH, COUNT = 4000, 6


@pytest.fixture(scope="module")
def told(tiny, words):
    loaded = tiny("llama")
    return facts(loaded, TokenText.of(loaded, words), LENGTH, 0, 1, COUNT)


def text_of(tokens):
    return bytes(tokens.tolist()).decode()


def test_every_answer_stands_in_the_text_before_at_its_depth(told):
    assert told.tokens.shape == (1, LENGTH)
    assert [sum(one.depth == depth for one in told.questions) for depth in DEPTHS] == [COUNT] * len(DEPTHS)
    first = told.questions[0].start
    for one in told.questions:
        answer = text_of(told.tokens[0, one.start : one.stop])
        assert answer.isdigit()
        assert len(answer) == 5
        cue = text_of(told.tokens[0, one.start - 12 : one.start])
        before = text_of(told.tokens[0, : first - 12])
        assert before.count(cue + answer) == 1
        # Facts of a depth are spread over 0.04 of the text, and take room themselves.
        assert before.index(cue + answer) / len(before) == pytest.approx(one.depth, abs=0.06)


def test_hits(told):
    first = told.questions[0].start
    right = torch.nn.functional.one_hot(told.tokens[0, first:], 256).float()
    logs = torch.cat((right, right[:1]))
    assert len(logs) == told.last
    assert told.hits(logs) == [1.0] * len(told.questions)
    assert told.hits(logs.roll(1, 1)) == [0.0] * len(told.questions)
    logs[0] = logs[0].roll(1)
    assert told.hits(logs) == [pytest.approx(0.8)] + [1.0] * (len(told.questions) - 1)


def spaced_numbers():
    """A tokenizer that joins a number to the space before it, as GPT-2's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([" ".join(map(str, range(10000, 99999, 77)))], trainer)
    return made


def space_before_each_text():
    """A tokenizer that begins each text with a space, as Llama 2's."""
    made = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.train_from_iterator([LETTERS], trainers.WordLevelTrainer(special_tokens=["?"], show_progress=False))
    return made


LETTERS = "".join(map(chr, range(32, 127))) + "\n"


@pytest.mark.parametrize("made", [spaced_numbers, space_before_each_text])
def test_a_question_and_its_answer_are_the_tokens_that_were_told(made, words):
    """With any tokenizer: else a model that copies would be wrong, and the task never scored."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made())
    loaded = SimpleNamespace(tokenizer=tokenizer)
    text = TokenText.of(loaded, words)
    asked = facts(loaded, text, 2000, 0, 1, 2)
    tokens = asked.tokens[0].tolist()
    for one in asked.questions:
        assert len(re.sub(r"\D", "", tokenizer.decode(tokens[one.start : one.stop]))) == 5
        # The answer with the word before it.
        before = tokens[one.start - 3 : one.stop]
        places = [n for n in range(len(tokens)) if tokens[n : n + len(before)] == before]
        assert places[-1] == one.start - 3
        assert len(places) == 2


def test_other_samples_tell_other_numbers(tiny, words):
    loaded = tiny("llama")
    several = [facts(loaded, TokenText.of(loaded, words), LENGTH, start, start, 2).tokens for start in (0, 100)]
    assert not torch.equal(*several)


def test_no_room_for_text(tiny, words):
    loaded = tiny("llama")
    with pytest.raises(ValueError, match="another number of --tokens"):
        facts(loaded, TokenText.of(loaded, words), 700, 0, 0, COUNT)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("size", [6000, 12000])
def test_a_prompt_is_as_long_as_it_may_be_and_holds_its_answers(name, size):
    prompt = longest(TASKS[name], 3, lambda prompt: len(prompt.text) <= size)
    # Ten words of six letters more, a line of noise, or three of a word, would not fit.
    assert size - 110 < len(prompt.text) <= size
    body = prompt.text.rpartition("\n")[0]
    assert all(answer in body for answer in prompt.answers)
    assert prompt.score(", ".join(prompt.answers)) == 1.0
    assert prompt.score("") == 0.0


def test_a_needle_is_told_once():
    for name in (NEEDLE, MANY_NEEDLES):
        prompt = longest(TASKS[name], 5, lambda prompt: len(prompt.text) <= 3000)
        (answer,) = prompt.answers
        assert prompt.text.count(answer) == 1


def test_variables_hand_on_one_number():
    prompt = TASKS[VARIABLES](random.Random(1), 20)
    body, _, question = prompt.text.partition("\n")
    number = question.split("value ")[1].split(" ")[0]
    given = [part.split(".")[0].split(" = ") for part in body.split("VAR ")[1:] if " = " in part]
    values = dict(zip(prompt.answers, [number, *prompt.answers], strict=False))
    assert len(given) == len(prompt.answers) == 5
    assert body.count(number) == 1
    for name, before in list(values.items())[1:]:
        assert f"VAR {name} = VAR {before}." in body
        # A variable is handed on after it has its value.
        assert body.index(f"VAR {before} =") < body.index(f"VAR {name} =")


def test_common_and_frequent_words_are_the_most_frequent():
    common = TASKS[COMMON](random.Random(2), 40)
    counts = {word: common.text.split().count(word) for word in set(common.text.partition("\n")[0].split()[1::2])}
    assert sorted(counts.values())[-10:] == [30] * 10
    assert {word for word, count in counts.items() if count == 30} == set(common.answers)
    assert {count for word, count in counts.items() if word not in common.answers} == {3}
    frequent = TASKS[FREQUENT](random.Random(2), 40)
    body = frequent.text.partition("\n")[0].split()
    ranked = sorted(set(body), key=lambda word: -body.count(word))
    assert {body.count(word) for word in ranked[:3]} == {body.count(word) for word in frequent.answers}


def test_no_prompt_fits():
    with pytest.raises(ValueError, match="give more --tokens"):
        longest(TASKS[NEEDLE], 0, lambda prompt: False)


def test_an_answer_is_scored_by_what_it_names():
    prompt = Prompt("", ("PONABA", "RATIWA"), 8)
    assert prompt.score("they are: ponaba and others") == 0.5


def test_an_unknown_kind_of_text_is_named_by_its_argument():
    """By which a command finds the option."""
    with pytest.raises(ValueError, match=r"^text_kinds must be among prose, code, mixed; got poetry$"):
        audit_texts(kinds=["prose", "poetry"])
