"""Tiny saved models, a tokenizer and a text, all made here.

What is large is imported by the fixtures: a conftest.py has them, which the process that deals tests out reads too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

WORDS = [f"w{number}" for number in range(40)]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
FAMILIES = {
    "bert": ("Bert", SIZES),
    "llama": ("Llama", {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
}
# Two layers with a sliding window around one without: shorter than a text of 32 words, or longer.
for width in (8, 64):
    FAMILIES[f"window of {width}"] = (
        "Olmo3",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "sliding_window": width,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    )


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits of tiny models look for the length from which a method pays no further than here: it takes seconds."""
    monkeypatch.setattr("linattn_lab.audit.paying._MOST_TOKENS", 256)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function giving the folder of one family's model with a tokenizer."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            _save(family, made[family])
        return made[family]

    return of


def _save(family: str, where: Path) -> None:
    """One model, its attention sharpened so that it is not uniform, and a tokenizer of `WORDS`."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    name, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=64, **sizes)
    model = getattr(transformers, f"{name}Model")(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(10.0)
    model.save_pretrained(where)
    vocabulary = {word: number for number, word in enumerate(("[UNK]", "[A]", "[B]", *WORDS))}
    fast = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]").save_pretrained(where)


@pytest.fixture(scope="session")
def prose() -> str:
    """64 words."""
    import torch

    chosen = torch.randint(len(WORDS), (64,), generator=torch.Generator().manual_seed(2))
    return " ".join(WORDS[number] for number in chosen.tolist())
