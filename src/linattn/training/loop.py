"""The training loop: a loss, a budget of time, the best weights so far, checkpoints, curves."""

import math
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.tensorboard.writer import SummaryWriter

from linattn.processes import Processes, interrupts
from linattn.training.budgets import Budget, Progress
from linattn.training.checkpoints import WorkFolder
from linattn.training.tensors import held, put, read, write

# Between two checkpoints, at most.
_SECONDS = 60.0
_WARM_UP = 20
_LEAST_RATE = 0.02
_BETAS = (0.9, 0.98)
_CLIP = 1.0


@dataclass(frozen=True, eq=False)
class Training:
    """A model to train, with its parameters, losses and budget.

    Attributes:
        name: what it is called, as "distillation".
        model: the module that checkpoints hold whole.
        parameters: groups of parameters with the largest learning rate of each.
        loss: of a step.
        validate: the loss that chooses the best weights.
        budget: how long it goes on, `Seconds` or `Steps`.
    """

    name: str
    model: nn.Module
    parameters: Sequence[tuple[Sequence[nn.Parameter], float]]
    loss: Callable[[int], Tensor]
    validate: Callable[[], float]
    budget: Budget


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


Notify = Callable[[str, float, Progress], None]
"""Called after each step with the training's name, the share of its budget that is spent, and how far it has come."""


@torch.enable_grad()
def train(training: Training, work: WorkFolder | None, notify: Notify) -> Trained:
    """Train until the budget is spent, and leave the model with its best weights.

    AdamW without weight decay, gradients clipped to norm 1. The learning rate rises over twenty steps and falls by a
    cosine over the budget; where the loss ε² before training is below 1 it is multiplied by ε: AdamW's steps have a
    length of their own, and a model that is nearly right has less far to go. The least validation loss chooses the
    weights, those before the first step included.

    In several processes (`launched`) each has its own loss, whose mean over all is the training's: gradients are
    averaged, and the first process writes `work`, which the others give as None, reads the clock, and ends the training
    for all. The model's tensors are whole on every process, or sharded over all of them by torch's `fully_shard`; then
    all read checkpoints, in a folder that all see. Any number of processes goes on from a checkpoint, whole or sharded.

    Ctrl-C ends the training after the current step and a look, as if its time were over; so does a KeyboardInterrupt
    from `notify`. Raises RuntimeError if the validation loss before training, or a gradient, is not finite; ValueError
    if a checkpoint holds other tensors than model and optimiser have, or a launcher started processes without a group.

    Source: Loshchilov and Hutter 2019 (arXiv 1711.05101) for AdamW.
    """
    with interrupts(are_raised=False) as pressed, ExitStack() as ending:
        ending.callback(training.model.zero_grad)
        run = _Run(training, work, notify, ending)
        try:
            run.go(pressed)
        except KeyboardInterrupt:
            # Raised in a step.
            pressed.append(signal.SIGINT)
        training.model.load_state_dict(run.best)
    progress, stopped = run.progress, bool(pressed)
    return Trained(training.name, progress.step, progress.seconds, progress.first, progress.best, stopped)


class _Run:
    """A training under way, from its last checkpoint or from its beginning."""

    def __init__(self, training: Training, work: WorkFolder | None, notify: Notify, ending: ExitStack) -> None:
        self._training, self._work, self._notify = training, work, notify
        self._processes = Processes.of_this_run()
        if (started := int(os.environ.get("WORLD_SIZE", "1"))) not in (1, self._processes.size):
            raise ValueError(
                f"a launcher started {started} processes, and no group of them was made; start without a launcher, or "
                "make one with linattn.training.launched"
            )
        # The model is not wrapped: the loss calls it itself, and gradients are averaged here.
        groups = [{"params": list(parameters), "lr": rate} for parameters, rate in training.parameters]
        self._optimizer = torch.optim.AdamW(groups, betas=_BETAS, weight_decay=0.0)
        self._is_sharded = any(isinstance(weight, DTensor) for weight in training.model.parameters())
        start = self._resumed()
        self._seed = self._processes.from_first(torch.initial_seed())  # A checkpoint holds the first process's.
        self._curves: SummaryWriter | None = None
        if work is not None:
            work.wait_for_later_logs(training.name)
            # Curves of steps that are lost are taken back.
            lost = None if start is None else start[0].step + 1
            self._curves = SummaryWriter(str(work.logs / training.name), purge_step=lost)
            ending.callback(self._curves.close)
        if start is None:
            loss = self._processes.from_first(training.validate())
            if not math.isfinite(loss):
                raise RuntimeError(f"{training.name}: the loss is {loss} before the first step; take another map")
            start = Progress(0, 0.0, loss, loss, loss), _tensors(training.model)
            self._plot({"validation loss": loss}, 0)
        self.progress, self.best = start
        # A divergence of next to nothing may be rounded below 0.
        lowered = min(1.0, math.sqrt(max(self.progress.first, 0.0)))
        self._rates = [rate * lowered for _, rate in training.parameters]

    def _resumed(self) -> tuple[Progress, dict[str, Tensor]] | None:
        """The last checkpoint, in model and optimiser of all processes; None without one."""
        model, optimizer, processes = self._training.model, self._optimizer, self._processes
        work, name = self._work, self._training.name
        last = processes.first_does(lambda: None if work is None else work.last(name))
        if last is None:
            if not self._is_sharded and processes.size > 1:
                # All begin with what the first process has.
                weights, drawn = processes.first_does(lambda: (model.state_dict(), torch.get_rng_state()))
                model.load_state_dict(weights)
                torch.set_rng_state(drawn)
            return None
        folder, progress = last
        # Whole tensors are read by the first process, which may have the only disk.
        does = processes.all_do if self._is_sharded else processes.first_does
        tensors = does(lambda: read(folder, model, optimizer))
        return progress, put(tensors, model, optimizer, processes)

    def go(self, pressed: list[int]) -> None:
        """Steps and looks until the budget is spent, or something is pressed."""
        budget = self._training.budget
        looked = saved = reached = self.progress
        took = 0.0
        # Whether anything is pressed is the first process's to say.
        while not self._processes.from_first(len(pressed)) and budget.share(reached) < 1:
            self._timed(self._step)
            is_look_due = budget.is_look_due(self.progress, looked, took=took)
            if is_look_due:
                stepped = self.progress.seconds
                self._timed(self._look)
                took = self.progress.seconds - stepped
                # What a resumed training begins with, so that it goes on as this one does.
                looked = self.progress
            # What a checkpoint says, so that a resumed training ends where this one does.
            reached = self.progress
            if is_look_due or self.progress.seconds - saved.seconds >= _SECONDS:
                self._timed(self._save)
                saved = self.progress
            try:
                self._notify(self._training.name, min(budget.share(self.progress), 1.0), self.progress)
            except KeyboardInterrupt:
                # All processes end after the same step.
                pressed.append(signal.SIGINT)
        if self.progress.step > looked.step:  # something was pressed between two looks
            self._timed(self._look)

    def _timed(self, do: Callable[[], None]) -> None:
        """Do something, and count its time, as the first process has it: what follows depends on it."""
        start = time.perf_counter()
        do()
        seconds = self._processes.from_first(self.progress.seconds + time.perf_counter() - start)
        self.progress = replace(self.progress, seconds=seconds)

    def _step(self) -> None:
        """One step of the optimiser."""
        step = self.progress.step
        factor = learning_rate_factor(step, self._training.budget.share(self.progress))
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        if self._processes.rank:  # Masks of dropout are each process's own, and the same again in a training resumed.
            torch.manual_seed(random.Random(f"{self._seed} {self._processes.rank} {step}").getrandbits(63))
        loss = self._training.loss(step)
        self._optimizer.zero_grad()
        loss.backward()
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        mean = loss.detach().clone()
        # Sharded gradients are averaged already; what one process has no gradient of, as of an expert, another may.
        whole = [one for one in parameters if one.requires_grad and not isinstance(one, DTensor)]
        reached = mean.new_tensor([one.grad is not None for one in whole])
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in whole]
        self._processes.average_([mean, reached, *grads])
        for one, grad, share in zip(whole, grads, reached.tolist(), strict=True):
            one.grad = grad if share else None
        value = float(mean)
        norm = nn.utils.clip_grad_norm_(parameters, _CLIP)
        if not (norm.full_tensor() if isinstance(norm, DTensor) else norm).isfinite():
            raise RuntimeError(
                f"{self._training.name}: the gradient is not finite at step {step} (loss {value}); lower the "
                "learning rate, or take another map"
            )
        self._optimizer.step()
        self.progress = replace(self.progress, step=step + 1, training_loss=value)
        self._plot({"loss": value, "learning rate": self._rates[0] * factor}, step + 1)

    def _look(self) -> None:
        """The validation loss; the best weights are kept."""
        loss = self._processes.from_first(self._training.validate())
        if loss < self.progress.best:
            self.best = _tensors(self._training.model)
        self.progress = replace(self.progress, loss=loss, best=min(self.progress.best, loss))
        self._plot({"validation loss": loss, "best validation loss": self.progress.best}, self.progress.step)

    def _plot(self, values: Mapping[str, float], step: int) -> None:
        """Points of the curves, where there is a folder."""
        if self._curves is not None:
            for name, value in values.items():
                self._curves.add_scalar(name, value, step)
            self._curves.flush()

    def _save(self) -> None:
        """A checkpoint, where there is a folder; sharded tensors are gathered for it."""
        work, name, processes = self._work, self._training.name, self._processes
        with ExitStack() as opened:
            folder = processes.first_does(
                lambda: None if work is None else opened.enter_context(work.draft(name, self.progress))
            )
            if folder is not None:
                write(folder, held(self._training.model, self._optimizer, self.best), processes)
                # It counts when it is whole, for which all wait.
                processes.first_does(opened.close)


def learning_rate_factor(step: int, share: float) -> float:
    """The share of the largest learning rate at a step, with a share of the budget spent: a rise, then a cosine."""
    # Loshchilov and Hutter 2017 (arXiv 1608.03983), and never 0.
    fall = _LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
    return min(1.0, (step + 1) / _WARM_UP) * fall


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of everything in a model's `state_dict`, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
