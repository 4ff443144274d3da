"""End-to-end distillation: the whole linear model is distilled against the original's outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from linattn.convert.losses import distillation
from linattn.convert.running import Batch, Outputs, run, to_device
from linattn.convert.samples import Samples
from linattn.convert.training import Training
from linattn.feature_maps import FeatureMap


def distil(
    student: nn.Module,
    maps: Sequence[FeatureMap],
    teacher: nn.Module,
    samples: Samples,
    *,
    seconds: float,
    learning_rate: float,
    map_learning_rate: float,
) -> Training:
    """The training of all weights, those of the maps included, against the original model's states and predictions.

    The maps' weights have a learning rate of their own; both rates are the largest of their schedule.

    Source: Jiao et al. 2020 (arXiv 1909.10351).
    """
    kept: list[Outputs] = []

    def imitate(batch: Batch, exact: Outputs | None = None) -> Tensor:
        """The loss on a batch."""
        batch = to_device(batch, next(student.parameters()).device)
        theirs = exact or teacher_outputs(teacher, batch)
        ours = run(student, batch)
        return distillation(
            ours.states, theirs.states, theirs.live, student_logits=ours.logits, teacher_logits=theirs.logits
        )

    def validate() -> float:
        """The loss on the validation texts; the teacher's outputs are computed once."""
        if not kept:
            kept.extend(
                teacher_outputs(teacher, to_device(batch, next(teacher.parameters()).device))
                for batch in samples.validation
            )
        with torch.no_grad():
            pairs = zip(samples.validation, kept, strict=True)
            return sum(float(imitate(batch, exact)) for batch, exact in pairs) / len(kept)

    of_maps = [parameter for feature_map in maps for parameter in feature_map.parameters()]
    known = set(map(id, of_maps))
    others = [parameter for parameter in student.parameters() if id(parameter) not in known]
    groups = [(others, learning_rate), (of_maps, map_learning_rate)]
    return Training(
        name="distillation",
        model=student,
        parameters=[(parameters, rate) for parameters, rate in groups if parameters],
        loss=lambda step: imitate(samples.training(step)),
        validate=validate,
        seconds=seconds,
    )


def teacher_outputs(teacher: nn.Module, batch: Batch) -> Outputs:
    """The original model's outputs on a batch, without gradients."""
    with torch.no_grad():
        return run(teacher, batch)
