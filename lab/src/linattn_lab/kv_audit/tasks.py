"""Retrieval tasks of an audit: facts told once at several depths, and RULER's that need no data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.hf import Cache, LoadedModel
from linattn_lab.kv_audit.facts import Facts, facts
from linattn_lab.kv_audit.names import FACTS
from linattn_lab.kv_audit.passages import TokenText, encoded
from linattn_lab.kv_audit.reading import read, write
from linattn_lab.kv_audit.ruler import TASKS as RULER
from linattn_lab.kv_audit.ruler import Prompt, longest

TASKS = (FACTS, *RULER)
"""Names of all tasks."""


@dataclass(frozen=True, eq=False)
class Tasks:
    """The tasks of one model."""

    loaded: LoadedModel  # the model and its tokenizer
    text: TokenText  # what stands between facts
    num_facts: int  # facts of each depth
    chunk: int  # tokens of a forward pass

    def check(self, name: str, num_tokens: int) -> None:
        """ValueError if a task does not fit into so many tokens, or the text is too short for it."""
        if name == FACTS:
            self._facts(num_tokens, 0)
        else:
            self._prompt(name, num_tokens, 0)

    def answer(self, name: str, num_tokens: int, sample: int, memory: Cache) -> tuple[list[float], list[float]]:
        """Depths, where they are told, and what is right of the answer to each question, by a cache of no tokens yet.

        Cost: a pass over the text; of RULER's tasks a step for each token of the answer too.
        """
        model = self.loaded.model
        if name == FACTS:
            told = self._facts(num_tokens, sample)
            hits = told.hits(read(model, told.tokens, memory, last=told.last, chunk=self.chunk).logs)
            return [question.depth for question in told.questions], hits
        prompt = self._prompt(name, num_tokens, sample)
        reading = read(model, self._tokens(prompt.text), memory, last=1, chunk=self.chunk)
        answer = write(model, reading.logs[-1], memory, prompt.num_written).tokens
        return [], [prompt.score(*self.loaded.tokenizer.batch_decode(answer.unsqueeze(0)))]

    def _facts(self, num_tokens: int, sample: int) -> Facts:
        """A text of facts, between other words for each sample."""
        # By the golden section, so that a sample's text is the same however many there are.
        start = int(len(self.text.content) * (sample * 0.6180339887 % 1))
        return facts(self.loaded, self.text, num_tokens, start, sample, self.num_facts)

    def _prompt(self, name: str, num_tokens: int, sample: int) -> Prompt:
        """A prompt of RULER's with room for its answer."""

        def fits(prompt: Prompt) -> bool:
            """Whether it is short enough."""
            return self._tokens(prompt.text).shape[1] + prompt.num_written <= num_tokens

        return longest(RULER[name], sample, fits)

    def _tokens(self, text: str) -> Tensor:
        """A text as the model reads it, (1, L)."""
        return torch.cat((self.text.opening, encoded(self.loaded, text))).unsqueeze(0)
