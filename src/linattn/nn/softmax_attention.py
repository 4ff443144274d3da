"""The softmax layer of a hybrid, around torch's attention; letters as in nn/__init__.py."""

import torch
from torch import Tensor

from linattn.nn.attention import Attention, Heads
from linattn.nn.streams import KeptTokens, extended
from linattn.positions import Gate, Position, gate_bias
from linattn.positions.gates import spans
from linattn.softmax import softmax_attention


class SoftmaxAttention(Attention):
    """Multi-head softmax attention, for hybrids and as the exact twin of a `LinearAttention`.

        out_i = Σ_j exp(q_i·k_j/√D) v_j / Σ_j exp(q_i·k_j/√D)

    O(L²·D) time per head; what a stream keeps grows by Hkv·2·D numbers per token. Parameters have the names and shapes
    of `LinearAttention`'s, so that one's weights load into the other.

    Args:
        embed_dim: E.
        num_heads: H.
        num_kv_heads, head_dim, is_causal, qk_norm, output_gate, bias, device, dtype: as in `LinearAttention`.
        positions: as there, if queries and keys keep their width.
        gate: as there; with a ForgetGate this is the Forgetting Transformer.

    Raises:
        TypeError, ValueError: as `LinearAttention`.

    Example:
        >>> import torch
        >>> layer = SoftmaxAttention(4, 2, is_causal=True)
        >>> x = torch.randn(1, 5, 4)
        >>> first = layer.forward_with_state(x[:, :3])
        >>> rest = layer.forward_with_state(x[:, 3:], first.state)
        >>> torch.allclose(torch.cat([first.out, rest.out], 1), layer(x), atol=1e-6)
        True
        >>> tuple(rest.state.kept.key.shape)
        (1, 2, 5, 2)

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2; Lin et al. 2025 (arXiv 2503.02130) for the gate.
    """

    _keeps = KeptTokens

    def _check_order(self, positions: Position | None, gate: Gate | None) -> None:
        """Refuse positions that widen queries and keys too."""
        super()._check_order(positions, gate)
        if positions is not None and positions.encoded_dim != positions.head_dim:
            raise ValueError(
                f"{type(positions).__name__} widens queries and keys for a feature map; give a softmax layer positions "
                "that keep their width, such as Rotary"
            )

    def _attend_with_state(self, heads: Heads, past: KeptTokens | None) -> tuple[Tensor, KeptTokens]:
        """By SDPA over what was kept and the new tokens; under gates in spans, as `gated_attention_with_state`."""
        if past is not None and (past.key_bias is None) != (self.gate is None):
            raise ValueError(
                "a stream belongs to the layer that began it, got one "
                f"{'with' if self.gate is None else 'without'} a gate's biases on its keys"
            )
        if heads.gates is None:
            past = extended(past, KeptTokens(heads.key, heads.value, heads.key_mask))
            return self._attend_to(heads.query, past), past
        outs = []
        for at in spans(heads.gates.log_forget):
            mask = None if heads.key_mask is None else heads.key_mask[:, at]
            key_bias, log_decay = gate_bias(heads.gates.cut(at), key_mask=mask)
            key, value = heads.key[:, :, at], heads.value[:, :, at]
            past = extended(past, KeptTokens(key, value, mask, key_bias.expand(key.shape[:3])), log_decay)
            outs.append(self._attend_to(heads.query[:, :, at], past))
        assert past is not None
        return torch.cat(outs, 2), past

    def _attend_to(self, query: Tensor, tokens: KeptTokens) -> Tensor:
        """SDPA of queries, the last ones if they are fewer than the keys."""
        key, value, key_mask, key_bias = tokens
        # A single query is the last token, which sees all.
        is_causal = self.is_causal and query.shape[2] > 1
        return softmax_attention(
            query, key, value, key_mask=key_mask, key_bias=key_bias, is_causal=is_causal, enable_gqa=True
        )
