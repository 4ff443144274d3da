"""Jobs of ranks: linearized transformers models on parts of texts, held against whole ones."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from linattn.hf import PreTrainedModel, StateCache, context_parallel, linearize_
from split_calls import difference, own_part, summed

LENGTH = 20
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 1}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "bert": ("BertForMaskedLM", SIZES),
    "roberta": ("RobertaForMaskedLM", SIZES),
    "opt": (
        "OPTForCausalLM",
        {**SIZES, "word_embed_proj_dim": 16, "ffn_dim": 24, "max_position_embeddings": 64, "init_std": 0.5},
    ),
    "mistral": ("MistralForCausalLM", {**SIZES, "num_key_value_heads": 1, "sliding_window": 8}),
}


def model(family: str, method: str | None = "FavorPlus(num_features=8) + window 4") -> PreTrainedModel:
    """A tiny one in float64, in evaluation mode, linearized by a method."""
    torch.manual_seed(0)
    name, sizes = FAMILIES[family]
    kind = getattr(transformers, name)
    built: PreTrainedModel = kind(kind.config_class(**sizes)).double().eval()
    if method is not None:
        linearize_(built, method=method)
    return built


def whole_text(family: str) -> dict[str, torch.Tensor]:
    """Two texts, of which an encoder's second is padded."""
    tokens = torch.randint(3, 32, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    found = {"input_ids": tokens}
    if family == "bert":
        found["attention_mask"] = (torch.arange(LENGTH + 1) < torch.tensor([[LENGTH + 1], [7]])).long()
    return found


def losses(run: Any, inputs: dict[str, torch.Tensor], part: slice, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of some tokens, and the mean loss of those after them."""
    own = {name: x[:, part] for name, x in inputs.items()}
    logits = run(**own, **options).logits
    targets = inputs["input_ids"][:, part.start + 1 : part.stop + 1]
    return logits, cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (2 * LENGTH)


def transformer_errors(
    mesh: DeviceMesh, family: str, method: str, lengths: tuple[int, ...], **how: bool
) -> dict[str, float]:
    """How far this rank's logits, and the gradients of all ranks, are from the whole text's."""
    built, inputs, part = model(family, method), whole_text(family), own_part(mesh, lengths)
    options = {} if family == "bert" else {"use_cache": False}
    logits, loss = losses(built, inputs, slice(0, LENGTH), **options)
    loss.backward()
    split = model(family, method)
    with context_parallel(split, mesh, **how):
        own, share = losses(split, inputs, part, **options)
        share.backward()
    errors = {"logits": difference(own, logits[:, part])}
    pairs = zip(built.named_parameters(), split.parameters(), strict=True)
    grads = {name: (x.grad, y.grad) for (name, x), y in pairs if x.grad is not None and y.grad is not None}
    of_all = summed([ours for _, ours in grads.values()], mesh)
    for (name, (theirs, _)), ours in zip(grads.items(), of_all, strict=True):
        errors[name] = difference(ours, theirs)
    # As before the block: on the whole text.
    errors["afterwards"] = difference(losses(split, inputs, slice(0, LENGTH), **options)[0], logits)
    return errors


def accelerated_errors(mesh: DeviceMesh, family: str) -> dict[str, float]:
    """How far the gradients are that Accelerate leaves on every rank of a group of all."""
    built, inputs = model(family), whole_text(family)
    losses(built, inputs, slice(0, LENGTH), use_cache=False)[1].backward()
    size, rank = mesh.size(), mesh.get_local_rank()
    part = own_part(mesh, (LENGTH // size,) * size)
    launched = {"WORLD_SIZE": str(size), "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    with mock.patch.dict(os.environ, launched):
        _forget_accelerators()
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == size
        split = model(family)
        prepared = accelerator.prepare(split)
        assert prepared is not split
        with context_parallel(split, mesh, equal_lengths=True):
            _, share = losses(prepared, inputs, part, use_cache=False)
            # Accelerate averages, and this is the mean of a part.
            accelerator.backward(size * share)
        _forget_accelerators()
    pairs = zip(built.named_parameters(), split.parameters(), strict=True)
    return {name: difference(ours.grad, theirs.grad) for (name, theirs), ours in pairs if theirs.grad is not None}


def _forget_accelerators() -> None:
    """Those that earlier jobs of this process made, of this process alone, would be all that later ones know."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


def refused(mesh: DeviceMesh, fault: str) -> str:
    """What is said of a model, or of a call, that cannot be split."""
    families = {"positions": "roberta", "merged": "roberta", "window": "mistral", "shown tokens": "opt"}
    family = families.get(fault, "llama")
    methods = {"window": None, "merged": "merged 4 + window 2", "softmax": None}
    method = methods.get(fault, "FavorPlus(num_features=8)")
    options: dict[str, Any] = {"use_cache": fault == "cache"}
    if fault == "labels":
        options["labels"] = torch.ones(2, 4, dtype=torch.long)
    if family == "roberta":
        options = {}
    if fault == "shown tokens":
        options["attention_mask"] = torch.ones(2, 4, dtype=torch.long)
    try:
        built = model(family, method)
        if fault == "window":
            # The other layer is left its softmax.
            linearize_(built, method="FavorPlus(num_features=8)", layers=[1])
        if fault == "cache":
            options["past_key_values"] = StateCache(built)
        with context_parallel(built, mesh):
            if fault == "block":
                with context_parallel(built, mesh):
                    pass
            built(whole_text(family)["input_ids"][:, :4], **options)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing"


def positions_given(mesh: DeviceMesh) -> float:
    """A model with positions of its own kind, told them."""
    built, inputs = model("roberta", "FavorPlus(num_features=8)"), whole_text("roberta")["input_ids"][:, :LENGTH]
    positions = torch.arange(LENGTH).expand(2, -1) + 2
    truth = built(inputs).logits
    part = own_part(mesh, (12, 8))
    with context_parallel(built, mesh):
        found = built(inputs[:, part], position_ids=positions[:, part]).logits
    return difference(found, truth[:, part])
