"""The training loop: a loss, a budget of time, the best weights so far, checkpoints, curves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from linattn.convert.checkpoints import Progress, WorkFolder

# How often a training looks at its validation loss and writes a checkpoint: by share of its budget, or by seconds.
_LOOKS, _SECONDS = 20, 60.0
_WARM_UP = 10
_LEAST_RATE = 0.02
_BETAS = (0.9, 0.98)
_CLIP = 1.0


@dataclass(frozen=True, eq=False)
class Training:
    """What is to be trained.

    Attributes:
        name: "transfer" or "distillation".
        model: the module that checkpoints hold whole.
        parameters: groups of parameters with the largest learning rate of each.
        loss: of a step.
        validate: the loss that chooses the best weights.
        seconds: the budget.
    """

    name: str
    model: nn.Module
    parameters: Sequence[tuple[Sequence[nn.Parameter], float]]
    loss: Callable[[int], Tensor]
    validate: Callable[[], float]
    seconds: float


@dataclass(frozen=True)
class Trained:
    """How a training went.

    Attributes:
        name: the training's.
        steps: done.
        seconds: spent.
        first_loss: validation loss before it.
        best_loss: validation loss of the weights that are kept.
        stopped: whether an interrupt ended it.
    """

    name: str
    steps: int
    seconds: float
    first_loss: float
    best_loss: float
    stopped: bool


Notify = Callable[[str, float, float], None]
"""Told of the training's name, the share of its budget that is spent, and the best validation loss so far."""


def train(training: Training, work: WorkFolder | None, notify: Notify) -> Trained:
    """Train for a time, and leave the model with its best weights.

    AdamW without weight decay, gradients clipped to norm 1; the learning rate rises over ten steps and falls by a
    cosine over the budget. The least validation loss chooses the weights, those before the first step included.

    Cost: the budget.

    Args:
        training: what is trained.
        work: where checkpoints and curves go; None for nowhere.
        notify: told after every step.

    Returns:
        `Trained`. An interrupt (KeyboardInterrupt) ends the training as if its time were over.

    Raises:
        RuntimeError: if the loss is not finite.

    Example:
        See `linattn.convert.convert_`.

    Source: Loshchilov and Hutter 2019 (arXiv 1711.05101) for AdamW; Accelerate's documentation.
    """
    accelerator = _accelerator(training, work)
    groups = [{"params": list(parameters), "lr": rate} for parameters, rate in training.parameters]
    rates = [rate for _, rate in training.parameters]
    model, optimizer = accelerator.prepare(training.model, torch.optim.AdamW(groups, betas=_BETAS, weight_decay=0.0))
    found = None if work is None else work.resume(training.name, accelerator)
    if found is None:
        loss = training.validate()
        found = Progress(0, 0.0, loss, loss), _tensors(training.model)
        accelerator.log({"validation loss": loss}, step=0)
    run = _Run(training, accelerator, optimizer, rates, work, notify, *found)
    first = run.progress.loss if run.progress.step == 0 else math.nan
    stopped = False
    try:
        run.go()
    except KeyboardInterrupt:
        stopped = True
    training.model.load_state_dict(run.best)
    accelerator.end_training()
    accelerator.free_memory(model, optimizer)
    progress = run.progress
    return Trained(training.name, progress.step, progress.seconds, first, progress.best, stopped)


class _Run:
    """A training under way."""

    def __init__(
        self,
        training: Training,
        accelerator: Accelerator,
        optimizer: torch.optim.Optimizer,
        rates: Sequence[float],
        work: WorkFolder | None,
        notify: Notify,
        progress: Progress,
        best: Mapping[str, Tensor],
    ) -> None:
        self._training, self._accelerator, self._optimizer, self._rates = training, accelerator, optimizer, rates
        self._work, self._notify = work, notify
        self.progress, self.best = progress, dict(best)

    def go(self) -> None:
        """Steps and looks until the time is over."""
        budget, looked = self._training.seconds, self.progress.seconds
        while self.progress.seconds < budget:
            start = time.perf_counter()
            self._step()
            self._spend(start)
            if self.progress.seconds - looked >= min(budget / _LOOKS, _SECONDS) or self.progress.seconds >= budget:
                looked, start = self.progress.seconds, time.perf_counter()
                self._look()
                self._spend(start)
            self._notify(self._training.name, min(self.progress.seconds / budget, 1.0), self.progress.best)

    def _spend(self, start: float) -> None:
        """Count the time since."""
        self.progress = replace(self.progress, seconds=self.progress.seconds + time.perf_counter() - start)

    def _step(self) -> None:
        """One step of the optimiser."""
        step, share = self.progress.step, self.progress.seconds / self._training.seconds
        factor = learning_rate_factor(step, share)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        loss = self._training.loss(step)
        self._optimizer.zero_grad()
        self._accelerator.backward(loss)
        value = float(loss.detach())
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        norm = float(self._accelerator.clip_grad_norm_(parameters, _CLIP) or 0.0)
        if not math.isfinite(norm):
            raise RuntimeError(
                f"{self._training.name}: the gradient is not finite at step {step} (loss {value}); lower the "
                "learning rate, or take another map"
            )
        self._optimizer.step()
        self.progress = replace(self.progress, step=step + 1)
        self._accelerator.log({"loss": value, "learning rate": self._rates[0] * factor}, step=step + 1)

    def _look(self) -> None:
        """The validation loss; the best weights and a checkpoint are kept."""
        loss = self._training.validate()
        if loss < self.progress.best:
            self.best = _tensors(self._training.model)
        self.progress = replace(self.progress, loss=loss, best=min(loss, self.progress.best))
        self._accelerator.log({"validation loss": loss, "best validation loss": self.progress.best}, self.progress.step)
        if self._work is not None:
            self._work.save(self._training.name, self._accelerator, self.progress, self.best)


def learning_rate_factor(step: int, share: float) -> float:
    """The share of the largest learning rate: a rise over ten steps times a cosine over the budget, never 0.

        min(1, (n + 1)/10) · (0.02 + 0.98·(1 + cos πt)/2)

    Cost: none.

    Args:
        step: n, from 0.
        share: t, the share of the budget that is spent.

    Returns:
        A number in (0, 1].

    Example:
        >>> learning_rate_factor(9, 0.0), round(learning_rate_factor(9, 1.0), 3)
        (1.0, 0.02)

    Source: Loshchilov and Hutter 2017 (arXiv 1608.03983).
    """
    fall = _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
    return min(1.0, (step + 1) / _WARM_UP) * fall


def _accelerator(training: Training, work: WorkFolder | None) -> Accelerator:
    """An accelerator on the model's device, with curves for TensorBoard where there is a folder for them."""
    on_cpu = next(training.model.parameters()).device.type == "cpu"
    if work is None:
        return Accelerator(cpu=on_cpu)
    work.logs.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=on_cpu, log_with="tensorboard", project_dir=str(work.logs))
    accelerator.init_trackers(training.name)
    return accelerator


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of everything in a model's `state_dict`, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
