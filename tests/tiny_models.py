"""Tiny causal models of bytes, all made here.

What is large is imported by the fixtures: a conftest.py has them, which the process that deals tests out reads too.
"""

from __future__ import annotations

import pytest

SIZES = {"vocab_size": 256, "hidden_size": 24, "intermediate_size": 24, "num_attention_heads": 4, "head_dim": 8}
LAYERS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]


def sharpened(model):
    """In evaluation mode, its attention far from uniform."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Gemma normalises its queries, and their width follows from this weight alone.
            if weight.ndim == 2 or name.endswith("q_norm.weight"):
                weight.add_(weight.ndim == 1).mul_(6.0)
    return model.eval()


@pytest.fixture(scope="module")
def tiny():
    """A function giving a loaded model by its family."""
    import torch
    from transformers import (
        BertConfig,
        BertModel,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    from linattn.hf import ByteTokenizer, LoadedModel

    def of(family):
        torch.manual_seed(0)
        if family == "hybrid":
            sizes = {**SIZES, "num_hidden_layers": 5, "num_key_value_heads": 2, "sliding_window": 16}
            model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, layer_types=LAYERS))
        elif family == "llama":
            sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2}
            model = LlamaForCausalLM(LlamaConfig(**sizes))
        elif family == "windowed":
            sizes = {**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, "sliding_window": 16}
            model = MistralForCausalLM(MistralConfig(**sizes))
        else:
            sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
            model = BertModel(BertConfig(**sizes, num_hidden_layers=2))
        return LoadedModel(family, family, sharpened(model), ByteTokenizer())

    return of


@pytest.fixture(scope="module")
def words():
    """A text of 4,000 random letters and spaces."""
    import torch

    from linattn_lab.texts import Text

    draw = torch.Generator().manual_seed(4)
    return Text("letters", "".join(map("abcdefgh ".__getitem__, torch.randint(9, (4000,), generator=draw).tolist())))
