"""A small corpus, and a model that learns something of it in a few steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from linattn.hf import LinearLMConfig, LinearLMForCausalLM
from linattn_lab.pretraining import Corpus, from_documents

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_features": 8}


@pytest.fixture
def corpus() -> Corpus:
    """200 documents of words of three letters."""
    draw = random.Random(0)
    texts = (" ".join(draw.choices(("abc", "bcd", "cde"), k=draw.randint(8, 30))) for _ in range(200))
    return from_documents(((f"{number}.txt", text.encode()) for number, text in enumerate(texts)), context=16)


@pytest.fixture
def build() -> Callable[..., LinearLMForCausalLM]:
    """A function that builds a model, the same each time."""

    def of(**options: Any) -> LinearLMForCausalLM:
        torch.manual_seed(0)
        return LinearLMForCausalLM(LinearLMConfig(**{**SIZES, **options}))

    return of
