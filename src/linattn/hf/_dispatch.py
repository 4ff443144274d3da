"""The attention function of linearized models: what `linearize_` put into the module, else softmax.

Letters: B batch, H query heads, L tokens (Lq, Lk), Dv value width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from linattn.hf._calls import InterfaceCall
from linattn.hf._mask import Mask, build_whole_mask, last_keys
from linattn.hf.layer_attention import attention_of
from linattn.hf.state_cache import StateLayer

NAME = "linattn"
LAYER = "linattn_layer"


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask, **options: Any
) -> tuple[Tensor, None]:
    """The registered attention function: transformers passes the options by keyword and wants (B, Lq, H, Dv)."""
    layer: StateLayer | None = options.pop(LAYER, None)
    call = InterfaceCall(module, query, key, value, last_keys(attention_mask, key.shape[-2]), options)
    attention = attention_of(module)
    if attention is None:
        return call.by_softmax(), None
    name = attention.module_name
    call.refuse_options(name, key.shape[-2] + (0 if layer is None else layer.num_tokens))
    key_mask, is_causal = call.read_mask(name)
    if layer is None:
        out: Tensor = attention(query, key, value, scale=call.scale, key_mask=key_mask, is_causal=is_causal)
        return out.transpose(1, 2), None
    # A single query sees all keys, causal or not.
    if not is_causal and query.shape[-2] > 1:
        raise ValueError(
            f"{name} lets queries see later keys, which a cache of states does not hold; pass use_cache=False"
        )
    out = layer.advance(attention, query, key, value, scale=call.scale, key_mask=key_mask)
    return out.transpose(1, 2), None


# On import, not on use: a linearized model that is read from a pickle names them too. Without a mask function of the
# same name, transformers would drop padding without a word.
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, build_whole_mask)
