"""End-to-end distillation: the whole linear model against the original's outputs; letters as in convert/__init__.py.

Where its weights and their moments do not fit beside each other, low-rank adapters are trained in their place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch import Tensor, nn

from linattn.convert.predictions import Mean, Predictions, itself, sampled_divergence, spread_divergence
from linattn.convert.running import Batch, Outputs, mean_loss, own_texts, run
from linattn.convert.samples import Samples
from linattn.feature_maps import FeatureMap
from linattn.hf import PreTrainedModel
from linattn.hf.layer_attention import ATTRIBUTE
from linattn.processes import Processes
from linattn.training import Seconds, Training

ADAPTER_RATE = 10.0
"""Times the learning rate of whole weights; Schulman et al. 2025, "LoRA Without Regret", measured the factor."""

_ADAPTER = "conversion"
# Adapters count twice, as in their authors' code.
_ALPHA = 2

Compare = Callable[[Predictions, Predictions], Tensor]
"""The divergence of predictions from the original's."""


def distil(
    student: nn.Module,
    weights: tuple[Sequence[nn.Parameter], float],  # with the largest learning rate of their schedule
    maps: Sequence[FeatureMap],
    teacher: nn.Module,
    samples: Samples,
    *,
    seconds: float,
    map_learning_rate: float,
) -> Training:
    """The training of weights, and of maps at a rate of their own, against the original's states and predictions."""
    processes = Processes.of_this_run()

    def imitate(batch: Batch, theirs: Outputs, compare: Compare, mean: Mean = itself) -> Tensor:
        ours = run(student, batch)
        divergence = None
        if ours.predictions is not None and theirs.predictions is not None:
            divergence = compare(ours.predictions, theirs.predictions)
        return distillation(ours.states, theirs.states, theirs.live, divergence, mean)

    @cache
    def exact(number: int) -> Outputs:
        return teacher_outputs(teacher, samples.validation[number])

    def loss(step: int) -> Tensor:
        batch = own_texts(samples.training(step), processes)
        compare = partial(sampled_divergence, draw=torch.Generator().manual_seed(step), mean=processes.mean)
        return imitate(batch, teacher_outputs(teacher, batch), compare, processes.mean)

    def judged(number: int) -> Tensor:
        return imitate(samples.validation[number], exact(number), spread_divergence)

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
        validate=lambda: mean_loss(judged, len(samples.validation), processes),
        budget=Seconds(seconds),
    )


def squared_relative_error(student: Tensor, teacher: Tensor, live: Tensor, mean: Mean = itself) -> Tensor:
    """Σ ‖ŷ - y‖² / Σ ‖y‖² of states (B, L, E) over the tokens that `live` (B, L) does not mark as padding."""
    y = teacher[live]
    # By the mean of all processes: the mean of their errors is that of all texts at once.
    return (student[live] - y).square().sum() / mean(y.square().sum())


def distillation(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    live: Tensor,
    divergence: Tensor | None = None,
    mean: Mean = itself,
) -> Tensor:
    """½ ε(last layer) + ½ mean of ε over the layers [+ divergence], ε the squared error of states (B, L, E)."""
    # The layers before the last give every layer a target; the last alone takes several times as many steps.
    # Jiao et al. 2020 (arXiv 1909.10351), sections 3.1 and 3.2, states only.
    pairs = zip(student, teacher, strict=True)
    errors = torch.stack([squared_relative_error(ours, theirs, live, mean) for ours, theirs in pairs])
    loss = (errors[-1] + errors.mean()) / 2
    return loss if divergence is None else loss + divergence


def teacher_outputs(teacher: nn.Module, batch: Batch) -> Outputs:
    """The original model's outputs on a batch, without gradients."""
    with torch.no_grad():
        return run(teacher, batch)


@contextmanager
def adapted(model: PreTrainedModel, attentions: Sequence[str], rank: int, seed: int) -> Iterator[list[nn.Parameter]]:
    """Train a model's projections by low-rank adapters, while the block runs; then they are part of the weights."""
    # W + 2·B·A, A (r, in) drawn from the seed, B (out, r) zero at first: Hu et al. 2022 (arXiv 2106.09685); all
    # projections, as Schulman et al. 2025, "LoRA Without Regret".
    # Only here: of conversions alone those with adapters need it.
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    kernels = {name for name in wanted if ATTRIBUTE in name.split(".")}
    config = LoraConfig(r=rank, lora_alpha=_ALPHA * rank, target_modules=_projections(model, attentions))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        # It finds out by itself that GPT-2's projections are transposed, and says so.
        warnings.filterwarnings("ignore", "fan_in_fan_out")
        tuner = LoraModel(model, {_ADAPTER: config}, _ADAPTER)
    try:
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for name in kernels:
            model.get_parameter(name).requires_grad_(wanted[name])
        yield adapters
    finally:
        tuner.merge_and_unload()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(wanted[name])


def _projections(model: PreTrainedModel, attentions: Sequence[str]) -> list[str]:
    """The names of the model's own products with a matrix, from the first of some attention modules on."""
    # A matrix may be both an embedding and what makes logits.
    head: Callable[[], nn.Module | None] = model.get_output_embeddings
    others = {id(end.weight) for end in (model.get_input_embeddings(), head()) if end is not None}
    names, is_converted = [], False
    for name, module in model.named_modules():
        is_converted = is_converted or name in attentions
        # Adapters take none but these (Conv1D is GPT-2's): not the matrix of a router of experts.
        is_product = is_converted and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        if is_product and id(module.weight) not in others and ATTRIBUTE not in name.split("."):
            names.append(name)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no projections to adapt from {', '.join(attentions)} on; leave adapter_rank "
            "out, and all weights are trained"
        )
    return names
