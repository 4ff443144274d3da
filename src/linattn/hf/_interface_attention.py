"""The softmax layer of a `LinearLMForCausalLM`: its calls can be read and answered as those of any transformers model.

Letters: B batch, H query heads, L tokens, D head width.
"""

from __future__ import annotations

from typing import final

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from linattn.attention import State
from linattn.hf._calls import ask_mask
from linattn.hf._dispatch import NAME as LINEARIZED
from linattn.hf.interception import NAME as INTERCEPTED
from linattn.hf.layer_attention import attention_of
from linattn.nn import KeptTokens, SoftmaxAttention, Stream
from linattn.nn.attention import Heads
from linattn.nn.streams import kind_of


@final
class InterfaceAttention(SoftmaxAttention):
    """`linattn.nn.SoftmaxAttention` by SDPA, unless its model is intercepted or linearized."""

    config: PreTrainedConfig  # of the model, which names the attention function; to be set before the first call
    looks_attention_up = True

    @property
    def num_key_value_groups(self) -> int:
        """H / Hkv, under the name by which transformers' SDPA function asks for it."""
        return self.num_heads // self.num_kv_heads

    def _attend_to(self, query: Tensor, kept: KeptTokens) -> Tensor:
        """By the function that `intercept` or `linearize_` registered; by SDPA where neither is at work."""
        name = self.config._attn_implementation
        if name not in (LINEARIZED, INTERCEPTED):
            return super()._attend_to(query, kept)
        if kept.key_bias is not None:
            raise ValueError(
                f"the softmax of this LinearLM is gated ({type(self.gate).__name__}), and transformers' attention "
                "interface, by which calls are recorded and replaced, knows no gates; take a model with gate=None"
            )
        scale, (batch_size, _, num_queries, _), num_keys = self.head_dim**-0.5, query.shape, kept.key.shape[2]
        function = causal_mask_function if self.is_causal else bidirectional_mask_function
        options = {"mask_function": function, "attention_mask": kept.key_mask, "device": query.device}
        mask = ask_mask(batch_size, num_queries, num_keys, num_keys - num_queries, 0, **options, dtype=query.dtype)
        attend = ALL_ATTENTION_FUNCTIONS[name]
        out, _ = attend(self, query, kept.key, kept.value, mask, scaling=scale, is_causal=self.is_causal)
        answered: Tensor = out.transpose(1, 2)
        return answered

    def _attend_with_state(self, heads: Heads, kept: State | KeptTokens | None) -> tuple[Tensor, State | KeptTokens]:
        """Attend as `SoftmaxAttention`, or, linearized, from the state of the map that took the softmax's place."""
        attention = attention_of(self)
        if attention is None or heads.gates is not None:
            assert not isinstance(kept, State)
            return super()._attend_with_state(heads, kept)
        assert kept is None or isinstance(kept, State)
        tensors = heads.query, heads.key, heads.value
        return attention.advance(*tensors, kept, scale=self.head_dim**-0.5, key_mask=heads.key_mask)

    def _checked_kept(self, state: Stream) -> State | KeptTokens:
        """Keys and values, or a linearized layer's state."""
        if attention_of(self) is None:
            return super()._checked_kept(state)
        if not isinstance(state, Stream) or not isinstance(state.kept, State):
            raise TypeError(
                f"a linearized layer goes on from the Stream of a linattn.State, got {kind_of(state)}; begin the text "
                "anew after linearize_"
            )
        return state.kept
