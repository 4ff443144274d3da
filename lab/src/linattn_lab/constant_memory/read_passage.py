"""One passage under the exact model, and how far other answers of its global layers are from that."""

from __future__ import annotations

import torch
from torch import Tensor

from linattn.hf import AttentionCall, LoadedModel
from linattn_lab.constant_memory.answering import Answer, Beginning, GlobalLayers, log_probabilities, recording
from linattn_lab.constant_memory.distance import distance

# Positions before the last tokens at which figures are taken as well.
_MOST_BEFORE = 128
_FEWEST_TOKENS = 64
_MOST_MEASURED = 512
_CHECKED = 8


def measured_tokens(loaded: LoadedModel, num_tokens: int) -> int:
    """How many of a passage's last tokens are measured; ValueError for short ones, and models without predictions."""
    if num_tokens < _FEWEST_TOKENS:
        raise ValueError(f"num_tokens must be at least {_FEWEST_TOKENS}, got {num_tokens}")
    if not loaded.model.can_generate():
        raise ValueError(f"{loaded.name} is a {type(loaded.model).__name__}; --budget is for causal language models")
    return min(_MOST_MEASURED, num_tokens // 2)


class ReadPassage:
    """One passage under the exact model: what others are measured against.

    Attributes:
        positions: (n,) where predictions are measured, the last ones of all tokens.
        num_measured: how many are the last ones.
        exact: log-probabilities (n, V) of the exact model there.
        following: (n,) the tokens that come next.
        calls: of the global layers, on the passage.
    """

    def __init__(self, loaded: LoadedModel, layers: GlobalLayers, tokens: Tensor, num_measured: int) -> None:
        """Read the passage twice: as the model does, and through the interception, which must not change it."""
        self._model, self._tokens, length = loaded.model, tokens, tokens.shape[1]
        last = torch.arange(length - 1 - num_measured, length - 1)
        stride = max(-(-len(range(int(last[0]))) // _MOST_BEFORE), 1)
        self.positions = torch.cat((torch.arange(stride - 1, int(last[0]), stride), last))
        self.num_measured, self.following = num_measured, tokens[0, self.positions + 1]
        self._beginning = Beginning(loaded.model, layers.names[0])
        with self._beginning.recorded():
            self.exact = log_probabilities(loaded.model, tokens, self.positions)[0]
        self.calls: list[AttentionCall] = []
        rebuilt = self.read(recording(layers, self.calls), _CHECKED)
        _check(self.exact[-_CHECKED:], rebuilt)

    @property
    def num_tokens(self) -> int:
        """L."""
        return self._tokens.shape[1]

    def read(self, answer: Answer, last: int | None = None) -> Tensor:
        """Log-probabilities (n, V) at the measured positions, or at the last of them."""
        positions = self.positions if last is None else self.positions[-last:]
        with self._beginning.replayed():
            return log_probabilities(self._model, self._tokens, positions, answer)[0]

    def kl(self, answer: Answer) -> float:
        """The mean KL divergence of the last tokens' distributions from the exact ones."""
        last = self.num_measured
        apart = distance(self.exact[-last:], self.read(answer, last), self.following[-last:])
        # Of equal distributions it is 0, and rounding may leave it below.
        return max(0.0, float(apart.kl.mean()))


def _check(exact: Tensor, rebuilt: Tensor) -> None:
    """Refuse a model whose global layers do more than softmax(scale · q·k) v."""
    apart = float((exact.exp() * (exact - rebuilt)).sum(-1).mean())
    if not abs(apart) < 1e-4:
        raise RuntimeError(
            f"exact attention on the intercepted queries, keys and values gives other predictions than the model "
            f"(KL {apart:.1e}): no figure measured on it would be right"
        )
