"""End-to-end distillation: the whole linear model is distilled against the original's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from linattn.convert.losses import Mean, distillation
from linattn.convert.running import Batch, Outputs, run
from linattn.convert.samples import Samples
from linattn.convert.sharing import mean_of, own_texts
from linattn.feature_maps import FeatureMap
from linattn.processes import Processes
from linattn.training import Seconds, Training


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

    The maps' weights have a learning rate of their own; both rates are the largest of their schedule. The mean of the
    losses of several processes is that of all texts of the step in one.

    Source: Jiao et al. 2020 (arXiv 1909.10351).
    """

    processes = Processes.of_this_run()

    def imitate(batch: Batch, theirs: Outputs, mean: Mean) -> Tensor:
        """The loss on a batch."""
        ours = run(student, batch)
        logits = {"student_logits": ours.logits, "teacher_logits": theirs.logits}
        return distillation(ours.states, theirs.states, theirs.live, mean=mean, **logits)

    @cache
    def exact(number: int) -> Outputs:
        """The teacher's outputs on a validation text, which are computed once."""
        return teacher_outputs(teacher, samples.validation[number])

    def judged(number: int) -> float:
        """The loss on a validation text, all of which is here."""
        with torch.no_grad():
            return float(imitate(samples.validation[number], exact(number), lambda x: x))

    def validate() -> float:
        """The loss on the validation texts."""
        losses = processes.each(range(len(samples.validation)), judged)
        return sum(losses) / len(losses)

    def loss(step: int) -> Tensor:
        """The loss of a step, on this process's texts."""
        batch = own_texts(samples.training(step), processes)
        return imitate(batch, teacher_outputs(teacher, batch), lambda x: mean_of(x, processes))

    of_maps = [parameter for feature_map in maps for parameter in feature_map.parameters()]
    known = set(map(id, of_maps))
    others = [parameter for parameter in student.parameters() if id(parameter) not in known]
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
