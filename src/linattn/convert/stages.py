"""The error of each stage, in every layer and as a whole, beside both baselines; letters as in convert/__init__.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn.convert.predictions import next_token_losses, token_divergence
from linattn.convert.running import Batch, Outputs, run
from linattn.hf import AttentionCall, LayerAttention, PreTrainedModel, intercept
from linattn.methods.measures import cosine, relative_error
from linattn.processes import Processes

BASELINE = "uniform"
"""Name of the stage that is no result: every attention that is converted averages its values."""

Measured = Callable[[str, float], None]
"""Takes the name of what is being measured, and the share of it that is done, of this process's texts."""


@dataclass(frozen=True)
class LayerError:
    """One converted layer: its kernel against softmax on the very queries, keys and values it was given.

    Attributes:
        layer: the qualified name of its attention module.
        error: relative Frobenius error of a head's output, mean over heads and texts.
        worst: that of the worst head, mean over texts.
        uniform_error: that of uniform attention, which averages the values.
    """

    layer: str
    error: float
    worst: float
    uniform_error: float


@dataclass(frozen=True)
class Agreement:
    """A whole model against the model it came from, over the held-out texts.

    Attributes:
        embedding_cosine: cosine of the mean over tokens of the last states, mean over texts; 1 is exact.
        token_cosine: cosine of a token's last state, mean over tokens; 1 is exact.
        rank_correlation: Spearman's, of the similarities between texts' mean states; 1 is exact, None below three.
        divergence: KL divergence of the predicted token from the original model's, in nats, mean over tokens; 0 is
            exact, None for a model without predictions.
        perplexity: exp of the mean loss of the next token; None for a model that does not predict it.
        exact_perplexity: the original model's.
    """

    embedding_cosine: float
    token_cosine: float
    rank_correlation: float | None
    divergence: float | None
    perplexity: float | None = None
    exact_perplexity: float | None = None

    @property
    def merit(self) -> float:
        """Figure to compare stages by, more is better: minus the divergence of predictions, else embedding cosine."""
        merit = self.embedding_cosine if self.divergence is None else -self.divergence
        return -math.inf if math.isnan(merit) else merit


@dataclass(frozen=True)
class Stage:
    """A model at one stage.

    Attributes:
        name: "uniform", "unconverted", "calibrated" or "converted".
        agreement: of the whole model.
        layers: one per converted layer, in order; none for the baseline.
    """

    name: str
    agreement: Agreement
    layers: tuple[LayerError, ...] = ()


Exact = Sequence[Outputs] | Mapping[int, Outputs]
"""The original model's outputs by batch; of several processes each needs those of its own share."""

Errors = dict[str, list[tuple[Tensor, Tensor]]]
"""Of each kernel, by its layer, its errors (B, H) and those of averaging, a pair for each call."""


class _Compared(NamedTuple):
    """A model's outputs on a batch beside the original's, and the errors of its kernels there."""

    ours: Tensor  # (B, E) embeddings
    theirs: Tensor  # (B, E)
    cosines: Tensor  # of all live tokens
    divergence: tuple[float, int] | None  # mean over so many tokens
    losses: tuple[Tensor, Tensor] | None  # of the next tokens, the model's and the original's
    errors: Errors


def measure(name: str, model: PreTrainedModel, batches: Sequence[Batch], exact: Exact, measured: Measured) -> Stage:
    """A linearized model on texts, layer by layer and end to end; `exact` are the original model's outputs."""

    def compared(number: int) -> _Compared:
        with _recorded(model) as errors:
            outputs = run(model, batches[number])
        return _compared(outputs, exact[number], errors)

    comparisons = _each(name, len(batches), compared, measured)
    layers = []
    for layer in comparisons[0].errors:
        pairs = [pair for one in comparisons for pair in one.errors[layer]]
        ours, uniform = (torch.cat(each).mean(0) for each in zip(*pairs, strict=True))
        layers.append(LayerError(layer, float(ours.mean()), float(ours.max()), float(uniform.mean())))
    return Stage(name, _agreement(comparisons), tuple(layers))


def measure_uniform(
    model: PreTrainedModel, batches: Sequence[Batch], exact: Exact, layers: set[str], measured: Measured
) -> Stage:
    """The original model with these layers, by module name, averaging their values: the baseline of a conversion."""

    def answer(call: AttentionCall) -> Tensor:
        return call.uniform() if call.module_name in layers else call.softmax()

    def compared(number: int) -> _Compared:
        return _compared(run(model, batches[number]), exact[number], {})

    with intercept(model, answer):
        return Stage(BASELINE, _agreement(_each(BASELINE, len(batches), compared, measured)))


@torch.no_grad()
def _each(name: str, number: int, compared: Callable[[int], _Compared], measured: Measured) -> list[_Compared]:
    """Every batch beside the original's outputs; this process runs its share, and reports its progress."""
    processes, done = Processes.of_this_run(), count(1)
    share = len(range(number)[processes.rank :: processes.size])

    def reported(batch: int) -> _Compared:
        comparison = compared(batch)
        measured(name, next(done) / share)
        return comparison

    return processes.each(range(number), reported)


def best(stages: Sequence[Stage]) -> Stage:
    """The stage of the most merit, of several the first; the baseline is left out."""
    return max((stage for stage in stages if stage.name != BASELINE), key=lambda stage: stage.agreement.merit)


def _compared(a: Outputs, b: Outputs, errors: Errors) -> _Compared:
    """Outputs on one batch beside the original's; the kernels' errors are those recorded in its pass."""
    divergence, losses = None, None
    if a.predictions is not None and b.predictions is not None:
        divergence = float(token_divergence(a.predictions, b.predictions, torch.float64)), len(b.predictions.states)
        ours, theirs = next_token_losses(a.predictions), next_token_losses(b.predictions)
        if ours is not None and theirs is not None:
            losses = ours, theirs
    cosines = cosine(a.states[-1][b.live], b.states[-1][b.live])
    return _Compared(_embeddings(a), _embeddings(b), cosines, divergence, losses, errors)


def _agreement(batches: Sequence[_Compared]) -> Agreement:
    """Over all batches; for the rank correlation see Spearman 1904."""
    ours, theirs = torch.cat([one.ours for one in batches]), torch.cat([one.theirs for one in batches])
    correlation = None
    if len(ours) > 2:
        # Spearman's, between the cosines of all pairs of texts by the one and by the other; ties are not averaged.
        first, second = torch.triu_indices(len(ours), len(ours), 1)
        ranks = torch.stack([cosine(x[first], x[second]).argsort().argsort().double() for x in (ours, theirs)])
        correlation = float(torch.corrcoef(ranks)[0, 1])
    divergences = [one.divergence for one in batches if one.divergence is not None]
    num_predicted = sum(count for _, count in divergences)
    losses = [one.losses for one in batches if one.losses is not None]
    perplexities = [float(torch.cat(each).mean().exp()) for each in zip(*losses, strict=True)]
    perplexity, exact_perplexity = perplexities or (None, None)
    return Agreement(
        embedding_cosine=float(cosine(ours, theirs).mean()),
        token_cosine=float(torch.cat([one.cosines for one in batches]).mean()),
        rank_correlation=correlation,
        divergence=sum(mean * count for mean, count in divergences) / num_predicted if divergences else None,
        perplexity=perplexity,
        exact_perplexity=exact_perplexity,
    )


@contextmanager
def _recorded(model: nn.Module) -> Iterator[Errors]:
    """Record each kernel's errors while the block runs."""
    errors: Errors = {}

    def compare(kernel: LayerAttention, args: tuple[Tensor, ...], options: dict[str, Any], out: Tensor) -> None:
        """Forward hook: the same call answered exactly and uniformly."""
        errors.setdefault(kernel.module_name, []).append(_errors(*args, out=out, **options))

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, LayerAttention):
                hooks.enter_context(module.register_forward_hook(compare, with_kwargs=True))
        yield errors


def _errors(
    query: Tensor, key: Tensor, value: Tensor, *, out: Tensor, scale: float, key_mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Relative errors (B, H) of an output and of the uniform mean; padded queries are left out."""
    q, k, v = query.double(), key.double(), value.double()
    call = AttentionCall(0, "", q, k, v, key_mask, is_causal, scale)
    exact, uniform = call.softmax(), call.uniform()
    if key_mask is not None and q.shape[2] == k.shape[2]:
        exact, uniform, out = (torch.where(key_mask[:, None, :, None], x, 0) for x in (exact, uniform, out))
    # As many heads of one text: its own figure for every text and head.
    exact, uniform, out = (x.flatten(0, 1).unsqueeze(0) for x in (exact, uniform, out))
    ours, averaged = (relative_error(x, exact).view(q.shape[:2]) for x in (out, uniform))
    return ours, averaged


def _embeddings(outputs: Outputs) -> Tensor:
    """The mean of each text's last states over its tokens, (B, E) float64."""
    live = outputs.live.unsqueeze(-1)
    return torch.where(live, outputs.states[-1].double(), 0).sum(1) / live.sum(1)
