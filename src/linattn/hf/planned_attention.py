"""A method per head in the place of one layer's softmax.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from linattn.attention import State, linear_attention_with_state, softmax_attention
from linattn.feature_maps import FeatureMap
from linattn.hf.kernel_attention import rescale_query
from linattn.hf.planned_state import KeptKeys, PlannedState
from linattn.planning import Plan
from linattn.planning.methods import Method
from linattn.planning.plans import EXACT


class PlannedAttended(NamedTuple):
    """What `PlannedAttention.advance` returns.

    Attributes:
        out: (B, H, L, Dv).
        state: after the last key.
    """

    out: Tensor
    state: PlannedState


class PlannedAttention(nn.Module):
    """What `linearize_` puts into an attention module that attends by a plan, as its `linear_attention`.

        out[h] = the plan's method for head h, at the temperature c the model asks for;  softmax for "exact" heads

    Heads of one method run together, on one map. Queries enter it multiplied by c/s, s the plan's scale, as in
    `KernelAttention`. Under grouped queries every query head takes its key head's keys for itself, since heads of a
    group may differ in method. The maps are parts of the module: they move and are cast with the model, and their
    tensors are in its `state_dict`. Those of a plan with fitted tensors never learn from a call.

    Cost: the sum of the heads' `flops_per_token`, times L; exact heads are quadratic in L.

    Attributes:
        plan: the methods, without the fitted tensors, which are in `maps`.
        maps: one per method that is not "exact", in the order of `plan.groups`.
        module_name: qualified name of the attention module in the model.

    Args:
        plan: of the layer, as `linattn.plan` makes it.
        module_name: qualified name of the attention module in the model.

    Raises:
        ValueError: if a method cannot be read or built.

    Example:
        >>> import torch
        >>> from linattn.planning import HeadPlan
        >>> heads = tuple(HeadPlan(name, 0.0, None, 0.5, 10, 20) for name in ("exact", "Taylor(order=1)"))
        >>> kernel = PlannedAttention(Plan(heads, 1, 2, 1.0, False, 2), "layer.0")
        >>> q, k = torch.ones(1, 2, 1, 1), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
        >>> out = kernel(q, k, torch.eye(2).view(1, 1, 2, 2), scale=1.0)[0, :, 0]
        >>> [[round(weight, 4) for weight in head] for head in out.tolist()]  # 1 : e, and 1 + 0 : 1 + 1
        [[0.2689, 0.7311], [0.3333, 0.6667]]

    Source: `linattn.planning.Plan`.
    """

    def __init__(self, plan: Plan, module_name: str) -> None:
        super().__init__()
        built = plan.build()
        self.plan = replace(plan, fitted={})
        self.module_name = module_name
        # Methods are built frozen, to be measured; in a model the weights of a learned map train with the model's.
        self.maps = nn.ModuleList(feature_map for _, feature_map in built.values()).requires_grad_(True)
        self._methods = {label: (number, method) for number, (label, (method, _)) in enumerate(built.items())}

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
        """Attention over these keys, each head by its method.

        Args:
            query: (B, H, Lq, D).
            key: (B, Hkv, Lk, D), H a multiple of Hkv.
            value: (B, Hkv, Lk, Dv).
            scale: c, the factor of q·k.
            key_mask: (B, Lk) bool, True = attend, or None.
            is_causal: whether later keys are hidden, the last query being level with the last key.

        Returns:
            (B, H, Lq, Dv).

        Raises:
            ValueError: if the tensors have another number of heads or another width than the plan.
        """

        def answer(label: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """The heads of one method."""
            if label == EXACT:
                return softmax_attention(q, k, v, key_mask=key_mask, is_causal=is_causal, scale=scale)
            method, feature_map = self._method(label)
            q = rescale_query(feature_map, q, scale)
            return method.attend(feature_map, q, k, v, key_mask=key_mask, is_causal=is_causal)

        return self.plan.distribute(query, key, value, answer)

    def advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: PlannedState | None,
        *,
        scale: float,
        key_mask: Tensor | None = None,
    ) -> PlannedAttended:
        """Causal attention over the state's keys and these, and the state after them.

        Args:
            query: (B, H, L, D), one per new key.
            key: (B, Hkv, L, D).
            value: (B, Hkv, L, Dv).
            state: what was seen before; None for nothing.
            scale: c, the factor of q·k.
            key_mask: (B, L) bool, True = attend, or None.

        Returns:
            The output (B, H, L, Dv) and the new state: constant in the number of tokens but for exact heads, of which
            it keeps the keys and values.
        """
        states: dict[str, State] = {}
        kept = None if state is None else state.kept

        def answer(label: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """The heads of one method, from their part of the state."""
            nonlocal kept
            if label == EXACT:
                kept = KeptKeys(k, v, key_mask) if kept is None else kept.extended(k, v, key_mask)
                return softmax_attention(q, kept.key, kept.value, key_mask=kept.key_mask, is_causal=True, scale=scale)
            method, feature_map = self._method(label)
            out, states[label] = linear_attention_with_state(
                rescale_query(feature_map, q, scale),
                k,
                v,
                feature_map,
                None if state is None else state.states[label],
                key_mask=key_mask,
                exact=method.exact,
            )
            return out

        out = self.plan.distribute(query, key, value, answer)
        return PlannedAttended(out, PlannedState(states, kept))

    def _method(self, label: str) -> tuple[Method, FeatureMap]:
        """A method that is not "exact", with its map."""
        number, method = self._methods[label]
        feature_map = self.maps[number]
        assert isinstance(feature_map, FeatureMap)
        return method, feature_map

    def extra_repr(self) -> str:
        """The methods."""
        return self.plan.summary
