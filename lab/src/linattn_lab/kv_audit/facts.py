"""Facts told once at several depths of a text, and asked for at its end; teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.hf import LoadedModel
from linattn_lab.kv_audit.passages import TokenText, encoded
from linattn_lab.kv_audit.reading import same_beginning

DEPTHS = (0.1, 0.5, 0.9)
"""Where facts are told, as shares of the text."""

_THINGS = (
    *("door", "river", "clock", "garden", "bridge", "tower", "lamp", "mirror"),
    *("train", "violin", "harbour", "castle", "forest", "ladder", "wheel", "market"),
    *("island", "kettle", "window", "carpet", "engine", "valley", "basket", "statue"),
)
# Shares of the text around a depth that its facts are spread over, so that no two stand side by side.
_SPREAD = 0.04
MOST_FACTS = len(_THINGS) // len(DEPTHS)
"""Facts of one depth at most."""


class Question(NamedTuple):
    """Where an answer is expected."""

    start: int  # position of its first token
    stop: int  # after its last
    depth: float  # where it was told, as a share of the text


class Facts(NamedTuple):
    """A text with questions at its end."""

    tokens: Tensor  # (1, L)
    questions: tuple[Question, ...]  # in the order of their answers

    @property
    def last(self) -> int:
        """How many of the last tokens are after the first position that predicts an answer."""
        return self.tokens.shape[1] - self.questions[0].start + 1

    def hits(self, logs: Tensor) -> list[float]:
        """The share of each answer's tokens that are the likeliest, given the predictions (last, V) at the end."""
        first = self.questions[0].start - 1
        right = logs.argmax(-1)[:-1] == self.tokens[0, first + 1 :]
        spans = ((one.start - 1 - first, one.stop - 1 - first) for one in self.questions)
        return [float(right[start:stop].double().mean()) for start, stop in spans]


def facts(loaded: LoadedModel, text: TokenText, num_tokens: int, start: int, seed: int, count: int) -> Facts:
    """Facts within a text, as many at each depth, and each of them asked for at the end, in another order."""
    draw = torch.Generator().manual_seed(seed)
    order = [_THINGS[place] for place in torch.randperm(len(_THINGS), generator=draw).tolist()]
    things = order[: count * len(DEPTHS)]
    numbers = {thing: str(int(torch.randint(10000, 99999, (), generator=draw))) for thing in things}
    depths = [depth + _SPREAD * (i / count - 0.5) for depth in DEPTHS for i in range(count)]
    told = [encoded(loaded, f"\nThe number of the {thing} is {numbers[thing]}.\n") for thing in things]
    asked = torch.randperm(len(things), generator=draw).tolist()
    cues = [f"\nThe number of the {things[place]} is " for place in asked]
    answers = [numbers[things[place]] for place in asked]
    # Question and answer in one: by themselves some tokenizers write a number otherwise than it was told.
    lines = [encoded(loaded, f"{cue}{answer}.") for cue, answer in zip(cues, answers, strict=True)]
    size = num_tokens - len(text.opening) - sum(map(len, (*told, *lines)))
    parts = [text.opening, *_between(text.filler(start, size), depths, told)]
    position, questions = sum(map(len, parts)), []
    for place, cue, answer, line in zip(asked, cues, answers, lines, strict=True):
        begin, stop = (same_beginning(line, encoded(loaded, words)) for words in (cue, cue + answer))
        questions.append(Question(position + begin, position + max(stop, begin + 1), DEPTHS[place // count]))
        position += len(line)
    return Facts(torch.cat((*parts, *lines)).unsqueeze(0), tuple(questions))


def _between(filler: Tensor, depths: Sequence[float], told: Sequence[Tensor]) -> list[Tensor]:
    """A text with facts in it."""
    parts, last = [], 0
    for depth, fact in zip(depths, told, strict=True):
        cut = int(depth * len(filler))
        parts += [filler[last:cut], fact]
        last = cut
    return [*parts, filler[last:]]
