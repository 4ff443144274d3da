"""Texts to calibrate, to train, to choose the best weights, and to audit; letters as in convert/__init__.py."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeVar

import torch
from torch import Tensor

from linattn.convert.running import Batch

T = TypeVar("T")
Tokenizer = Callable[..., Mapping[str, Any]]

# Of every eight documents one is held out and one chooses the best; the rest trains.
_PERIOD, _HELD_OUT, _VALIDATION = 8, 7, 3
_MOST_HELD_OUT, _MOST_VALIDATION, _MOST_CALIBRATION = 32, 8, 16
# Lengths of documents, in sixths of the way from the shortest to the longest.
_LENGTHS = (0, 6, 2, 4, 1, 3, 5)


@dataclass(frozen=True, eq=False)
class Samples:
    """Batches by their use; no two uses share any."""

    training: Callable[[int], Batch]  # the batch of a step, the same whenever it is asked for
    calibration: tuple[Batch, ...]  # what statistics are taken from; of the training texts
    validation: tuple[Batch, ...]  # what chooses the best weights
    held_out: tuple[Batch, ...]  # what the audits read
    digest: str  # tells these samples from all others


def from_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    num_tokens: int,
    min_tokens: int | None = None,
    batch_size: int,
    seed: int,
) -> Samples:
    """Documents of consecutive paragraphs, `min_tokens` (None for a quarter of `num_tokens`) to `num_tokens` long."""
    # The special tokens that the tokenizer puts before and after a text.
    encoding = tokenizer("a", return_special_tokens_mask=True)
    ids, text = encoding["input_ids"], [place for place, flag in enumerate(encoding["special_tokens_mask"]) if not flag]
    first, last = (torch.tensor(part, dtype=torch.long) for part in (ids[: text[0]], ids[text[-1] + 1 :]))
    room = num_tokens - len(first) - len(last)
    if room < len(_LENGTHS):
        raise ValueError(f"num_tokens is {num_tokens}, which leaves {room} tokens for a text; give more")
    least = room // 4 if min_tokens is None else max(min_tokens - len(first) - len(last), 1)
    documents = list(_documents(tokenizer, texts, least, room))
    if len(documents) < 2 * _PERIOD:
        raise ValueError(
            f"the texts give {len(documents)} documents of {least} to {room} tokens, wanted {2 * _PERIOD} or more to "
            "calibrate, train and judge on; give longer texts or a smaller num_tokens (paragraphs end at an empty "
            "line, and none is in two documents)"
        )
    held_out, validation, others = _split(documents)
    stream = torch.cat(others)

    def wrapped(*rows: Tensor) -> Batch:
        """Rows of one length with their special tokens."""
        ids = torch.stack([torch.cat((first, row, last)) for row in rows])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def window(step: int) -> Batch:
        """Windows of one length at random places."""
        draws = random.Random(f"{seed} {step}")
        size = min(draws.randint(least, room), len(stream))
        starts = [draws.randint(0, len(stream) - size) for _ in range(batch_size)]
        return wrapped(*(stream[start : start + size] for start in starts))

    return Samples(
        training=window,
        calibration=tuple(wrapped(d) for d in _spread(others, _MOST_CALIBRATION)),
        validation=tuple(wrapped(d) for d in _spread(validation, _MOST_VALIDATION)),
        held_out=tuple(wrapped(d) for d in _spread(held_out, _MOST_HELD_OUT)),
        digest=_digest([{"input_ids": stream}, *({"input_ids": d} for d in held_out + validation)]),
    )


def checked(batches: Iterable[Batch]) -> list[Batch]:
    """All batches, each a mapping to tensors without labels, or an error that says which is not."""
    samples = list(batches)
    for number, batch in enumerate(samples):
        name: Any = type(batch).__name__
        if isinstance(batch, Mapping):
            name = [name for name, x in batch.items() if not isinstance(x, Tensor)]
        if name:
            words = f"batch {number} is or holds {name}; leave out what is no tensor"
            raise TypeError(f"batches must be mappings of the model's inputs to tensors, and {words}")
        if "labels" in batch:
            raise ValueError(f"batch {number} holds labels, which make a model's first output a loss; leave them out")
        if (mask := batch.get("attention_mask")) is not None and mask.ndim != 2:
            raise ValueError(f"batch {number} holds an attention_mask {tuple(mask.shape)}, wanted (B, L) of 0 and 1")
        if not all(x.numel() for x in batch.values()) or (mask is not None and not mask.any(1).all()):
            raise ValueError(f"batch {number} holds a text without tokens, which has no figures; leave it out")
    return samples


def from_batches(batches: Sequence[Batch], *, seed: int) -> Samples:
    """Batches as they are: of every eight one is held out and one is for validation."""
    if len(batches) < 2 * _PERIOD:
        raise ValueError(f"got {len(batches)} batches, wanted {2 * _PERIOD} or more to calibrate, train and judge on")
    held_out, validation, others = _split(batches)

    def chosen(step: int) -> Batch:
        """Every batch once per round, each round in another order."""
        turn, place = divmod(step, len(others))
        return others[random.Random(f"{seed} {turn}").sample(range(len(others)), len(others))[place]]

    return Samples(
        training=chosen,
        calibration=_spread(others, _MOST_CALIBRATION),
        validation=_spread(validation, _MOST_VALIDATION),
        held_out=_spread(held_out, _MOST_HELD_OUT),
        digest=_digest(batches),
    )


def _documents(tokenizer: Tokenizer, texts: Sequence[str], least: int, room: int) -> Iterator[Tensor]:
    """Consecutive documents of the wanted lengths in turn; the rest of a paragraph that is cut is dropped."""
    # A paragraph that occurs again is read once, so that nothing held out is trained on.
    seen: set[str] = set()
    lengths, tokens = cycle(least + (room - least) * part // 6 for part in _LENGTHS), list[int]()
    size = next(lengths)
    for text in texts:
        for paragraph in filter(None, map(str.strip, re.split(r"\n\s*\n", text))):
            if paragraph in seen:
                continue
            seen.add(paragraph)
            tokens += tokenizer(f"{paragraph}\n\n", add_special_tokens=False, verbose=False)["input_ids"]
            if len(tokens) >= size:
                yield torch.tensor(tokens[:size])
                tokens, size = [], next(lengths)


def _split(items: Sequence[T]) -> tuple[list[T], list[T], list[T]]:
    """Items that are held out, those that choose the best, and the rest."""
    rest = [item for number, item in enumerate(items) if number % _PERIOD not in (_HELD_OUT, _VALIDATION)]
    return list(items[_HELD_OUT::_PERIOD]), list(items[_VALIDATION::_PERIOD]), rest


def _spread(items: Sequence[T], most: int) -> tuple[T, ...]:
    """At most so many, evenly spread."""
    count = min(len(items), most)
    return tuple(items[number * len(items) // count] for number in range(count))


def _digest(batches: Sequence[Batch]) -> str:
    """SHA-256 of names and values."""
    digest = hashlib.sha256()
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
