"""Linearized models given a part of each sequence, the rest being on other ranks; letters as in hf/__init__.py."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from linattn.hf._attention_modules import attention_modules, parts_of
from linattn.hf.calibrating import evaluating
from linattn.hf.layer_attention import LayerAttention, attention_of
from linattn.parallel.context_parallel import SequenceParts
from linattn.parallel.ranks import Fields, Ranks, agreed, exchange_fields

_POSITIONS = "position_ids"


@contextmanager
def context_parallel(model: PreTrainedModel, mesh: DeviceMesh, *, equal_lengths: bool = False) -> Iterator[None]:
    """Inside the block a linearized model takes this rank's part (B, L) of each sequence, and gives its part's outputs.

    Parts are consecutive, in the order of the ranks. The layers exchange states (`linattn.parallel.linear_attention`),
    of a size that is constant in the length; everything else of a transformer is done token by token. Positions go on
    from rank to rank, where the call names none. Outputs and gradients are those of the whole sequence; parameters stay
    whole on every rank, and their gradients are this rank's share, averaged or summed as under data parallelism: a
    model that Accelerate or DistributedDataParallel has wrapped is called as ever. Every rank makes the same calls.

    Cost: one all-gather per layer forward, after one of 24 bytes, one reduce-scatter backward; one of 24 bytes per call
    without `equal_lengths`.

    Args:
        model: as `linearize_` left it; not the wrapper, but what was wrapped.
        mesh: one dimension, whose ranks hold the parts.
        equal_lengths: whether all parts have the same number of tokens, so that none needs to be asked for.

    Raises:
        TypeError: `mesh` is no mesh; the model takes no position_ids.
        ValueError: a layer keeps softmax, or has merged keys; the ranks' maps or calls differ. In the block: a call
            with a cache, or with labels, which the model would shift within its part; a call without position_ids of a
            model that does not number its tokens 0, 1, 2, …

    Example:
        >>> import torch, torch.distributed as dist
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from linattn.hf import linearize_
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
        >>> model = LlamaModel(LlamaConfig(**sizes)).eval()
        >>> _ = linearize_(model, method="Taylor")
        >>> text = torch.tensor([[1, 2, 3]])
        >>> whole = model(text, use_cache=False)[0]
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more
        >>> with context_parallel(model, dist.device_mesh.init_device_mesh("cpu", (1,))):
        ...     bool(torch.allclose(model(text, use_cache=False)[0], whole, atol=1e-6))
        True
        >>> dist.destroy_process_group()

    Source: Sun et al. 2025 (LASP-2, arXiv 2502.07563), section 3.
    """
    ranks = Ranks.of(mesh)
    split: Fields = {"call": "context_parallel", "equal_lengths": str(equal_lengths)}
    (layers, numbered), _ = agreed(ranks, split, lambda: (_splittable(model), _numbered(model)))
    if any(layer.attend_to_parts is not None for layer in layers):
        raise ValueError(f"{type(model).__name__} is given parts of texts already; leave that block first")
    maps = [layer.feature_map for layer in layers if layer.feature_map is not None]
    exchange_fields(ranks, {f"feature map {number}": each.fingerprint() for number, each in enumerate(maps)})
    parts = SequenceParts(mesh, ranks, equal_lengths)
    with ExitStack() as hooks:
        for part in numbered:
            numbering = partial(_numbered_call, parts, _counts_from_zero(part))
            hooks.enter_context(part.register_forward_pre_hook(numbering, with_kwargs=True))
        for layer in layers:
            layer.attend_to_parts = parts.attend_linearly
        try:
            yield
        finally:
            for layer in layers:
                layer.attend_to_parts = None


def _numbered_call(
    parts: SequenceParts, counts: tuple[bool, bool], part: Any, args: Any, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of a model, which may count as `_counts_from_zero`: positions go on from the rank before."""
    arguments = inspect.signature(part.forward).bind_partial(*args, **options).arguments
    if arguments.get("labels") is not None:
        raise ValueError(
            f"{type(part).__name__} shifts labels within its part of a text, whose last token has its label on the "
            "next rank; shift them before the text is split, and take the loss of the logits"
        )
    if arguments.get(_POSITIONS) is not None:
        return args, options
    if not counts[arguments.get("attention_mask") is not None]:
        raise ValueError(
            f"{type(part).__name__} numbers its tokens otherwise than 0, 1, 2, …, so that a part's positions are "
            f"not known; pass {_POSITIONS} of the whole text, split as its tokens are"
        )
    tokens = arguments.get("input_ids")
    tokens = arguments["inputs_embeds"][..., 0] if tokens is None else tokens
    first = parts.num_before(tokens.unsqueeze(-1), None)
    return args, {**options, _POSITIONS: first.unsqueeze(-1) + torch.arange(tokens.shape[1], device=tokens.device)}


def _splittable(model: PreTrainedModel) -> list[LayerAttention]:
    """The model's linear attentions; layers whose sequences cannot be split are refused."""
    by_name = {part.name: attention_of(part.module) for part in attention_modules(model)}
    attentions = [attention for attention in by_name.values() if attention is not None]
    for attention in attentions:
        if attention.merged is not None:
            raise ValueError(
                f"{attention.module_name} attends by {attention.summary}: which keys are merged is decided over all of "
                "a sequence, and a rank has some of it; linearize_ the layers by maps"
            )
    names = [name for name, attention in by_name.items() if attention is None]
    if names or not attentions:
        raise ValueError(
            f"{', '.join(names) or type(model).__name__} attends by softmax, whose keys would have to be sent to all "
            "ranks; linearize_ all layers by maps"
        )
    return attentions


def _numbered(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The models within a model that take positions; one that takes none is refused."""
    parts = [part for part in parts_of(model) if _POSITIONS in inspect.signature(part.forward).parameters]
    if model not in parts:
        raise TypeError(
            f"{type(model).__name__} takes no {_POSITIONS}, so that a part of a text cannot be told where it begins; "
            "for a LinearLM there is linattn.parallel.ContextParallel"
        )
    return parts


def _counts_from_zero(part: PreTrainedModel) -> tuple[bool, bool]:
    """Whether tokens have positions 0, 1, 2, … where none are given, without a mask and with one, tried on three."""
    token = 1 if getattr(part.config, "pad_token_id", None) == 0 else 0
    tokens = torch.full((1, 3), token, device=part.device)
    options = {"use_cache": False} if "use_cache" in inspect.signature(part.forward).parameters else {}
    run = partial(part, tokens, **options)
    counted = {_POSITIONS: torch.arange(3, device=part.device).unsqueeze(0)}
    padding = {"attention_mask": (counted[_POSITIONS] > 0).long()}
    with torch.no_grad(), evaluating(part):
        is_plain = torch.equal(run()[0], run(**counted)[0])
        if "attention_mask" not in inspect.signature(part.forward).parameters:
            return is_plain, is_plain
        outputs = (run(**padding, **numbers)[0][:, 1:] for numbers in ({}, counted))  # OPT counts what is shown
        return is_plain, is_plain and torch.equal(*outputs)
