"""The cache of softmax attention at a length, without reading a text of it."""

from __future__ import annotations

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer


def filled_cache(model: PreTrainedModel, num_tokens: int) -> Cache:
    """A cache of so many tokens of which only one was read: its sizes and the time of a step are those of any text.

    Cost: one step of the model, and the memory of the cache.

    Args:
        model: a causal model with softmax attention in every layer, in evaluation mode.
        num_tokens: 1 or more.

    Returns:
        transformers' `DynamicCache`, the keys and values of one token repeated; layers with a sliding window keep as
        many as are in it.

    Raises:
        ValueError: if `num_tokens` is below 1, or a layer keeps something other than keys and values.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from linattn.hf import cache_bytes
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
        >>> cache = filled_cache(LlamaForCausalLM(LlamaConfig(**sizes)).eval(), 10)
        >>> cache.get_seq_length(), cache_bytes(cache)  # 10 tokens, two tensors, 4 numbers of 4 bytes
        (10, 320)

    Source: transformers' documentation, "Caching".
    """
    if num_tokens < 1:
        raise ValueError(f"a cache of {num_tokens} tokens was asked for; give 1 or more")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
        for layer in cache.layers if num_tokens > 1 else ():
            if not isinstance(layer, DynamicLayer):
                raise ValueError(
                    f"a layer's cache is a {type(layer).__name__}, which keeps no keys; restore_ the model"
                )
            keys, values = (x.repeat(1, 1, num_tokens - 1, 1) for x in (layer.keys, layer.values) if x is not None)
            layer.update(keys, values)
    return cache
