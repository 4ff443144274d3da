"""A prompt padded on the left is continued as it is alone, within a budget or a window that it exceeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from linattn import MergedKV
from linattn.hf import BoundedCache, linearize_

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
BEFORE = (0, 5, 17)
LENGTH, NEW = 30, 12


@pytest.mark.parametrize("how", ["greedy", "beams", "chunks"])
@pytest.mark.parametrize("method", [MergedKV(4, 6, None), MergedKV(4, 6, 4), "FavorPlus(num_features=16) + window 4"])
def test_a_padded_prompt_is_continued_as_alone(method: str | MergedKV, how: str) -> None:
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, pad_token_id=0)).double().eval()
    if isinstance(method, str):
        linearize_(model, method=method)

    def bound() -> dict[str, Any]:
        """The cache of a text, where it is bounded."""
        return {} if isinstance(method, str) else {"past_key_values": BoundedCache(model, config=method)}

    ids = torch.randint(1, 61, (len(BEFORE), LENGTH), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(LENGTH) >= torch.tensor(BEFORE).unsqueeze(-1)).long()
    options = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "num_beams": 3 if how == "beams" else 1,
    }
    options |= {"output_logits": True, "return_dict_in_generate": True}
    if how == "chunks":
        # The longest padding is longer than a chunk.
        options["prefill_chunk_size"] = 7
    found = model.generate(ids * mask, attention_mask=mask, **options, **bound())
    for row, before in enumerate(BEFORE):
        own = {"input_ids": ids[row : row + 1, before:]}
        alone = model.generate(**own, attention_mask=torch.ones(1, LENGTH - before).long(), **options, **bound())
        assert torch.equal(found.sequences[row, LENGTH:], alone.sequences[0, LENGTH - before :])
        if how != "beams":
            logits = [torch.stack([step[place] for step in out.logits]) for out, place in ((found, row), (alone, 0))]
            torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-9)
