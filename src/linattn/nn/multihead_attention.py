"""A layer of linattn in the place of torch.nn.MultiheadAttention, called as that is; letters as in nn/__init__.py."""

from typing import Self, final

import torch
from torch import Tensor, nn

from linattn.feature_maps import FeatureMap
from linattn.nn.attention import Attention
from linattn.nn.linear_attention import LinearAttention
from linattn.softmax.tracing import has_values


@final
class MultiheadAttention(nn.Module):
    """An attention layer with the call of torch.nn.MultiheadAttention, to be put where a module expects one.

        encoder_layer.self_attn = MultiheadAttention.in_place_of(encoder_layer.self_attn, feature_map)

    In time and memory it is the layer; an `attn_mask` alone costs O(L²), so leave it out and say `is_causal=True`.
    torch.nn.TransformerEncoderLayer, TransformerDecoderLayer and stacks of them call it as they call their own.

    Args:
        layer: what attends. A causal one is called with a causal mask or `is_causal=True`, any other one without: a
            call that says otherwise is refused.
        batch_first: tokens are (B, L, E); (L, B, E) if False.

    Raises:
        TypeError: `layer` is no `linattn.nn.Attention`.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import EluPlusOne
        >>> block = torch.nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True)
        >>> block.self_attn = MultiheadAttention.in_place_of(block.self_attn, EluPlusOne(4))
        >>> padding = torch.tensor([[False, False, True], [False, False, False]])  # True = leave out
        >>> block(torch.ones(2, 3, 8), src_key_padding_mask=padding).shape
        torch.Size([2, 3, 8])
    """

    # Read by torch's blocks, which then take the way that calls this module.
    _qkv_same_embed_dim = False

    def __init__(self, layer: Attention, *, batch_first: bool = True) -> None:
        super().__init__()
        if not isinstance(layer, Attention):
            raise TypeError(f"layer must be a linattn.nn.Attention, like LinearAttention, got {type(layer).__name__}")
        self.layer, self.batch_first = layer, batch_first

    @classmethod
    def in_place_of(
        cls, mha: nn.MultiheadAttention, feature_map: FeatureMap, *, is_causal: bool = False, window: int | None = None
    ) -> Self:
        """Linear attention with the weights of torch's own layer, copied, and its layout.

        Args:
            mha: as in `LinearAttention.from_multihead_attention`.
            feature_map: the kernel, for the width mha.embed_dim / mha.num_heads.
            is_causal, window: as in `LinearAttention`.

        Raises:
            TypeError, ValueError: as `LinearAttention.from_multihead_attention`.
        """
        layer = LinearAttention.from_multihead_attention(
            mha, feature_map, is_causal=is_causal, window=window, batch_first=True
        )
        return cls(layer, batch_first=mha.batch_first)

    @property
    def embed_dim(self) -> int:
        """E."""
        return self.layer.embed_dim

    @property
    def num_heads(self) -> int:
        """Heads of the queries."""
        return self.layer.num_heads

    @property
    def out_proj(self) -> nn.Linear:
        """The last projection, by the name under which torch's blocks ask for its device."""
        return self.layer.o_proj

    @property
    def in_proj_weight(self) -> Tensor:
        """The queries' projection, for the same question."""
        return self.layer.q_proj.weight

    @property
    def in_proj_bias(self) -> Tensor | None:
        """The bias of that."""
        return self.layer.q_proj.bias

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend to the query's own tokens, or to a memory.

        Args:
            query: (B, Lq, E), or (Lq, B, E) without `batch_first`.
            key: `query` itself, or the memory, (B, Lk, E).
            value: `key` itself.
            key_padding_mask: (B, Lk), bool with True = leave out, or floating with -inf = leave out and 0 elsewhere.
            need_weights: False: linear attention has no weights to return.
            attn_mask: the causal mask (L, L), bool or floating, for a causal layer alone.
            average_attn_weights: torch's, which says how it would return weights; either does.
            is_causal: whether the call is causal; without `attn_mask` too.

        Returns:
            (out, None): the tokens in the query's layout.

        Raises:
            ValueError: tokens are nested; `value` is not `key`; weights are asked for; the call's direction is not the
                layer's; `attn_mask` is another than the causal one, or has no values to compare, as under
                torch.compile, and `is_causal` does not say what it is; a padding mask of other numbers; shapes.
        """
        if query.is_nested:
            raise ValueError(
                "this layer takes padded tokens, got nested ones; build torch.nn.TransformerEncoder with "
                "enable_nested_tensor=False, or set its use_nested_tensor to False"
            )
        if value is not key:
            raise ValueError("keys and values are projections of one memory here; give one tensor as key and value")
        if need_weights:
            raise ValueError("linear attention has no weights to return, got need_weights=True; say need_weights=False")
        self._check_direction(attn_mask, is_causal=is_causal, num_tokens=query.shape[int(self.batch_first)])
        key_mask = None if key_padding_mask is None else _attended(key_padding_mask)
        x, memory = (y if self.batch_first else y.transpose(0, 1) for y in (query, key))
        out = self.layer(x, None if key is query else memory, key_mask=key_mask)
        return (out if self.batch_first else out.transpose(0, 1)), None

    def _check_direction(self, attn_mask: Tensor | None, *, is_causal: bool, num_tokens: int) -> None:
        """Refuse a call whose direction is not the layer's."""
        if attn_mask is not None and (has_values(attn_mask) or not is_causal):
            if not has_values(attn_mask) or not _is_causal_mask(attn_mask, num_tokens):
                raise ValueError(
                    f"attn_mask must be the causal one, ({num_tokens}, {num_tokens}), got another of shape "
                    f"{tuple(attn_mask.shape)} or one without values; linear attention has no weights to mask: leave "
                    "padding out by key_padding_mask, and say is_causal=True for causality"
                )
            is_causal = True
        if is_causal != self.layer.is_causal:
            wanted = "with is_causal=True or a causal attn_mask" if self.layer.is_causal else "without a causal mask"
            raise ValueError(
                f"a layer of is_causal={self.layer.is_causal} is called {wanted}, got is_causal={is_causal}; build the "
                f"layer with is_causal={is_causal}, or change the call"
            )


def _attended(key_padding_mask: Tensor) -> Tensor:
    """Which keys are attended to, of torch's mask of those that are not."""
    if key_padding_mask.dtype == torch.bool:
        return ~key_padding_mask
    live = key_padding_mask == 0
    if has_values(live) and not bool((live | (key_padding_mask == -torch.inf)).all()):
        raise ValueError("a floating key_padding_mask must be 0 or -inf everywhere, got other numbers; give a bool one")
    return live


def _is_causal_mask(attn_mask: Tensor, num_tokens: int) -> bool:
    """Whether a mask leaves out later tokens and nothing else."""
    if attn_mask.shape != (num_tokens, num_tokens):
        return False
    is_out = attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
    later = torch.ones_like(is_out).triu(1)
    return torch.equal(is_out, later) and (attn_mask.dtype == torch.bool or bool((attn_mask[~later] == 0).all()))
