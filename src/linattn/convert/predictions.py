"""Predictions of tokens, made piece by piece: all logits may outgrow the model; letters as in convert/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NONE = -100
"""In place of a token where there is none."""

# Logits made at once: 64 MB in float32; and of how many such pieces a sample is.
_MOST, _SAMPLED = 2**24, 4

Mean = Callable[[Tensor], Tensor]
"""The mean of a number over all processes, each of which has it of its own texts."""


def itself(x: Tensor) -> Tensor:
    """Return x, the mean over one process."""
    return x


class Predictions(NamedTuple):
    """Distributions over V tokens, by their logits or by what makes these."""

    states: Tensor  # (n, E); the logits themselves (n, V) where there is no head
    head: Callable[[Tensor], Tensor] | None  # makes logits of states; None where they are given
    # (n,), the token that each is a prediction of, `NONE` where there is none; None where the model does not predict
    # the next token
    following: Tensor | None = None

    def log_probabilities(self, states: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Logarithms (m, V) of what is predicted from some of the states (m, ·), in this dtype or a wider one."""
        logits = states if self.head is None else self.head(states)
        return logits.to(torch.promote_types(logits.dtype, dtype)).log_softmax(-1)

    def at(self, chosen: Tensor) -> Predictions:
        """Select the predictions of some tokens."""
        return Predictions(self.states[chosen], self.head, None if self.following is None else self.following[chosen])

    def room(self) -> int:
        """Of how many tokens the logits are held at once."""
        width = self.states.shape[-1] if self.head is None else self.head(self.states[:1].detach()).shape[-1]
        return max(_MOST // max(width, 1), 1)

    def pieces(self) -> Iterator[slice]:
        """Consecutive stretches of the tokens, each of few enough for their logits to be held."""
        number, size = len(self.states), self.room()
        return (slice(start, min(start + size, number)) for start in range(0, number, size))


def token_divergence(
    student: Predictions, teacher: Predictions, dtype: torch.dtype = torch.float32, mean: Mean = itself
) -> Tensor:
    """Mean over tokens of KL(p‖p̂) in nats, p̂ and p what the two predict; differentiable in the student. O(n·V·E)."""
    number = len(student.states)
    total = _weighted_divergences(student, teacher, student.states.new_ones(number), dtype)
    return total / mean(total.new_tensor(number))


def sampled_divergence(
    student: Predictions, teacher: Predictions, draw: torch.Generator, mean: Mean = itself
) -> Tensor:
    """An estimate of `token_divergence` from m of its tokens, in O(m·V·E) time; itself for m or fewer tokens."""
    # 1/(m·n) Σ_t KL_t / p_t, t drawn m times, p_t in proportion to ‖ŷ_t - y_t‖ of the states predicted from. Its mean
    # is the divergence, and that of its gradient the gradient; that of KL_t grows as ‖ŷ_t - y_t‖ does, so that the
    # draws are worth about the same (importance sampling: Owen 2013, "Monte Carlo theory, methods and examples", 9.1).
    number, size = len(student.states), _SAMPLED * student.room()
    if number <= size:
        return token_divergence(student, teacher, mean=mean)
    # A state that is no number is found out by the loss.
    distances = (student.states.detach() - teacher.states).double().norm(dim=-1).nan_to_num(1.0, 1.0).cpu()
    if not distances.any():
        distances.fill_(1.0)
    chosen = torch.multinomial(distances, size, replacement=True, generator=draw)
    weights = (distances.sum() / (size * distances[chosen])).to(student.states)
    chosen = chosen.to(student.states.device)
    total = _weighted_divergences(student.at(chosen), teacher.at(chosen), weights, weights.dtype)
    return total / mean(total.new_tensor(number))


def spread_divergence(student: Predictions, teacher: Predictions) -> Tensor:
    """`token_divergence` of as many tokens as `sampled_divergence` draws, evenly spread: the same ones at each look."""
    number, size = len(student.states), _SAMPLED * student.room()
    if number > size:
        chosen = torch.arange(size, device=student.states.device) * number // size
        student, teacher = student.at(chosen), teacher.at(chosen)
    return token_divergence(student, teacher)


def _weighted_divergences(student: Predictions, teacher: Predictions, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ_t w_t·KL_t, piece by piece; logits are made anew for the gradient."""

    def of(ours: Tensor, theirs: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            log_p = teacher.log_probabilities(theirs, dtype)
        divergences: Tensor = (log_p.exp() * (log_p - student.log_probabilities(ours, dtype))).sum(-1)
        return weight.to(divergences) @ divergences

    anew = partial(checkpoint, of, use_reentrant=False, preserve_rng_state=False)
    parts = [anew(student.states[piece], teacher.states[piece], weights[piece]) for piece in student.pieces()]
    return torch.stack(parts).sum()


def next_token_losses(predictions: Predictions) -> Tensor | None:
    """-log p(next token) in nats, float64, of each token that has one; None where the model does not predict it."""
    following = predictions.following
    if following is None:
        return None
    losses = []
    with torch.no_grad():
        for piece in predictions.pieces():
            wanted = following[piece]
            logs = predictions.log_probabilities(predictions.states[piece], torch.float64)
            losses.append(-logs[wanted != NONE].gather(-1, wanted[wanted != NONE].unsqueeze(-1)).squeeze(-1))
    return torch.cat(losses) if losses else following.new_zeros(0, dtype=torch.float64)
