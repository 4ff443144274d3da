"""The layer: projections around `linattn.linear_attention`; letters as in nn/__init__.py."""

from typing import Any, Self, final

import torch
from torch import Tensor, nn

from linattn.attention import State, linear_attention, linear_attention_with_state
from linattn.attention.checking import check_heads, check_map
from linattn.attention.window import check_window
from linattn.feature_maps import FeatureMap
from linattn.nn.attention import Attention, Heads, QkNorm
from linattn.positions import Gate, Position, gated_attention_with_state


@final
class LinearAttention(Attention):
    """Multi-head attention with the kernel of a feature map, in linear time.

        q, k, v = x W_q, x W_k, x W_v in heads;   out = concat_h(Σ_j φ(q)·φ(k_j) v_j / Σ_j φ(q)·φ(k_j)) W_o

    Time O(L·E·(H + Hkv)·D) for the projections and that of `linattn.linear_attention`; a stream's state has a constant
    size. The layer takes (B, L, E), the batch first.

    Args:
        embed_dim: E.
        num_heads: H.
        feature_map: the kernel, for the head width D; a part of the layer, trained and moved with it.
        num_kv_heads: Hkv, groups of H / Hkv consecutive query heads share a key/value head; H if None.
        head_dim: D; E / H if None.
        is_causal: whether a token sees itself and earlier ones alone.
        positions: how positions enter queries and keys, a `linattn.positions.Position` for head_dim=D, such as Rotary;
            it says which maps it admits, and of which width. None for none.
        gate: what keys weigh, and how earlier ones fade, a `linattn.positions.Gate` for num_heads=Hkv, such as
            ForgetGate; for causal layers. None for none.
        qk_norm: "rms" or "layer": norms with weights of their own on each head's queries and keys; None for none.
        output_gate: multiply what heads attended to by sigmoid(x W_g + b_g).
        window: width of an exact window beside the map, as in `linear_attention`; None for none. Its blocks
            are counted from a row's first live token; masked tokens between live ones take places in them.
        bias: whether the four projections have biases.
        device: of the parameters, torch's default if None; map, positions and gate are moved there, or stay if None.
        dtype: of the parameters, torch's default if None; map, positions and gate keep their own.

    Raises:
        TypeError: `feature_map` is no FeatureMap, `positions` no Position, `gate` no Gate.
        ValueError: sizes do not fit each other, the map, the positions or the gate; the positions do not admit the map;
            a gate in a layer that is not causal; unknown `qk_norm`.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import Relu
        >>> layer = LinearAttention(2, 1, Relu(2, floor=0.0), is_causal=True)
        >>> for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
        ...     _ = torch.nn.init.eye_(projection.weight)
        >>> x = torch.tensor([[[1.0, 0.0], [1.0, 1.0]]])
        >>> layer(x)[0, 1].tolist()  # weights 1 and 2: (1·(1, 0) + 2·(1, 1))/3
        [1.0, 0.6666666865348816]
        >>> first = layer.forward_with_state(x[:, :1])
        >>> layer.forward_with_state(x[:, 1:], first.state).out[0, 0].tolist()
        [1.0, 0.6666666865348816]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 4-6; Vaswani et al. 2017 (arXiv 1706.03762), section
        3.2.2; Qiu et al. 2025 (arXiv 2505.06708) for the output gate.
    """

    _keeps = State

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature_map: FeatureMap,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        is_causal: bool = False,
        positions: Position | None = None,
        gate: Gate | None = None,
        qk_norm: QkNorm | None = None,
        output_gate: bool = False,
        window: int | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, is_causal=is_causal,
            positions=positions, gate=gate, qk_norm=qk_norm, output_gate=output_gate, bias=bias, device=device,
            dtype=dtype,
        )  # fmt: skip
        check_map(feature_map)
        bound = feature_map if positions is None else positions.bind(feature_map)
        check_heads(bound, self.head_dim if positions is None else positions.encoded_dim, self.num_kv_heads)
        self.feature_map = bound if device is None else bound.to(device)
        if window is not None:
            check_window(window, bound, 1, 1, is_causal=is_causal)
        self.window = window

    @classmethod
    def from_multihead_attention(
        cls,
        mha: nn.MultiheadAttention,
        feature_map: FeatureMap,
        *,
        is_causal: bool = False,
        window: int | None = None,
        batch_first: bool | None = None,
    ) -> Self:
        """A layer with the weights of torch's own, copied: the same projections, the map in the softmax's place.

        Args:
            mha: with one set of weights for queries, keys and values or with separate ones, with biases or without.
            feature_map: the kernel, for the width mha.embed_dim / mha.num_heads.
            is_causal: as in the constructor: torch's layer is told with each call.
            window: as in the constructor.
            batch_first: the layer takes (B, L, E) whatever torch's took. Where that was (L, B, E), say True here, and
                transpose what you give it.

        Returns:
            A layer on the weights' device, in their dtype, in the mode mha is in.

        Raises:
            TypeError: `mha` is no torch.nn.MultiheadAttention.
            ValueError: `mha` has what the layer cannot represent: keys and values of different widths, a bias key
                (add_bias_kv), a zero key (add_zero_attn), dropout of weights; it takes (L, B, E) and `batch_first` does
                not say that the caller knows.

        Example:
            >>> import torch
            >>> from linattn.feature_maps import EluPlusOne
            >>> mha = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            >>> layer = LinearAttention.from_multihead_attention(mha, EluPlusOne(4))
            >>> bool((layer.k_proj.weight == mha.in_proj_weight[8:16]).all())
            True
        """
        _check_representable(mha)
        if not (mha.batch_first or batch_first):
            raise ValueError(
                "mha takes (L, B, E), this layer (B, L, E); say batch_first=True, and transpose what you give the layer"
            )
        joint, bias = (getattr(mha, name) for name in ("in_proj_weight", "in_proj_bias"))
        apart, weight = (mha.q_proj_weight, mha.k_proj_weight, mha.v_proj_weight), mha.out_proj.weight
        weights = (*(apart if joint is None else joint.chunk(3)), weight)
        made: Any = {"bias": bias is not None, "device": weight.device, "dtype": weight.dtype}
        layer = cls(mha.embed_dim, mha.num_heads, feature_map, is_causal=is_causal, window=window, **made)
        projections = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj
        sources = (*(apart if joint is None else (joint,) * 3), weight)
        for projection, copied, source in zip(projections, weights, sources, strict=True):
            projection.weight = nn.Parameter(copied.detach().clone(), source.requires_grad)
            # A memory may have a width of its own.
            projection.out_features, projection.in_features = copied.shape
        if bias is not None:
            for projection, copied in zip(projections, (*bias.chunk(3), mha.out_proj.bias), strict=True):
                source = mha.out_proj.bias if projection is layer.o_proj else bias
                projection.bias = nn.Parameter(copied.detach().clone(), source.requires_grad)
        return layer.train(mha.training)

    def _attend(self, heads: Heads) -> Tensor:
        """By the op; with a gate as a stream, which alone has gates."""
        if heads.gates is not None:
            return super()._attend(heads)
        tokens, mask, window = heads[:3], heads.key_mask, self.window
        return linear_attention(
            *tokens, self.feature_map, key_mask=mask, is_causal=self.is_causal, enable_gqa=True, window=window
        )

    def _attend_with_state(self, heads: Heads, past: State | None) -> tuple[Tensor, State]:
        """By the op with a state, gated or not."""
        options: Any = {"key_mask": heads.key_mask, "enable_gqa": True, "window": self.window}
        if heads.gates is None:
            return linear_attention_with_state(*heads[:3], self.feature_map, past, **options)
        return gated_attention_with_state(*heads[:3], self.feature_map, heads.gates, past, **options)


def _check_representable(mha: nn.MultiheadAttention) -> None:
    """Refuse what these layers do not have."""
    if not isinstance(mha, nn.MultiheadAttention):
        raise TypeError(f"mha must be a torch.nn.MultiheadAttention, got {type(mha).__name__}")
    if mha.kdim != mha.vdim:
        raise ValueError(
            f"keys and values are projections of one memory here, got kdim={mha.kdim} and vdim={mha.vdim}; "
            "project one of them to the other's width first"
        )
    if mha.bias_k is not None or mha.bias_v is not None:
        raise ValueError("this layer has no learned key beside the tokens, got add_bias_kv=True; append it to memory")
    if mha.add_zero_attn:
        raise ValueError("this layer has no zero key beside the tokens, got add_zero_attn=True; train without it first")
    if mha.dropout:
        raise ValueError(f"linear attention has no weights to drop, got dropout={mha.dropout}; set mha.dropout = 0.0")
