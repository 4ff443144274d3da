"""RULER's tasks that need no data: needles, variables to follow, words to count; answered by greedy text.

A task is scored for a method where the full cache itself has at least 90 %.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from linattn_lab.kv_audit.methods import largest_size

NEEDLE, MANY_NEEDLES, VARIABLES, COMMON, FREQUENT = "niah_single", "niah_multikey", "vt", "cwe", "fwe"

_NOISE = "Rain fell on the hills. A cart went by. The bread was warm. Nobody spoke, and the evening came."
_SYLLABLES = (
    *("ba", "co", "di", "fu", "ga", "he", "ji", "ko", "lu"),
    *("me", "ni", "po", "ra", "su", "ti", "vo", "wa", "ze"),
)
_HOPS, _NUM_COMMON, _OFTEN, _SELDOM, _EXPONENT = 4, 10, 30, 3, 2.0


@dataclass(frozen=True)
class Prompt:
    """A text that ends where its answer begins."""

    text: str  # the prompt
    answers: tuple[str, ...]  # what the answer has to name
    num_written: int  # tokens of an answer at most

    def score(self, answer: str) -> float:
        """The share of the answers that a text names, in upper or lower case."""
        return sum(one.lower() in answer.lower() for one in self.answers) / len(self.answers)


Maker = Callable[[random.Random, int], Prompt]
"""Makes a prompt of a size: of so many sentences, lines or words, whichever the task consists of."""


def longest(make: Maker, seed: int, fits: Callable[[Prompt], bool]) -> Prompt:
    """The longest prompt of a task that fits."""
    size = largest_size(lambda size: fits(make(random.Random(seed), size)))
    if size == 0:
        raise ValueError("the smallest text of this task is longer than that; give more --tokens")
    return make(random.Random(seed), size)


def _needle(draw: random.Random, size: int) -> Prompt:
    """One number in sentences that say nothing."""
    word, number, place = _words(draw, 1)[0], _number(draw), draw.random()
    lines = [_NOISE] * size
    lines.insert(round(place * size), _told(word, number))
    return Prompt(f"{' '.join(lines)}\n{_asked(word)}", (number,), 16)


def _many_needles(draw: random.Random, size: int) -> Prompt:
    """One number among as many others as fit."""
    words = _words(draw, size + 1)
    numbers = [_number(draw) for _ in words]
    lines = [_told(word, number) for word, number in zip(words, numbers, strict=True)]
    place = draw.randrange(len(words))
    return Prompt(f"{' '.join(lines)}\n{_asked(words[place])}", (numbers[place],), 16)


def _variables(draw: random.Random, size: int) -> Prompt:
    """A number that is handed from variable to variable."""
    names = [word.upper() for word in _words(draw, _HOPS + 1)]
    number = str(draw.randint(10000, 99999))
    places = sorted(draw.random() for _ in names)
    values = [number, *(f"VAR {name}" for name in names)]
    lines = [_NOISE] * size
    for shift, (name, value, place) in enumerate(zip(names, values, places, strict=False)):
        lines.insert(round(place * size) + shift, f"VAR {name} = {value}.")
    question = (
        f"Find all variables that have the value {number} in the text above.\nAnswer: By the assignments above "
        f"{len(names)} variables have the value {number}. They are:"
    )
    return Prompt(f"{' '.join(lines)}\n{question}", tuple(names), 40)


def _common_words(draw: random.Random, size: int) -> Prompt:
    """Ten words that come thirty times each, among others that come three times."""
    words = _words(draw, _NUM_COMMON + size)
    common, others = words[:_NUM_COMMON], words[_NUM_COMMON:]
    sequence = common * _OFTEN + others * _SELDOM
    draw.shuffle(sequence)
    lines = " ".join(f"{number}. {word}" for number, word in enumerate(sequence, start=1))
    question = f"Which {_NUM_COMMON} words come most often in the list above?\nAnswer: The most common words are:"
    return Prompt(f"{lines}\n{question}", tuple(common), 100)


def _frequent_words(draw: random.Random, size: int) -> Prompt:
    """Words drawn by a power of their rank, of which three come most often."""
    words = _words(draw, 200)
    weights = list(accumulate(rank**-_EXPONENT for rank in range(1, len(words) + 1)))
    sequence = draw.choices(words, cum_weights=weights, k=10 * size)
    counts = sorted(words, key=lambda word: -sequence.count(word))[:3]
    question = "Which three words come most often in the text above?\nAnswer: The three most frequent words are:"
    return Prompt(f"{' '.join(sequence)}\n{question}", tuple(counts), 30)


def _told(word: str, number: str) -> str:
    """A fact."""
    return f"The secret number for {word} is {number}."


def _asked(word: str) -> str:
    """A question, and how its answer begins."""
    return f"What is the secret number for {word} in the text above?\nAnswer: The secret number for {word} is"


def _number(draw: random.Random) -> str:
    """Seven digits."""
    return str(draw.randint(10**6, 10**7 - 1))


def _words(draw: random.Random, count: int) -> list[str]:
    """Different made-up words of three syllables, or of more where those are used up."""
    words: dict[str, None] = {}
    length = 3 if count < len(_SYLLABLES) ** 3 // 2 else 4
    while len(words) < count:
        words["".join(draw.choices(_SYLLABLES, k=length))] = None
    return list(words)


TASKS: dict[str, Maker] = {
    NEEDLE: _needle,
    MANY_NEEDLES: _many_needles,
    VARIABLES: _variables,
    COMMON: _common_words,
    FREQUENT: _frequent_words,
}
"""By RULER's names. Source: Hsieh et al. 2024 (RULER, arXiv 2404.06654)."""
