"""Passages of a text, as a language model reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linattn.hf import LoadedModel
from linattn_lab.texts import Text

# Between facts and questions there is at least so much of a text.
_FEWEST = 48


class TokenText(NamedTuple):
    """A text in tokens."""

    opening: Tensor  # tokens before any text of the model's, such as one that begins a text
    content: Tensor  # (n,) the text's own

    @classmethod
    def of(cls, loaded: LoadedModel, text: Text) -> TokenText:
        """All of a text."""
        return cls(encoded(loaded, "", special=True), encoded(loaded, text.content))

    def passage(self, start: int, num_tokens: int) -> Tensor:
        """So many tokens (1, L) from a place on, the opening included."""
        stop = start + num_tokens - len(self.opening)
        return torch.cat((self.opening, self.content[start:stop])).unsqueeze(0)

    def starts(self, num_tokens: int, count: int) -> list[int]:
        """Where `count` passages of so many tokens begin, evenly spaced, none overlapping."""
        size = num_tokens - len(self.opening)
        room = len(self.content) - size
        if size < 1 or room < size * (count - 1):
            raise ValueError(
                f"the text has {len(self.content):,} tokens, too few for --passages {count} of {num_tokens:,} each; "
                "give a longer text, fewer --passages or fewer --tokens"
            )
        return [room * number // max(count - 1, 1) for number in range(count)]

    def filler(self, start: int, size: int) -> Tensor:
        """So many tokens from a place on, or from the last one that leaves so many."""
        if not _FEWEST < size <= len(self.content):
            raise ValueError(
                f"between what is told and what is asked there would be {max(size, 0):,} tokens of text; wanted are "
                f"{_FEWEST + 1} to all of its {len(self.content):,}: give another number of --tokens, or a longer text"
            )
        start = min(start, len(self.content) - size)
        return self.content[start : start + size]


def encoded(loaded: LoadedModel, text: str, *, special: bool = False) -> Tensor:
    """Tokens (n,) of a text, without those that a tokenizer puts around it, or with them."""
    batch = loaded.tokenizer(text, add_special_tokens=special, return_tensors="pt", verbose=False)
    tokens: Tensor = batch["input_ids"]
    return tokens.reshape(-1).long()
