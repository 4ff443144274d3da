"""A tiny softmax language model of bytes, trained for some steps, and the text that it was trained on."""

from __future__ import annotations

import random

import torch

from linattn.hf import LinearLMConfig, LinearLMForCausalLM

WORDS = ("linear", "attention", "kernel", "softmax", "state", "token", "query", "key", "value", "sum")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
STEPS, LENGTH = 100, 32


def prose(num_paragraphs: int = 250) -> str:
    """Different paragraphs of 3 to 9 words."""
    draw = random.Random(0)
    return "\n\n".join(" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) for _ in range(num_paragraphs))


def byte_ids(num_rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Windows of the prose, (B, L)."""
    tokens = torch.tensor(list(prose().encode()))
    starts = torch.randint(len(tokens) - length, (num_rows,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([tokens[start : start + length] for start in starts.tolist()])


def twin(**options) -> LinearLMForCausalLM:
    """The model in evaluation mode; after these steps its predictions hang on what it attends to."""
    torch.manual_seed(0)
    model = LinearLMForCausalLM(LinearLMConfig(**{**SIZES, "pattern": "s", **options}))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for step in range(STEPS):
        rows = byte_ids(8, LENGTH, seed=step)
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
