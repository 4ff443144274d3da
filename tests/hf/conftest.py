"""Tiny models with random weights, built without files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import linattn
from architectures import BOTH_STACKS
from linattn.hf import AttentionCall, linearize_, save_pretrained
from model_inputs import LANGUAGE_HEADS

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BOTH_SIDES = {"vocab_size": 64, **BOTH_STACKS}
SPEECH = {**BOTH_SIDES, "max_source_positions": 8, "num_mel_bins": 4, "suppress_tokens": None}
TRANSLATION = {**BOTH_SIDES, "forced_eos_token_id": None}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SIZES),
    "roberta": ("Roberta", SIZES),
    "bert_decoder": ("Bert", {**SIZES, **TOKENS, "is_decoder": True}),
    "distilbert": ("DistilBert", {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "modernbert": ("ModernBert", {**SIZES, **TOKENS, "cls_token_id": 1, "sep_token_id": 2}),
    "esm": ("Esm", {**SIZES, "pad_token_id": 1, "mask_token_id": 2, "position_embedding_type": "rotary"}),
    "gpt2": ("GPT2", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("GPTNeoX", {**SIZES, **TOKENS}),
    "llama": ("Llama", {**SIZES, **TOKENS, "num_key_value_heads": 2}),
    "mistral": ("Mistral", {**SIZES, **TOKENS, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2", {**SIZES, **TOKENS, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {**SIZES, **TOKENS, "num_key_value_heads": 2, "head_dim": 8}),
    "gemma3": (
        "Gemma3",
        {**SIZES, **TOKENS, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8},
    ),
    "gemma2": ("Gemma2", {**SIZES, **TOKENS, "num_key_value_heads": 2, "head_dim": 8}),
    "gpt_oss": ("GptOss", {**SIZES, **TOKENS, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2}),
    "vit": ("ViT", {**SIZES, "image_size": 16, "patch_size": 8}),
    "whisper": ("Whisper", {**SPEECH, **TOKENS}),
    "bart": ("Bart", {**TRANSLATION, **TOKENS}),
    "t5": ("T5", {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "bloom": ("Bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpnet": ("MPNet", SIZES),
    "falcon": ("Falcon", {**SIZES, **TOKENS}),
    "phi": ("Phi", {**SIZES, **TOKENS, "num_key_value_heads": 2}),
    "opt": ("OPT", {**SIZES, **TOKENS, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 128}),
}


SLIDING = {"num_hidden_layers": 3, "sliding_window": 8}
CACHE_OPTIONS: dict[str, dict[str, Any]] = {
    "gemma3": {**SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen2": {**SLIDING, "use_sliding_window": True, "max_window_layers": 1},
}


@pytest.fixture(scope="session")
def build() -> Callable[..., PreTrainedModel]:
    """A function that builds one family's base model, or another head of it, in evaluation mode."""

    def of(family: str, head: str = "Model", **options: Any) -> PreTrainedModel:
        name, sizes = FAMILIES[family]
        torch.manual_seed(0)
        # Gemma 3's plain names are those of models that read images too.
        plain = f"{name}Text" if family == "gemma3" else name
        config = getattr(transformers, f"{plain}Config")(**{**sizes, **options})
        model: PreTrainedModel = getattr(transformers, f"{plain if head == 'Model' else name}{head}")(config)
        # Random weights give nearly uniform attention; larger ones make a mistake in scale or mask visible.
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.mul_(10.0)
        return model.eval()

    return of


@pytest.fixture(scope="session")
def saved(build: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole folder of a linearized model, of one map for all heads."""
    model, path = build("bert"), tmp_path_factory.mktemp("saved") / "whole"
    linearize_(model, method="FavorPlus(num_features=16)")
    save_pretrained(model, path)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "whole"))


@pytest.fixture
def language_model(build: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """A family's language model, whose random weights attend neither to all tokens alike nor to one alone."""

    def of(family: str, **options: Any) -> PreTrainedModel:
        model = build(
            family, head=LANGUAGE_HEADS.get(family, "ForCausalLM"), **{**CACHE_OPTIONS.get(family, {}), **options}
        )
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.mul_(0.4)
        return model

    return of


@pytest.fixture
def padded() -> Callable[[str], dict[str, torch.Tensor]]:
    """A function giving a batch of three texts of 7, 4 and 1 tokens, padded on one side."""

    def on(side: str) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 64, (3, 7), generator=torch.Generator().manual_seed(1))
        mask = torch.zeros(3, 7, dtype=torch.long)
        for row, length in enumerate((7, 4, 1)):
            mask[row, :length] = 1
        if side == "left":
            mask = mask.flip(-1)
        return {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask}

    return on


@pytest.fixture
def exact() -> Callable[[AttentionCall], torch.Tensor]:
    """The handler that changes nothing."""

    def attend(call: AttentionCall) -> torch.Tensor:
        return linattn.softmax_attention(
            call.query,
            call.key,
            call.value,
            key_mask=call.key_mask,
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=True,
        )

    return attend
