"""Parts of a model that read pictures or sounds, by masks of their own, attend as before beside what replaces a text's
attention."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from architectures import DECODER, VOCABULARY
from linattn import MergedKV
from linattn.hf import BoundedCache, linearize_, restore_


def hearing() -> PreTrainedModel:
    """A tiny Gemma 4 that takes sounds."""
    torch.manual_seed(0)
    text = {
        **DECODER,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "sliding_window": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    sound = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "subsampling_conv_channels": (128, 4),
        "output_proj_dims": 32,
        "conv_kernel_size": 3,
    }
    numbers = {"image_token_id": 90, "audio_token_id": 91, "video_token_id": 92}
    config = Gemma4Config(text_config=text, audio_config=sound, vision_config=None, **numbers)
    return Gemma4ForConditionalGeneration(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("change", [BoundedCache, lambda model: linearize_(model, method="FavorPlus(num_features=8)")])
@pytest.mark.parametrize("is_named", [False, True])
def test_a_tower_keeps_its_attention(change: Callable[[PreTrainedModel], object], is_named: bool) -> None:
    """It looks into its mask; the text's attention is what is replaced."""
    model = hearing()
    sounds, mask = torch.randn(1, 64, 128), torch.ones(1, 64, dtype=torch.bool)

    def heard() -> Tensor:
        made: Tensor = model.model.get_audio_features(sounds, mask).pooler_output
        return made

    wanted = heard()
    parts = (model, model.model, model.model.language_model, model.model.audio_tower)
    names = [part.config._attn_implementation for part in parts]
    if is_named:
        model.set_attn_implementation("linattn")
    change(model)
    assert torch.equal(heard(), wanted)
    assert [part.config._attn_implementation for part in parts] == [*["linattn"] * 3, names[3]]
    if change is not BoundedCache:
        written = [json.loads(part.config.to_json_string(use_diff=False)) for part in parts]
        assert ["attn_implementation" in each for each in written] == [True, True, True, False]
        restore_(model)
        assert [part.config._attn_implementation for part in parts] == names


@torch.no_grad()
def test_a_tower_that_is_linearized_stays_so() -> None:
    """Beside a bounded cache of the text."""
    sight = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sight, "image_size": 8, "patch_size": 4}
    torch.manual_seed(0)
    config = LlavaConfig(text_config=LlamaConfig(**DECODER), vision_config=CLIPVisionConfig(**vision))
    model = LlavaForConditionalGeneration(config).eval()
    tower, picture = model.model.vision_tower, torch.randn(1, 3, 8, 8)
    linearize_(tower, method=MergedKV(None, 8, None, 0))
    wanted = tower(picture).last_hidden_state
    BoundedCache(model, 64)
    assert torch.equal(tower(picture).last_hidden_state, wanted)
