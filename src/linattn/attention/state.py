"""The state keys and values collapse into, and its verbs; letters as in attention/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from linattn.attention.backends import Call, choose
from linattn.attention.backends.backend import as_partial
from linattn.attention.checking import check_continues, check_map, check_tensors, checked_for
from linattn.attention.sums import Sums, apart_of, no_sums, relative_to, split_factor
from linattn.attention.window import WindowKeys, decayed
from linattn.feature_maps import FeatureMap
from linattn.softmax.attention import attend_to_all
from linattn.softmax.checking import DTYPES, TOKEN_DTYPES, check_dense, check_dtype, check_indices
from linattn.softmax.partial import Partial, combine
from linattn.softmax.precision import accumulation_dtype, outside_autocast
from linattn.softmax.row_groups import RowGroups
from linattn.softmax.tokens import StreamState, register
from linattn.softmax.tracing import outside_inference

WeighedKeys = tuple[Tensor, Tensor, Tensor | None]
"""Keys, values and the keys' biases."""


@dataclass(frozen=True, eq=False)
class State(StreamState):
    """All keys and values seen so far, in constant size.

        S = Σ_j φ(k_j) v_jᵀ · exp(-m),   z = Σ_j φ(k_j) · exp(-m)

    A monoid: `merge` is associative with `empty` as unit, and absorbing a ++ b is merging absorb(a) with absorb(b).
    So one pass, chunks, single steps and several machines are the same fold bracketed differently. Immutable: every
    verb returns a new state, and holding an old one is a fork or a roll-back. Memory R·(Dv + 1) numbers per head,
    float32 (float64 for float64 inputs), whatever the dtype of the tokens. `torch.save` writes it and `torch.load`
    reads it, with `weights_only` as by default; copies for other devices are made by `to`.

    Attributes:
        S: Σ φ(k)vᵀ·exp(-m): (B, H, R, Dv).
        z: Σ φ(k)·exp(-m): (B, H, R).
        m: (B, H, M): the exponents both are relative to, each for R/M features; a constant for gradients.
        built_with: the feature map's `fingerprint()`: its settings, draw and weights; a map with another is refused.
        window: the latest keys of a stream with a window, which are attended to exactly and are not in the sums, by
            groups of rows where these began at different tokens; None without a window.
        apart: (B, H) float64: the logarithm of a factor on all weights that `decay` keeps from `m`; None for 1.

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> state = State.empty(relu, batch_size=1, num_heads=1, value_dim=1)
        >>> state = state.absorb(relu, torch.tensor([[[[2.0], [1.0]]]]), torch.tensor([[[[3.0], [6.0]]]]))
        >>> state.S.item(), state.z.item()
        (12.0, 3.0)
        >>> state.read(relu, torch.tensor([[[[5.0]]]])).out.item()
        4.0
    """

    S: Tensor
    z: Tensor
    m: Tensor
    built_with: str
    window: WindowKeys | RowGroups[WindowKeys] | None = None
    apart: Tensor | None = None

    # The width of keys.
    _fits: ClassVar[int | None] = None

    @classmethod
    def empty(
        cls,
        feature_map: FeatureMap,
        *,
        batch_size: int,
        num_heads: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> State:
        """The state of no keys, the unit of `merge`: B = batch_size, H = num_heads (of keys), Dv = value_dim.

        Args:
            feature_map: the map it will be used with; a TypeError if it is no FeatureMap.
            batch_size, num_heads, value_dim: integers ≥ 0; a ValueError if not.
            dtype: of the tokens to come, a TypeError if no tokens have it; the state is kept in at least float32.
            device: where the sums live.
        """
        check_map(feature_map)
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be that of tokens, float16, bfloat16, float32 or float64, got {dtype!r}")
        for name, size in (("batch_size", batch_size), ("num_heads", num_heads), ("value_dim", value_dim)):
            if isinstance(size, bool) or not isinstance(size, int | torch.SymInt) or size < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {size!r}; give that of the tokens")
        sums = no_sums(feature_map, batch_size, num_heads, value_dim, accumulation_dtype(dtype), torch.device(device))
        return cls(*sums, feature_map.fingerprint())

    def absorb(
        self,
        feature_map: FeatureMap,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> State:
        """The state after these keys and values too; O(L·R·(D + Dv)) time, one block of features in memory.

        Args:
            feature_map: the map the state was built with.
            key: (B, H, L, D).
            value: (B, H, L, Dv), in the key's dtype.
            key_mask: (B, L) bool, True = absorb.
            key_bias: (B, H or 1, L), floating: the logarithm of a factor on each key's weight; -inf is a masked key.

        Raises:
            TypeError: tensors of another dtype.
            ValueError: another map or draw, shapes that do not fit the state, or a state with a window.
        """
        self._check(feature_map, key)
        _, key, value, bias = checked_for(feature_map, (key, key, value), key_mask, key_bias, enable_gqa=False)
        if self.window is not None:
            raise ValueError(
                "a state with a window keeps the latest keys of a stream apart from its sums, and absorb is of sums "
                "alone; call linear_attention_with_state, or flush the state first"
            )
        check_continues(self, key, value, feature_map, None)
        near, bias, apart = relative_to(self, bias, key.shape[2])
        return near.with_keys(feature_map, (key, value, bias), apart)

    def flush(self, feature_map: FeatureMap) -> State:
        """The state with the keys of its window in the sums too, hence one that merges; O(w·R·(D + Dv)).

        Raises:
            ValueError: another map or draw than the state was built with.
        """
        if self.window is None:
            return self
        check_map(feature_map)
        self.check_built_with(feature_map)
        self.check_tensors(feature_map, feature_map.head_dim)
        return self.with_keys(feature_map, self.window.tokens(), self.apart)

    def decay(self, log_factor: float | Tensor) -> State:
        """The state with all its keys' weights times exp(log_factor); O(R·Dv), a shift of m, hence without underflow.

            decay(merge(a, b)) = merge(decay(a), decay(b));   decay by f, then by g, is decay by f + g

        A query that reads the state alone gets what it got before, its log-normaliser `log_factor` higher; later keys
        weigh so much more beside these. By -inf it is the state of no keys. Thousands of factors add up without loss of
        digits, but where torch's trees take a state apart (`torch.func`, torch.export): there exponents take all of it.

        Args:
            log_factor: a number, or (B or 1, H or 1) for each key/value head, floating, finite or -inf; differentiable.

        Raises:
            TypeError, ValueError: if it is no such number or tensor, its shape is another, or a factor is NaN or +inf.

        Example:
            >>> import math, torch, linattn
            >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
            >>> state = State.empty(relu, batch_size=1, num_heads=1, value_dim=1)
            >>> key, query = torch.tensor([[[[1.0]]]]), torch.tensor([[[[1.0]]]])
            >>> state = state.absorb(relu, key, 8 * key).decay(math.log(0.5)).absorb(relu, key, 2 * key)
            >>> round(state.read(relu, query).out.item(), 4)  # (0.5·8 + 2)/(0.5 + 1)
            4.0
        """
        self.check_tensors()
        if not isinstance(log_factor, int | float):
            check_dtype("log_factor", log_factor, DTYPES, "a number or a floating tensor", "convert it with .double()")
        factor = torch.as_tensor(log_factor, dtype=torch.float64, device=self.m.device)
        batch, heads = self.m.shape[:2]
        if tuple(factor.shape) not in ((), (1, 1), (1, heads), (batch, 1), (batch, heads)):
            raise ValueError(
                f"log_factor must be a number or (B or 1, H or 1) with (B, H) = {(batch, heads)}, got "
                f"{tuple(factor.shape)}"
            )
        return self._decayed(*split_factor(torch.atleast_2d(factor), self))

    def merge(self, other: State) -> State:
        """The state of both sets of keys; O(R·Dv).

        Raises:
            TypeError: `other` is no State.
            ValueError: the states were built with different maps or draws, differ in shape, or have windows: two
                streams have no common window; `flush` them first.
        """
        if not isinstance(other, State):
            raise TypeError(f"merge takes another State, got {type(other).__name__}; build one with State.empty(…)")
        if self.window is not None or other.window is not None:
            raise ValueError(
                "states of streams with a window do not merge, since a window is the end of one stream; merge "
                "state.flush(feature_map) of each, which puts the keys of their windows into the sums"
            )
        if self.built_with != other.built_with:
            maps = f"{self.built_with} and {other.built_with}"
            raise ValueError(f"cannot merge states of different maps, got {maps}; build both with one map of one draw")
        for state in (self, other):
            state.check_tensors()
        for name in Sums._fields:
            x, y = getattr(self, name), getattr(other, name)
            if x.shape != y.shape or x.device != y.device:
                raise ValueError(
                    f"cannot merge states of shapes {tuple(x.shape)} and {tuple(y.shape)} of {name}, on {x.device} and "
                    f"{y.device}; merge states of one batch, of as many heads and of one value width, on one device"
                )
        apart = None
        if self.apart is not None or other.apart is not None:
            apart = torch.maximum(apart_of(self), apart_of(other))
            apart = torch.where(apart == -torch.inf, 0, apart)
        first, second = (x.without(apart)._relative_sums for x in (self, other))
        return State(*first.merge(second), self.built_with, apart=apart)

    def read(self, feature_map: FeatureMap, query: Tensor) -> Partial:
        """Attention of queries over all keys in the state; O(L·R·(D + Dv)).

            out = φ(q)ᵀS / φ(q)ᵀz

        Args:
            feature_map: the map the state was built with.
            query: (B, Hq, L, D), Hq a multiple of H: query heads share key/value heads in consecutive groups.

        Returns:
            The partial result over the state's keys, ready for `combine`.

        Raises:
            ValueError: another map or draw, or shapes or a dtype that do not fit the state.
        """
        self._check(feature_map, query)
        head_dim = feature_map.head_dim
        self.check_tensors(feature_map, head_dim)
        batch, heads = self.S.shape[:2]
        fits = query.ndim == 4 and query.shape[0] == batch and query.shape[-1] == head_dim
        if not fits or not heads or query.shape[1] % heads:
            raise ValueError(
                f"query must be (B={batch}, a multiple of {heads} heads, L, D={head_dim}), got {tuple(query.shape)}; "
                "give queries of the state's rows and heads"
            )
        if query.dtype not in TOKEN_DTYPES[self.S.dtype]:
            raise ValueError(f"the state is kept in {self.S.dtype}, got queries of {query.dtype}; convert these")
        if self.S.device != query.device:
            raise ValueError(f"the state is on {self.S.device}, the queries on {query.device}; call state.to(…)")
        grouped: Tensor = query.unflatten(1, (heads, -1))
        with outside_autocast(query.device):
            # Backends are asked about a call: one with no keys but the state's.
            call = Call.causal(feature_map, grouped, query[:, :heads, :0], query[:, :heads, :0])
            call = call.weighed(is_part=self.window is not None)
            part = as_partial(call, choose("auto", call).read(call, self._relative_sums))
            if self.window is not None:
                part = combine(attend_to_all(call.query, self.window.tokens(), feature_map.scale), part)
        return part.times(self.apart).ungrouped(query.dtype)

    def select(self, indices: Tensor) -> State:
        """The rows `indices` (1-D integer tensor) of the batch, in that order, copied: beams, forks, compaction."""
        self.check_tensors()
        indices = check_indices(indices, len(self.S))
        groups = self.window.select(indices) if isinstance(self.window, RowGroups) else None
        return self._each(lambda x: x.index_select(0, indices), groups)

    def __repr__(self) -> str:
        """Shapes, dtype, device and the map, on one line."""
        batch, heads, num_features, value_dim = self.S.shape
        keys = self.window.keys[0] if isinstance(self.window, RowGroups) else self.window
        window = "" if keys is None else f", window={keys.width}"
        return (
            f"State(batch={batch}, heads={heads}, features={num_features}, value_dim={value_dim}{window}, "
            f"{self.S.dtype}, {self.S.device}, built_with={self.built_with})"
        )

    def _each(self, change: Callable[[Tensor], Tensor], window: Any = None) -> State:
        """The state with each of its tensors changed alike, the keys of its window unless others are given."""
        window = window or (self.window and self.window.each(change))
        apart = None if self.apart is None else change(self.apart)
        return State(*Sums(*map(change, self._relative_sums)), self.built_with, window, apart).known_to_fit(self._fits)

    def without(self, apart: Tensor | None) -> State:
        """Move all but so much, (B, H), of the factor into exponents."""
        if self.apart is None and apart is None:
            return self
        before = self.m.new_zeros(()) if self.apart is None else self.apart
        rest = before if apart is None else before - apart
        return self._decayed(rest.to(self.m.dtype), apart)

    def _decayed(self, log_factor: Tensor, apart: Tensor | None) -> State:
        """All weights times exp(log_factor), by the exponents; what is apart is given."""
        window = None if self.window is None else decayed(self.window, log_factor)
        return State(*self._relative_sums.decay(log_factor), self.built_with, window, apart).known_to_fit(self._fits)

    @property
    def sums(self) -> Sums:
        """The sums and their exponent, as the backends take them."""
        return self.without(None)._relative_sums

    @property
    def _relative_sums(self) -> Sums:
        """Sums beside which a factor may stand apart, for gradients too if they were made under inference mode."""
        return Sums(*map(outside_inference, (self.S, self.z, self.m)))

    def check_built_with(self, feature_map: FeatureMap) -> None:
        """Refuse another map, draw or weights than those the state was built with."""
        fingerprint = feature_map.fingerprint()
        if self.built_with != fingerprint:
            raise ValueError(
                f"the state was built with {self.built_with}, got {fingerprint}; features of different maps, draws or "
                "weights do not mix: use the map it was built with, or rebuild the state"
            )

    def check_tensors(self, feature_map: FeatureMap | None = None, head_dim: int | None = None) -> None:
        """Refuse a state whose tensors do not belong together, or are not those of a map and a width of keys."""
        if torch.compiler.is_compiling() or self._fits is None or head_dim not in (None, self._fits):
            check_tensors(self, feature_map, head_dim)

    def with_keys(
        self, feature_map: FeatureMap, keys: WeighedKeys, apart: Tensor | None = None, *, backend: str = "auto"
    ) -> State:
        """The state with these keys, checked, in the sums, and no window; a factor apart is on all of them."""
        key, value, bias = keys
        call = Call.causal(feature_map, key.unsqueeze(2), key, value, bias)
        with outside_autocast(key.device):
            return State(*choose(backend, call).absorb(call, self._relative_sums), self.built_with, apart=apart)

    def _check(self, feature_map: FeatureMap, x: Tensor) -> None:
        """Refuse another map, and what is no tensor."""
        check_map(feature_map)
        self.check_built_with(feature_map)
        check_dtype("tokens", x, DTYPES, "a floating tensor", "convert them with .float()")
        check_dense(tokens=x)


def _leaves(state: State) -> tuple[list[Any], str]:
    """The tensors and the keys of the window, with no factor apart, and the map's fingerprint."""
    near = state.without(None)
    return [near.S, near.z, near.m, *([near.window] if near.window else [])], near.built_with


def _from_leaves(leaves: Iterable[Any], built_with: str) -> State:
    """A state from what torch's tree utilities took out of one."""
    S, z, m, *window = leaves
    return State(S, z, m, built_with, *window)


register(State, _leaves, _from_leaves)
