"""Tiny models, batches, a tokenizer and texts for conversions."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(50)]
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", SIZES),
    "modernbert": ("ModernBertModel", {**SIZES, **ENDS, "cls_token_id": 1, "sep_token_id": 2}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **ENDS}),
    "llama": ("LlamaForCausalLM", {**SIZES, **ENDS, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {**SIZES, **ENDS, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 1},
    ),
    "vit": ("ViTModel", {**SIZES, "image_size": 16, "patch_size": 8}),
}


@pytest.fixture
def build() -> Callable[..., PreTrainedModel]:
    """A function that builds a tiny model of a family, its attention sharpened so that it is not uniform."""

    def of(family: str, **options: Any) -> PreTrainedModel:
        name, sizes = FAMILIES[family]
        torch.manual_seed(0)
        kind = getattr(transformers, name)
        # Gemma 3's class also takes the configuration of its text part alone.
        config = transformers.Gemma3TextConfig if family == "gemma3" else kind.config_class
        model: PreTrainedModel = kind(config(**{**sizes, **options}))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 2 and (".h." in name or "layer" in name):
                    weight.mul_(8.0)
        return model.eval()

    return of


@pytest.fixture
def batches() -> list[dict[str, torch.Tensor]]:
    """Sixteen batches of two texts of 12 tokens."""
    draw = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 64, (2, 12), generator=draw)} for _ in range(16)]


@pytest.fixture
def padded() -> list[dict[str, torch.Tensor]]:
    """Sixteen batches of two texts, of 12 tokens and of fewer."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for number in range(16):
        mask = (torch.arange(12) < torch.tensor([[12], [3 + number % 7]])).long()
        found.append({"input_ids": torch.randint(3, 64, (2, 12), generator=draw) * mask, "attention_mask": mask})
    return found


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, [A] before a text and [B] after it."""
    known = {word: number for number, word in enumerate(("[UNK]", "[A]", "[B]", *WORDS))}
    fast = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(single="[A] $0 [B]", special_tokens=[("[A]", 1), ("[B]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", cls_token="[A]", sep_token="[B]")


@pytest.fixture
def paragraphs() -> list[str]:
    """160 different paragraphs of 3 to 9 words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) for _ in range(160)]


@pytest.fixture
def ticking(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock, moved half a second whenever it is looked at."""

    def perf_counter() -> float:
        clock.now += 0.5
        return float(clock.now)

    monkeypatch.setattr("linattn.training.loop.time", SimpleNamespace(perf_counter=perf_counter))
    return clock
