"""An empty cache for any causal model: states where it is linear, keys and values where it is not."""

from __future__ import annotations

from transformers import Cache, DynamicCache, PreTrainedModel

from linattn.hf._attention_modules import attention_modules
from linattn.hf.language_model import LinearLMForCausalLM
from linattn.hf.layer_attention import attention_of
from linattn.hf.state_cache import StateCache
from linattn.hf.stream_cache import StreamCache


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache of the kind that `generate` makes for a model by itself.

    Cost: building one layer per layer of the model.

    Args:
        model: a causal model.

    Returns:
        A `StreamCache` for a `LinearLMForCausalLM`; a `StateCache` for a linearized model, in which layers with a
        sliding window keep the keys in it; transformers' `DynamicCache` for any other.

    Raises:
        ValueError: if the model is linearized and not causal.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from linattn.hf import linearize_
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> type(new_cache(model)).__name__
        'DynamicCache'
        >>> _ = linearize_(model, method="EluPlusOne")
        >>> type(new_cache(model)).__name__
        'StateCache'

    Source: transformers' documentation, "Caching".
    """
    if isinstance(model, LinearLMForCausalLM):
        return StreamCache(len(model.model.blocks))
    if any(attention_of(part.module) is not None for part in attention_modules(model)):
        return StateCache(model)
    return DynamicCache(config=model.config)
