"""End-to-end distillation: the whole linear model is distilled against the original's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from linattn.convert.losses import distillation
from linattn.convert.predictions import token_divergence
from linattn.convert.running import Batch, Outputs, run
from linattn.convert.samples import Samples
from linattn.feature_maps import FeatureMap
from linattn.training import Seconds, Training


Weights = tuple[Sequence[nn.Parameter], float]
"""Parameters, and the largest learning rate of their schedule."""


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

    Source: Jiao et al. 2020 (arXiv 1909.10351).
    """

    def imitate(batch: Batch, theirs: Outputs) -> Tensor:
        """The loss on a batch."""
        ours = run(student, batch)
        divergence = None
        if ours.predictions is not None and theirs.predictions is not None:
            divergence = token_divergence(ours.predictions, theirs.predictions)
        return distillation(ours.states, theirs.states, theirs.live, divergence)

    @cache
    def validation() -> list[tuple[Batch, Outputs]]:
        """The validation texts with the teacher's outputs on them, which are computed once."""
        return [(batch, teacher_outputs(teacher, batch)) for batch in samples.validation]

    def validate() -> float:
        """The loss on the validation texts."""
        with torch.no_grad():
            return sum(float(imitate(*pair)) for pair in validation()) / len(validation())

    def loss(step: int) -> Tensor:
        """The loss of a step."""
        batch = samples.training(step)
        return imitate(batch, teacher_outputs(teacher, batch))

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
        validate=validate,
        budget=Seconds(seconds),
    )


def teacher_outputs(teacher: nn.Module, batch: Batch) -> Outputs:
    """The original model's outputs on a batch, without gradients."""
    with torch.no_grad():
        return run(teacher, batch)
