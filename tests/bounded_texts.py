"""A text, configurations and readings of bounded caches."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from linattn import MergedKV

IDS = torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(1))
ENOUGH, FEW = MergedKV(4, 64, None), MergedKV(4, 6, 4)
GREEDY = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "pad_token_id": 0}


def logits(model: PreTrainedModel, cache: Any = None, cuts: tuple[int, ...] = (24,), **inputs: Any) -> torch.Tensor:
    """Those of a text, read in parts where there is a cache."""
    with torch.no_grad():
        if cache is None:
            return model(IDS, use_cache=False, **inputs).logits
        return torch.cat([model(part, past_key_values=cache, **inputs).logits for part in IDS.split(cuts, 1)], 1)
