"""The figures of one method on one passage; letters as in __init__.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from linattn.hf import BoundedLayerReport, LoadedModel, PreTrainedModel, new_cache
from linattn.hf.loading import most_tokens
from linattn_lab.kv_audit.divergence import divergence, tails
from linattn_lab.kv_audit.methods import Method, kept
from linattn_lab.kv_audit.names import FULL
from linattn_lab.kv_audit.peak import peak_bytes
from linattn_lab.kv_audit.reading import Reading, Writing, read, same_beginning, write

MOST_MEASURED, NUM_WRITTEN = 512, 40
"""Predictions of a passage that are measured at most, and tokens that are written after it."""
# Tokens of a passage's last words.
_NUM_LAST = 48

_ANY_LENGTH = 2**62


def longest_passage(model: PreTrainedModel) -> int:
    """Tokens of a passage at most, so that what is written after it and one token more have positions of the model."""
    positions = most_tokens(model)
    return _ANY_LENGTH if positions is None else positions - NUM_WRITTEN - 1


class Passage:
    """A passage, read under the full cache once a figure is asked for."""

    num_tokens: int  # L

    def __init__(self, loaded: LoadedModel, tokens: Tensor, chunk: int) -> None:
        """Nothing is read yet."""
        self.num_tokens = tokens.shape[1]
        self._model, self._tokens, self._chunk = loaded.model, tokens, chunk
        self._tokenizer = loaded.tokenizer

    def figures(self, method: Method, full: Sequence[BoundedLayerReport]) -> dict[str, Any]:
        """What a method loses, keeps and takes, by the names of a row's fields.

        Cost: a pass over the text, 40 steps, and a pass over a chunk under the profiler; for the first method one more
        pass over the text.
        """
        exact, exact_writing = self._exact
        last, memory = len(exact.logs), method.cache(self._model)
        with method.attending(self._model, [layer.module_name for layer in full]):
            reading = read(self._model, self._tokens, memory, last=last, chunk=self._chunk)
            num_bytes, unmerged = kept(memory, self.num_tokens, full)
            # After the control the full cache would write the same once more.
            writing = (
                exact_writing if method.name == FULL else write(self._model, reading.logs[-1], memory, NUM_WRITTEN)
            )
            again = self._tokens[:, : min(self._chunk, longest_passage(self._model) + 1 - self.num_tokens)]
            allocated = peak_bytes(partial(read, self._model, again, memory, last=1, chunk=self._chunk))
        apart = divergence(exact.logs[:-1], reading.logs[:-1], self._tokens[0, 1 - last :])
        spread = tails(apart.kl)
        return {
            "num_bytes": num_bytes,
            "unmerged": unmerged,
            "peak_bytes": num_bytes + allocated,
            "prefill_seconds": reading.seconds,
            "tokens_per_second": (NUM_WRITTEN - 1) / writing.seconds,
            "kl": spread.mean,
            "kl_median": spread.median,
            "kl_high": spread.high,
            "kl_largest": spread.largest,
            "perplexity": float(apart.loss.mean().exp()),
            "same": float(apart.same.mean()),
            "parted": same_beginning(exact_writing.tokens, writing.tokens),
            "agreement": float((exact_writing.tokens == writing.tokens).double().mean()),
            "ending": self._words(self._tokens[0, -_NUM_LAST:]),
            "written": self._words(writing.tokens),
        }

    def _words(self, tokens: Tensor) -> str:
        """The text of tokens (n,)."""
        (text,) = self._tokenizer.batch_decode(tokens.unsqueeze(0), skip_special_tokens=True)
        return text

    @cached_property
    def _exact(self) -> tuple[Reading, Writing]:
        """Under the full cache, in chunks of twice the length: it is read again in others, as a control."""
        memory, last = new_cache(self._model), min(MOST_MEASURED, self.num_tokens // 2) + 1
        reading = read(self._model, self._tokens, memory, last=last, chunk=2 * self._chunk)
        return reading, write(self._model, reading.logs[-1], memory, NUM_WRITTEN)
