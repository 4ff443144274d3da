"""Attention in the place of a layer's softmax: a map, or an encoder's merged keys; letters as in hf/__init__.py."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from linattn.attention import State, linear_attention, linear_attention_with_state
from linattn.attention.functional import linear_partial, linear_partial_with_state
from linattn.attention.window import shares_normalizer
from linattn.feature_maps import FeatureMap
from linattn.hf._attention_modules import AttentionModule
from linattn.hf._calls import CAPS, SINKS
from linattn.kv_cache import MergedKV, merged_attention
from linattn.softmax.partial import Attended

ATTRIBUTE = "linear_attention"
"""Name of a `LayerAttention` in its attention module."""


class LayerAttention(nn.Module):
    """Attention by a feature map or merged keys, which `linearize_` puts into a module as its `linear_attention`.

        out_i = Σ_j φ(√c·q_i)·φ(√c·k_j) v_j / Σ_j φ(√c·q_i)·φ(√c·k_j),   c the temperature the model asks for

    A map's own scale s, D**-0.5 where it has none, is fixed when it is built, the model's c comes with the call:
    queries enter as (c/s)·q, and nothing is multiplied where the two agree. Models that scale their queries themselves
    and then ask for c = 1 (ESM, Whisper) thereby get them back as they were.

    Merged keys stand for the softmax kernel themselves, capped where the model asks for that, and have no state here.

    Cost: that of `linattn.linear_attention`, or of `linattn.merged_attention`.

    Attributes:
        module_name: qualified name of the attention module in the model.
        feature_map: the map of all heads; None beside merged keys.
        window: width of the exact window beside the map; None for none.
        merged: the merged keys; None beside a map.
        attend_to_parts: what attends inside `linattn.hf.context_parallel`, in the op's words; None elsewhere.

    Args:
        kernel: the map of all heads, for the head width of the module, or merged keys.
        module_name, window: as the attributes.

    Raises:
        TypeError: if `kernel` is neither a map nor a `MergedKV`.
        ValueError: if there is a window beside merged keys, which have their own.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import Taylor
        >>> attention = LayerAttention(Taylor(1, order=1, scale=0.5), "layer.0")
        >>> q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1), torch.eye(2).view(1, 1, 2, 2)
        >>> attention(q, k, v, scale=1.0)[0, 0, 0].tolist()  # weights 1 + 1·0 and 1 + 1·1, over their sum
        [0.3333333432674408, 0.6666666865348816]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equation 4.
    """

    feature_map: FeatureMap | None
    attend_to_parts: Callable[..., Tensor] | None = None

    def __init__(self, kernel: FeatureMap | MergedKV, module_name: str, *, window: int | None = None) -> None:
        super().__init__()
        if not isinstance(kernel, FeatureMap | MergedKV):
            raise TypeError(
                f"{module_name} attends by a linattn FeatureMap or by a linattn.MergedKV, got {type(kernel).__name__}"
            )
        if isinstance(kernel, MergedKV) and window is not None:
            raise ValueError(f"{module_name}: {kernel!r} has its own window, got window={window}; leave window out")
        self.module_name, self.window = module_name, window
        self.merged = kernel if isinstance(kernel, MergedKV) else None
        self.feature_map = kernel if isinstance(kernel, FeatureMap) else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        sinks: Tensor | None = None,
        soft_cap: float | None = None,
    ) -> Tensor:
        """Attention over these keys.

        Args:
            query, key, value: (B, H, Lq, D), (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv), H a multiple of Hkv.
            key_mask, is_causal: as in `linattn.linear_attention`.
            scale: c, the factor of q·k.
            sinks: (H,), the logits of one more key of value 0 in each head (`linattn.Partial.with_sink`), or None.
            soft_cap: as in `linattn.merged_attention`.

        Returns:
            (B, H, Lq, Dv). ValueError if there are sinks, or a cap, that the method cannot take.
        """
        self._check_sinks(sinks)
        query = rescale_query(self.feature_map, query, scale)
        options: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal, "enable_gqa": True}
        if self.merged is not None:
            return merged_attention(query, key, value, self.merged, **options, soft_cap=soft_cap)
        assert self.feature_map is not None
        if soft_cap is not None:
            raise ValueError(f"{self.module_name} attends by {self.summary}, which has no soft caps; give merged keys")
        options["window"] = self.window
        if sinks is not None:
            return linear_partial(query, key, value, self.feature_map, **options).with_sink(sinks)
        return (self.attend_to_parts or linear_attention)(query, key, value, self.feature_map, **options)

    def advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: State | None,
        *,
        scale: float,
        key_mask: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Attended[State]:
        """Causal attention over the state's keys and these, and the state after them.

        Args:
            query, key, value, scale, key_mask, sinks: as in `forward`, one query per new key.
            state: of the tokens before; None for none.

        Returns:
            The output (B, H, L, Dv) and the new state. ValueError if it attends by merged keys; as `forward`.
        """
        if self.attend_to_parts is not None:
            raise ValueError(
                f"{self.module_name} has a part of each sequence (linattn.hf.context_parallel), and a cache goes on "
                "from whole ones; pass use_cache=False"
            )
        self._check_sinks(sinks)
        query = rescale_query(self.feature_map, query, scale)
        if self.feature_map is None:
            raise ValueError(
                f"{self.module_name} attends by {self.summary}, which has no state here; a decoder's keys are "
                "merged in its cache, a linattn.hf.BoundedCache"
            )
        held, window = (query, key, value, self.feature_map, state), self.window
        if sinks is None:
            return linear_attention_with_state(*held, key_mask=key_mask, enable_gqa=True, window=window)
        partial, later = linear_partial_with_state(*held, key_mask=key_mask, enable_gqa=True, window=window)
        return Attended(partial.with_sink(sinks), later)

    @property
    def takes(self) -> tuple[str, ...]:
        """Caps beside merged keys; sinks where keys are on the softmax kernel's scale, in all heads alike; in words."""
        if self.feature_map is None:
            return (CAPS,)
        return (SINKS,) if shares_normalizer(self.feature_map) else ()

    @property
    def summary(self) -> str:
        """The map, or the merged keys."""
        return " ".join(repr(self.feature_map).split()) if self.merged is None else self.merged.label

    def extra_repr(self) -> str:
        """Merged keys, or the window; a map is shown as a part."""
        if self.merged is not None:
            return self.merged.label
        return "" if self.window is None else f"window={self.window}"

    def _check_sinks(self, sinks: Tensor | None) -> None:
        """Refuse sinks where nothing could take them."""
        if sinks is not None and SINKS not in self.takes:
            raise ValueError(
                f"{self.module_name} attends by {self.summary}, beside which sinks have no scale; give a map for "
                "the softmax kernel with a positive normaliser, as FavorPlus"
            )
        if sinks is not None and self.attend_to_parts is not None:
            raise ValueError(
                f"{self.module_name} has a part of each sequence (linattn.hf.context_parallel), which no sinks stand "
                "beside; call the model outside of it"
            )


Attending = tuple[AttentionModule, LayerAttention]
"""An attention module and what attends in its place."""


def attention_of(module: nn.Module) -> LayerAttention | None:
    """The `LayerAttention` that `linearize_` put into a module, if any."""
    attention = getattr(module, ATTRIBUTE, None)
    if attention is None or isinstance(attention, LayerAttention):
        return attention
    if isinstance(attention, nn.Module) and any(isinstance(part, LayerAttention) for part in attention.modules()):
        raise TypeError(
            f"{type(module).__name__}.{ATTRIBUTE} is wrapped in {type(attention).__name__}, which nothing calls; wrap "
            "or compile the model or its layers, or give PEFT a map's parts, modules_to_save=['of_query', 'of_key']"
        )
    return None


def rescale_query(feature_map: FeatureMap | None, query: Tensor, scale: float) -> Tensor:
    """Queries (B, H, L, D) for which the map's own scale, D**-0.5 where it has none, is the model's: q·c/s."""
    map_scale: float = getattr(feature_map, "scale", query.shape[-1] ** -0.5)
    return query if map_scale == scale else query * (scale / map_scale)
