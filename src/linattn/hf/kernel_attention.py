"""A feature map in the place of one layer's softmax.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

from torch import Tensor, nn

from linattn.attention import Attended, Exact, State, linear_attention, linear_attention_with_state
from linattn.feature_maps import FeatureMap


class KernelAttention(nn.Module):
    """What `linearize_` puts into an attention module, as its `linear_attention`.

        out_i = Σ_j φ(√c·q_i)·φ(√c·k_j) v_j / Σ_j φ(√c·q_i)·φ(√c·k_j),   c the temperature the model asks for

    A map's own scale s is fixed when it is built, the model's c comes with the call: queries enter as (c/s)·q, so that
    s·(c/s)·q·k = c·q·k. Where the two agree, nothing is multiplied. Models that scale their queries themselves and then
    ask for c = 1 (ESM, Whisper) thereby get them back as they were, and queries and keys of like size have the smallest
    variance. A map without a scale is taken to stand at D**-0.5.

    Cost: that of `linattn.linear_attention`.

    Attributes:
        feature_map: the kernel.
        module_name: qualified name of the attention module in the model.
        exact: the keys attended to exactly, or None.

    Args:
        feature_map: the kernel, for the head width of the module.
        module_name: qualified name of the attention module in the model.
        exact: as in `linattn.linear_attention`.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import Taylor
        >>> kernel = KernelAttention(Taylor(1, order=1, scale=0.5), "layer.0")
        >>> q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1), torch.eye(2).view(1, 1, 2, 2)
        >>> kernel(q, k, v, scale=1.0)[0, 0, 0].tolist()  # weights 1 + 1·0 and 1 + 1·1, over their sum
        [0.3333333432674408, 0.6666666865348816]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equation 4.
    """

    def __init__(self, feature_map: FeatureMap, module_name: str, *, exact: Exact | None = None) -> None:
        super().__init__()
        self.feature_map = feature_map
        self.module_name = module_name
        self.exact = exact

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attention over these keys: `linattn.linear_attention` at the temperature `scale`.

        Args:
            query: (B, H, Lq, D).
            key: (B, Hkv, Lk, D), H a multiple of Hkv.
            value: (B, Hkv, Lk, Dv).
            scale: c, the factor of q·k.
            key_mask: (B, Lk) bool, True = attend, or None.
            is_causal: whether later keys are hidden, the last query being level with the last key.

        Returns:
            (B, H, Lq, Dv).
        """
        return linear_attention(
            rescale_query(self.feature_map, query, scale),
            key,
            value,
            self.feature_map,
            key_mask=key_mask,
            is_causal=is_causal,
            enable_gqa=True,
            exact=self.exact,
        )

    def advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: State | None,
        *,
        scale: float,
        key_mask: Tensor | None = None,
    ) -> Attended:
        """Causal attention over the state's keys and these, and the state after them.

        Args:
            query: (B, H, L, D), one per new key.
            key: (B, Hkv, L, D).
            value: (B, Hkv, L, Dv).
            state: what was seen before; None for nothing.
            scale: c, the factor of q·k.
            key_mask: (B, L) bool, True = attend, or None.

        Returns:
            The output (B, H, L, Dv) and the new state.
        """
        return linear_attention_with_state(
            rescale_query(self.feature_map, query, scale),
            key,
            value,
            self.feature_map,
            state,
            key_mask=key_mask,
            enable_gqa=True,
            exact=self.exact,
        )


def rescale_query(feature_map: FeatureMap, query: Tensor, scale: float) -> Tensor:
    """Queries for which the map's own scale is the model's: q·c/s.

    Cost: O(B H L D), nothing where the two agree.

    Args:
        feature_map: any map; one without a scale is taken to stand at D**-0.5.
        query: (B, H, L, D).
        scale: c, the temperature the model asks for.

    Returns:
        (B, H, L, D).

    Example:
        >>> import torch
        >>> from linattn.feature_maps import Taylor
        >>> rescale_query(Taylor(1, scale=0.5), torch.ones(1, 1, 1, 1), 2.0).item()
        4.0

    Source: none.
    """
    own: float = getattr(feature_map, "scale", query.shape[-1] ** -0.5)
    return query if own == scale else query * (scale / own)
