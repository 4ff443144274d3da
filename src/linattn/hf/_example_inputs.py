"""A few tokens, a picture or a sound for any transformers model, made from its configuration and its call's arguments.

Letters: B batch, L tokens, C channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Inputs = dict[str, Any]

# Tokens of a text and of a decoder's side: other numbers, so that cross attention shows by the number of its keys.
_TOKENS, _TARGETS = 6, 4
# Arguments that say which tokens are of a picture, on which the masks of some decoders depend.
_KINDS = ("token_type_ids", "mm_token_type_ids")


def example_inputs(model: PreTrainedModel) -> Iterator[Inputs]:
    """Inputs of two rows that a model may run on, likeliest first."""
    arguments, main = inspect.signature(model.forward).parameters, model.main_input_name
    targets = {"decoder_input_ids": _tokens(model, _TARGETS)} if "decoder_input_ids" in arguments else {}
    pictures = [{"pixel_values": x} for x in _pictures(model)] if "pixel_values" in arguments else []
    sounds = [{name: x} for name in ("input_features", "input_values") if name in arguments for x in _sounds(model)]
    texts = []
    if "input_ids" in arguments:
        texts = list(_texts(model, [name for name in _KINDS if name in arguments]))
    if main in ("input_features", "input_values"):
        leading, rest = sounds, texts
    elif main == "pixel_values":
        leading, rest = pictures, texts
    else:
        leading, rest = texts, [*pictures, *sounds]
    yield from ({**inputs, **targets} for inputs in leading)
    yield from ({**one, **other} for one in leading for other in rest)
    # A model's own word, for families with arguments of their own.
    dummies = model.dummy_inputs or {}
    yield {name: x.to(model.device) for name, x in dummies.items() if isinstance(x, Tensor) and name in arguments}


def padded(model: PreTrainedModel, inputs: Inputs) -> Inputs | None:
    """The inputs, the second row's first place being padding; None where a model or the inputs know no padding."""
    arguments = inspect.signature(model.forward).parameters
    masks = {}
    for name, mask_name in {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}.items():
        tokens = inputs.get(name)
        if mask_name in arguments and mask_name not in inputs and isinstance(tokens, Tensor) and tokens.ndim == 2:
            mask = torch.ones_like(tokens)
            mask[-1, 0] = 0
            masks[mask_name] = mask
    return {**inputs, **masks} if masks else None


def on_device(inputs: Mapping[str, Any], device: torch.device) -> Inputs:
    """Inputs where a model is."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


def _texts(model: PreTrainedModel, kinds: list[str]) -> Iterator[Inputs]:
    """Texts; where a model reads pictures too, first some of whose tokens are said to be of one."""
    tokens = {"input_ids": _tokens(model, _TOKENS)}
    if kinds and getattr(model.config, "vision_config", None) is not None:
        places = (torch.arange(_TOKENS, device=model.device) % 3 == 1).long().expand(2, -1)
        yield {**tokens, **dict.fromkeys(kinds, places)}
    yield tokens


def _tokens(model: PreTrainedModel, length: int) -> Tensor:
    """Token numbers (2, L), none of which the configuration names as special."""
    try:
        config = model.config.get_text_config()
    # Of texts of two kinds those of the encoder.
    except ValueError:
        config = model.config.get_text_config(encoder=True)
    named = [value for part in (model.config, config) for name, value in vars(part).items() if "token" in name]
    special = {number for value in named for number in (value if isinstance(value, list | tuple) else [value])}
    size = getattr(config, "vocab_size", None)
    size = size if isinstance(size, int) else 2
    ordinary = [number for number in range(size if size < 100 else 100) if number not in special] or [0]
    numbers = [ordinary[place % len(ordinary)] for place in range(2 * length)]
    return torch.tensor(numbers, device=model.device).view(2, length)


def _pictures(model: PreTrainedModel) -> Iterator[Tensor]:
    """Two pictures of the size that the configuration names, or as many videos."""
    size = _setting(model, "image_size") or 224
    size = (size, size) if isinstance(size, int) else tuple(size)
    frames, channels = _setting(model, "num_frames"), _setting(model, "num_channels") or 3
    if len(size) != 2:
        return
    options: Any = {"dtype": model.dtype, "device": model.device}
    if isinstance(frames, int):
        yield torch.zeros(2, frames, channels, *size, **options)
    yield torch.zeros(2, channels, *size, **options)


def _sounds(model: PreTrainedModel) -> Iterator[Tensor]:
    """Two sounds: spectra of the sizes that the configuration names, and waves."""
    names = "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim"
    bins = next((size for size in (_setting(model, name) for name in names) if isinstance(size, int)), 80)
    options: Any = {"dtype": model.dtype, "device": model.device}
    positions, frames = _setting(model, "max_source_positions"), _setting(model, "max_length")
    if isinstance(positions, int):
        yield torch.zeros(2, bins, 2 * positions, **options)
    if _setting(model, "frequency_stride") and isinstance(frames, int):
        yield torch.zeros(2, frames, bins, **options)
    # A quarter of a second at 16 kHz: convolutions need some samples for each of their places.
    yield torch.zeros(2, 4000, **options)
    yield torch.zeros(2, 64, bins, **options)


def _setting(model: PreTrainedModel, name: str) -> Any:
    """A setting of the configuration, or of that of the part of the model that reads pictures or sounds."""
    config = model.config
    parts = [config, *(getattr(config, part, None) for part in config.sub_configs)]
    return next((value for value in (getattr(part, name, None) for part in parts) if value is not None), None)
