"""What takes the place of one layer's softmax: a method for all heads, or one for each group of them.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from linattn.attention import Exact, State, linear_attention, linear_attention_with_state, softmax_attention
from linattn.feature_maps import FeatureMap
from linattn.nn.streams import KeptTokens, extended
from linattn.planning import Plan
from linattn.planning.no_map import NoMap

ATTRIBUTE = "linear_attention"
"""Name of a `LayerAttention` in its attention module."""

ALL_HEADS = "all heads"
"""The one group of a layer without a plan."""


@dataclass(frozen=True, eq=False)
class LayerState:
    """What a layer keeps of the tokens so far; immutable.

    Attributes:
        parts: of each group of `LayerAttention.groups`, by its name: a `State`, or `linattn.nn.KeptTokens` for softmax.
    """

    parts: dict[str, State | KeptTokens]

    def select(self, indices: Tensor) -> LayerState:
        """The given rows of the batch, in that order."""
        return LayerState({name: part.select(indices) for name, part in self.parts.items()})


class LayerAttended(NamedTuple):
    """What `LayerAttention.advance` returns: the output, (B, H, L, Dv), and the state after the last key."""

    out: Tensor
    state: LayerState


@dataclass(frozen=True)
class HeadGroup:
    """A map and an exact part, for the heads of one group.

    Attributes:
        map_name: name of the map within its `LayerAttention`, and of its tensors in the `state_dict`.
        exact: the keys attended to exactly; None where the map takes all.
    """

    map_name: str
    exact: Exact | None


class LayerAttention(nn.Module):
    """What `linearize_` puts into an attention module, as its `linear_attention`.

        out_i = Σ_j φ(√c·q_i)·φ(√c·k_j) v_j / Σ_j φ(√c·q_i)·φ(√c·k_j),   c the temperature the model asks for

    for all heads alike, or, by a plan, φ being the map of the plan's method for the head; softmax for "exact" heads.

    A map's own scale s, D**-0.5 where it has none, is fixed when it is built, the model's c comes with the call:
    queries enter as (c/s)·q, and nothing is multiplied where the two agree. Models that scale their queries themselves
    and then ask for c = 1 (ESM, Whisper) thereby get them back as they were.

    Merged keys (`Exact`) need no map: they stand for the softmax kernel themselves.

    A method for all heads has a state per key/value head. Heads of a plan are computed by groups of one method; there
    every query head takes its key head's keys for itself, since heads of one key head may differ in method.

    Cost: that of `linattn.linear_attention`; by a plan, the sum of the heads' `flops_per_token`, times L, exact heads
    being quadratic in L.

    Attributes:
        module_name: qualified name of the attention module in the model.
        groups: by written form of the plan's methods, or for `ALL_HEADS`, a `HeadGroup`; None for softmax.
        plan: without its fitted tensors, which are in the maps; None for one method for all heads.
        feature_map: the map of all heads, None beside merged keys; only without a plan.
        maps: one per method of the plan that is not "exact", in the order of `plan.groups`; only with a plan.
        attend_to_parts: what attends inside `linattn.hf.context_parallel`, in the op's words; None elsewhere.

    Args:
        method: the map of all heads, for the head width of the module, or a plan, as `linattn.plan` makes it; None for
            merged keys.
        module_name: qualified name of the attention module in the model.
        exact: keys attended to exactly beside a map of all heads; a plan's methods have their own.

    Raises:
        ValueError: if a method of the plan cannot be read or built.

    Example:
        >>> import torch
        >>> from linattn.feature_maps import Taylor
        >>> attention = LayerAttention(Taylor(1, order=1, scale=0.5), "layer.0")
        >>> q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1), torch.eye(2).view(1, 1, 2, 2)
        >>> attention(q, k, v, scale=1.0)[0, 0, 0].tolist()  # weights 1 + 1·0 and 1 + 1·1, over their sum
        [0.3333333432674408, 0.6666666865348816]
        >>> from linattn.planning import HeadPlan
        >>> heads = tuple(HeadPlan(name, 0.0, None, 0.5, 10, 20) for name in ("exact", "Taylor(order=1)"))
        >>> attention = LayerAttention(Plan(heads, 1, 2, 1.0, False, 2), "layer.0")
        >>> out = attention(q.expand(1, 2, 1, 1), k, v, scale=1.0)[0, :, 0]
        >>> [[round(weight, 4) for weight in head] for head in out.tolist()]  # 1 : e, and 1 + 0 : 1 + 1
        [[0.2689, 0.7311], [0.3333, 0.6667]]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equation 4.
    """

    feature_map: FeatureMap | None
    maps: nn.ModuleList
    attend_to_parts: Callable[..., Tensor] | None = None

    def __init__(self, method: FeatureMap | Plan | None, module_name: str, *, exact: Exact | None = None) -> None:
        super().__init__()
        self.module_name = module_name
        self.plan: Plan | None = None
        self.groups: dict[str, HeadGroup | None] = {ALL_HEADS: HeadGroup("feature_map", exact)}
        if not isinstance(method, Plan):
            self.feature_map = None if isinstance(method, NoMap) else method
            return
        built = method.build()
        self.plan = replace(method, fitted={})
        # Methods are built frozen, to be measured; in a model the weights of a learned map train with the model's.
        self.maps = nn.ModuleList(feature_map for _, feature_map in built.values()).requires_grad_(True)
        self.groups = dict.fromkeys(method.groups)
        for number, (label, (made, _)) in enumerate(built.items()):
            self.groups[label] = HeadGroup(f"maps.{number}", made.exact)

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
        """Attention over these keys, at the temperature `scale`.

        Args:
            query: (B, H, Lq, D).
            key: (B, Hkv, Lk, D), H a multiple of Hkv.
            value: (B, Hkv, Lk, Dv).
            scale: c, the factor of q·k.
            key_mask: (B, Lk) bool, True = attend, or None.
            is_causal: True to hide later keys, the last query being level with the last key.

        Returns:
            (B, H, Lq, Dv).

        Raises:
            ValueError: if the tensors have another number of heads or another width than the plan.
        """

        def attend(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """The heads of one group."""
            group = self.groups[name]
            if group is None:
                return softmax_attention(q, k, v, key_mask=key_mask, is_causal=is_causal, scale=scale)
            feature_map = self._map(group)
            q = rescale_query(feature_map, q, scale)
            attend_to = self.attend_to_parts or linear_attention
            return attend_to(
                q, k, v, feature_map, key_mask=key_mask, is_causal=is_causal, enable_gqa=True, exact=group.exact
            )

        return self._distribute(query, key, value, attend)

    def advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: LayerState | None,
        *,
        scale: float,
        key_mask: Tensor | None = None,
    ) -> LayerAttended:
        """Causal attention over the state's keys and these, and the state after them.

        Args:
            query, key, value, scale, key_mask: as in `forward`, one query per new key.
            state: of the tokens before; None for none.

        Returns:
            The output (B, H, L, Dv) and the new state: constant in the number of tokens but for heads with softmax, of
            which it keeps the keys and values.
        """
        if self.attend_to_parts is not None:
            raise ValueError(
                f"{self.module_name} has a part of each sequence (linattn.hf.context_parallel), and a cache goes on "
                "from whole ones; pass use_cache=False"
            )
        parts: dict[str, Any] = {}

        def attend(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """The heads of one group, from their part of the state."""
            group, part = self.groups[name], None if state is None else state.parts[name]
            if group is None:
                assert part is None or isinstance(part, KeptTokens)
                parts[name] = kept = extended(part, KeptTokens(k, v, key_mask))
                return softmax_attention(q, kept.key, kept.value, key_mask=kept.key_mask, is_causal=True, scale=scale)
            assert part is None or isinstance(part, State)
            feature_map = self._map(group)
            q = rescale_query(feature_map, q, scale)
            out, parts[name] = linear_attention_with_state(
                q, k, v, feature_map, part, key_mask=key_mask, enable_gqa=True, exact=group.exact
            )
            return out

        return LayerAttended(self._distribute(query, key, value, attend), LayerState(parts))

    @property
    def feature_maps(self) -> list[FeatureMap]:
        """The map of all heads, or those of a plan's methods."""
        found = (self._map(group) for group in self.groups.values() if group is not None)
        return [feature_map for feature_map in found if feature_map is not None]

    @property
    def depends_on_cuts(self) -> bool:
        """True if causal calls over all keys are not those of a stream: each decides what is merged, or heavy."""
        return any(rule.num_merged or rule.num_heavy for rule in self.rules)

    @property
    def rules(self) -> list[Exact]:
        """What is attended to exactly in each group, or merged."""
        found = (group.exact for group in self.groups.values() if group is not None)
        return [rule for rule in found if rule is not None]

    @property
    def summary(self) -> str:
        """The map, the merged keys, or how many heads have which method."""
        if self.plan is not None:
            return self.plan.summary
        group = self.groups[ALL_HEADS]
        if self.feature_map is None and group is not None and group.exact is not None:
            return group.exact.label
        return " ".join(repr(self.feature_map).split())

    def extra_repr(self) -> str:
        """A plan's methods, or merged keys; a map of all heads is shown as a part."""
        has_map = self.plan is None and self.feature_map is not None
        return "" if has_map else self.summary

    def _distribute(
        self, query: Tensor, key: Tensor, value: Tensor, attend: Callable[[str, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """The outputs of all groups; tensors of a single one are passed on as they are."""
        if self.plan is None:
            return attend(ALL_HEADS, query, key, value)
        return self.plan.distribute(query, key, value, attend)

    def _map(self, group: HeadGroup) -> FeatureMap | None:
        """The map of a group; None beside merged keys."""
        feature_map: FeatureMap | None = attrgetter(group.map_name)(self)
        return None if isinstance(feature_map, NoMap) else feature_map


def attention_of(module: nn.Module) -> LayerAttention | None:
    """What `linearize_` put into a module, if anything."""
    attention = getattr(module, ATTRIBUTE, None)
    return attention if isinstance(attention, LayerAttention) else None


def rescale_query(feature_map: FeatureMap | None, query: Tensor, scale: float) -> Tensor:
    """Queries (B, H, L, D) for which the map's own scale, D**-0.5 where it has none, is the model's: q·c/s."""
    own: float = getattr(feature_map, "scale", query.shape[-1] ** -0.5)
    return query if own == scale else query * (scale / own)


pytree.register_dataclass(LayerState, serialized_type_name="linattn.LayerState")
