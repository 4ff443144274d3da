"""Low-rank adapters: a model whose weights and their moments do not fit beside each other is trained by a few more."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from linattn.hf import PreTrainedModel
from linattn.hf.layer_attention import ATTRIBUTE

RATE = 10.0
"""Times the learning rate of whole weights; Schulman et al. 2025, "LoRA Without Regret", measured the factor."""

_NAME = "conversion"
# Adapters count twice, as in their authors' code.
_ALPHA = 2


@contextmanager
def adapted(model: PreTrainedModel, attentions: Sequence[str], rank: int, seed: int) -> Iterator[list[nn.Parameter]]:
    """Train a model's projections by low-rank adapters, while the block runs; then they are part of the weights.

        W + 2·B·A,   A (r, in) drawn from the seed, B (out, r) zero at first

    They are those from the first converted attention on, of attention and of all else but what makes logits. All other
    weights take no gradients meanwhile, but for those of the attention kernels.

    Source: Hu et al. 2022 (arXiv 2106.09685); Schulman et al. 2025, "LoRA Without Regret", for all projections.
    """
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
        tuner = LoraModel(model, {_NAME: config}, _NAME)
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
        weight = None if isinstance(module, nn.Embedding) else getattr(module, "weight", None)
        if not is_converted or weight is None or weight.ndim != 2:
            continue
        if id(weight) not in others and ATTRIBUTE not in name.split("."):
            names.append(name)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no projections to adapt from {', '.join(attentions)} on; leave adapter_rank "
            "out, and all weights are trained"
        )
    return names
