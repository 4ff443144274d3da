"""End-to-end distillation: the whole linear model is distilled against the original's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from linattn.convert.losses import Mean, distillation, itself
from linattn.convert.predictions import Predictions, sampled_divergence, spread_divergence
from linattn.convert.running import Batch, Outputs, mean_loss, mean_of, own_texts, run
from linattn.convert.samples import Samples
from linattn.feature_maps import FeatureMap
from linattn.processes import Processes
from linattn.training import Seconds, Training

Weights = tuple[Sequence[nn.Parameter], float]
"""Parameters, and the largest learning rate of their schedule."""

Compare = Callable[[Predictions, Predictions], Tensor]
"""The divergence of predictions from the original's."""


def distil(
    student: nn.Module,
    weights: Weights,
    maps: Sequence[FeatureMap],
    teacher: nn.Module,
    samples: Samples,
    *,
    seconds: float,
    map_learning_rate: float,
) -> Training:
    """The training of weights, and of the maps' at a rate of their own, against the original's states and predictions.

    Of a large vocabulary a step compares the predictions of some tokens, drawn anew (`sampled_divergence`), and
    validation those of as many, evenly spread. Source: Jiao et al. 2020 (arXiv 1909.10351).
    """

    processes = Processes.of_this_run()

    def imitate(batch: Batch, theirs: Outputs, compare: Compare, mean: Mean = itself) -> Tensor:
        """The loss on a batch."""
        ours = run(student, batch)
        divergence = None
        if ours.predictions is not None and theirs.predictions is not None:
            divergence = compare(ours.predictions, theirs.predictions)
        return distillation(ours.states, theirs.states, theirs.live, divergence, mean)

    @cache
    def exact(number: int) -> Outputs:
        """The teacher's outputs on a validation text, which are computed once."""
        return teacher_outputs(teacher, samples.validation[number])

    def judged(number: int) -> Tensor:
        """The loss on a validation text, all of which is here."""
        return imitate(samples.validation[number], exact(number), spread_divergence)

    def loss(step: int) -> Tensor:
        """The loss of a step, on this process's texts."""
        batch = own_texts(samples.training(step), processes)
        mean = partial(mean_of, processes=processes)
        compare = partial(sampled_divergence, draw=torch.Generator().manual_seed(step), mean=mean)
        return imitate(batch, teacher_outputs(teacher, batch), compare, mean)

    of_maps = [parameter for feature_map in maps for parameter in feature_map.parameters()]
    known = set(map(id, of_maps))
    chosen, learning_rate = weights
    others = [parameter for parameter in chosen if id(parameter) not in known]
    groups = [(others, learning_rate), (of_maps, map_learning_rate)]
    return Training(
        name="distillation",
        model=student,
        parameters=[(parameters, rate) for parameters, rate in groups if parameters],
        loss=loss,
        validate=mean_loss(judged, len(samples.validation), processes),
        budget=Seconds(seconds),
    )


def teacher_outputs(teacher: nn.Module, batch: Batch) -> Outputs:
    """The original model's outputs on a batch, without gradients."""
    with torch.no_grad():
        return run(teacher, batch)
