"""Recall: what was said once, asked for at the end of a text; teacher-forced.

Three tasks: stretches of the text that come again, numbers told at several depths (needles), and a list of numbers told
at the beginning, asked for one after another (multi-query recall).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.hf import LoadedModel
from linattn_lab.constant_memory.passages import TokenText, encoded

REPEATED, NEEDLES, MULTI_QUERY = "repeated passages", "needles", "multi-query recall"
TASKS = (REPEATED, NEEDLES, MULTI_QUERY)

# Shares of the text before the first question, at which an answer stands.
_DEPTHS = (0.02, 0.25, 0.5, 0.75, 0.95)
# A repeated stretch, and how much of it comes before the model is expected to know it.
_STRETCH, _CUE = 48, 16
_THINGS = (
    *("door", "river", "clock", "garden", "bridge", "tower", "lamp", "mirror"),
    *("train", "violin", "harbour", "castle", "forest", "ladder", "wheel", "market"),
)
_SEED = 5


class Question(NamedTuple):
    """Where an answer is expected.

    Attributes:
        start: position of its first token.
        stop: after its last.
        depth: where it stands before, as a share of the text.
    """

    start: int
    stop: int
    depth: float


class Task(NamedTuple):
    """A text with questions.

    Attributes:
        name: of the task.
        tokens: (1, L).
        questions: in the order of their answers.
    """

    name: str
    tokens: Tensor
    questions: tuple[Question, ...]

    @property
    def positions(self) -> Tensor:
        """The positions whose next token is one of an answer, (n,)."""
        return torch.cat([torch.arange(one.start - 1, one.stop - 1) for one in self.questions])

    def hits(self, log_probabilities: Tensor) -> list[float]:
        """The share of each answer's tokens that are the likeliest, given those (n, V) at `positions`."""
        right = log_probabilities.argmax(-1) == self.tokens[0, self.positions + 1]
        parts = right.double().split([one.stop - one.start for one in self.questions])
        return [float(part.mean()) for part in parts]


class Tasks(NamedTuple):
    """What `tasks` returns.

    Attributes:
        whole: those there is room for, in the order of `TASKS`.
        left_out: by name, why the others are not.
    """

    whole: tuple[Task, ...]
    left_out: dict[str, str]


def tasks(loaded: LoadedModel, text: TokenText, num_tokens: int) -> Tasks:
    """All three, of so many tokens each, in the words of a text's end.

    Args:
        loaded: for its tokenizer.
        text: whose last tokens fill the tasks.
        num_tokens: of each task.

    Returns:
        `Tasks`; a task whose questions leave no room for text between is left out.
    """
    draw = torch.Generator().manual_seed(_SEED)
    numbers = {thing: str(int(torch.randint(10000, 99999, (), generator=draw))) for thing in _THINGS}
    order = [_THINGS[place] for place in torch.randperm(len(_THINGS), generator=draw).tolist()]
    few, many = order[: len(_DEPTHS)], (0.0,) * len(order)
    found: list[Task] = []
    left_out: dict[str, str] = {}
    makers: dict[str, Callable[[], Task]] = {
        REPEATED: lambda: _repeated(text, num_tokens),
        NEEDLES: lambda: _told(loaded, text, num_tokens, NEEDLES, numbers, _DEPTHS, few),
        MULTI_QUERY: lambda: _told(loaded, text, num_tokens, MULTI_QUERY, numbers, many, order),
    }
    for name, make in makers.items():
        try:
            found.append(make())
        except ValueError as error:
            left_out[name] = str(error)
    return Tasks(tuple(found), left_out)


def _repeated(text: TokenText, num_tokens: int) -> Task:
    """The text, and then stretches of it again."""
    size = num_tokens - len(text.opening) - _STRETCH * len(_DEPTHS)
    filler = _filler(text, size)
    starts = [int(depth * (size - _STRETCH)) for depth in _DEPTHS]
    tokens = torch.cat((text.opening, filler, *(filler[start : start + _STRETCH] for start in starts)))
    begins = [len(text.opening) + size + _STRETCH * number for number in range(len(starts))]
    questions = (Question(begin + _CUE, begin + _STRETCH, depth) for begin, depth in zip(begins, _DEPTHS, strict=True))
    return Task(REPEATED, tokens.unsqueeze(0), tuple(questions))


def _told(
    loaded: LoadedModel,
    text: TokenText,
    num_tokens: int,
    name: str,
    numbers: dict[str, str],
    depths: Sequence[float],
    asked: Sequence[str],
) -> Task:
    """Facts within a text at some depths, and each of them asked for at the end, in another order."""
    told = sorted(asked) if len(set(depths)) == 1 else list(asked)
    facts = [encoded(loaded, f"\nThe number of the {thing} is {numbers[thing]}.\n") for thing in told]
    asking = [encoded(loaded, f"\nThe number of the {thing} is ") for thing in asked[::-1]]
    answers = [encoded(loaded, f"{numbers[thing]}.") for thing in asked[::-1]]
    size = num_tokens - len(text.opening) - sum(map(len, (*facts, *asking, *answers)))
    filler = _filler(text, size)
    cuts = [int(depth * size) for depth in depths]
    parts, last = [text.opening], 0
    for cut, fact in zip(cuts, facts, strict=True):
        parts += [filler[last:cut], fact]
        last = cut
    parts.append(filler[last:])
    place, questions = sum(map(len, parts)), []
    where = dict(zip(told, depths, strict=True))
    for thing, cue, answer in zip(asked[::-1], asking, answers, strict=True):
        start = place + len(cue)
        questions.append(Question(start, start + len(answer) - 1, where[thing]))
        parts += [cue, answer]
        place = start + len(answer)
    return Task(name, torch.cat(parts).unsqueeze(0), tuple(questions))


def _filler(text: TokenText, size: int) -> Tensor:
    """The last tokens of a text."""
    if not _STRETCH < size <= len(text.content):
        raise ValueError(
            f"between what is told and what is asked there would be {size:,} tokens of the text; wanted are more than "
            f"{_STRETCH} and at most its {len(text.content):,}: give another number of --tokens, or a longer text"
        )
    return text.content[-size:]
