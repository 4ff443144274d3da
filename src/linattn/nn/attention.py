"""The base of attention layers: from tokens to heads and back; letters as in nn/__init__.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from linattn.attention import State
from linattn.nn.streams import KeptTokens, Stream
from linattn.positions import Gate, Gates, Position, token_positions
from linattn.softmax.checking import check_count, check_dense, check_mask
from linattn.softmax.partial import Attended

QkNorm = Literal["rms", "layer"]
_NORMS: dict[str, type[nn.RMSNorm | nn.LayerNorm]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


class Heads(NamedTuple):
    """One call's tokens in heads: query (B, H, Lq, D), key and value (B, Hkv, Lk, D), and what weighs keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    gates: Gates | None


class Parts(Protocol):
    """How a layer attends where its tokens are a part of a sequence and the others are elsewhere."""

    def num_before(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """How many tokens each row has before this part, (B,) int64, masked ones left out."""

    def attend(self, layer: Attention, heads: Heads) -> Tensor:
        """Attention of this part's queries to the whole sequence: (B, H, L, D)."""


class Attention(nn.Module, ABC):
    """Multi-head attention over (B, L, E); the subclass says what attends.

    Abstract. Attributes are the arguments of `LinearAttention` by name, beside the projections `q_proj`, `k_proj`,
    `v_proj`, `o_proj`, and `g_proj` with an output gate. `parts` is None unless the layer is given parts of sequences,
    as by `linattn.parallel.ContextParallel`.
    """

    parts: Parts | None = None
    _keeps: type[State | KeptTokens]  # what its streams hold

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        is_causal: bool = False,
        positions: Position | None = None,
        gate: Gate | None = None,
        qk_norm: QkNorm | None = None,
        output_gate: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = _checked_head_dim(embed_dim, num_heads, num_kv_heads, head_dim)
        self.is_causal, self.qk_norm = is_causal, qk_norm
        wide, narrow = num_heads * self.head_dim, num_kv_heads * self.head_dim
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, wide, bias, **made)
        self.k_proj = nn.Linear(embed_dim, narrow, bias, **made)
        self.v_proj = nn.Linear(embed_dim, narrow, bias, **made)
        self.o_proj = nn.Linear(wide, embed_dim, bias, **made)
        self.g_proj = nn.Linear(embed_dim, wide, **made) if output_gate else None
        if qk_norm is not None and qk_norm not in _NORMS:
            raise ValueError(f"qk_norm must be one of {tuple(_NORMS)} or None, got {qk_norm!r}")
        self.q_norm, self.k_norm = (qk_norm and _NORMS[qk_norm](self.head_dim, **made) for _ in range(2))
        self._check_order(positions, gate)
        self.positions = positions if positions is None or device is None else positions.to(device)
        self.gate = gate if gate is None or device is None else gate.to(device)

    @property
    def memory_dim(self) -> int:
        """The width of the tokens attended to: E, or that of the memory an adopted layer was built for."""
        return self.k_proj.in_features

    def forward(self, x: Tensor, memory: Tensor | None = None, *, key_mask: Tensor | None = None) -> Tensor:
        """Attend to the tokens themselves, or to a memory.

        Args:
            x: (B, L, E).
            memory: (B, Lk, E), tokens to attend to in the place of x; for layers in which no order matters.
            key_mask: (B, Lk) bool, True = attend. A masked token takes no position, and contributes nothing to the
                others, whatever it holds, forward and backward.

        Returns:
            (B, L, E).

        Raises:
            TypeError: `key_mask` is not bool.
            ValueError: shapes do not fit; a memory is given to a layer that is causal, has positions or a gate.
        """
        self._check_tokens(x, memory, key_mask)
        source = _silenced(x if memory is None else memory, key_mask)
        x = source if memory is None else x
        if self.parts is not None:
            before = self.parts.num_before(x, key_mask) if self.positions is not None else None
            return self._merged(self.parts.attend(self, self._heads(x, source, key_mask, before)), x)
        return self._merged(self._attend(self._heads(x, source, key_mask, None)), x)

    def forward_with_state(
        self, x: Tensor, state: Stream | None = None, *, key_mask: Tensor | None = None
    ) -> Attended[Stream]:
        """Attend causally to the stream's tokens and these; prefill, chunks and single tokens are the same call.

        Args:
            x: (B, L, E), the next tokens.
            state: the stream so far, None for an empty one. It is not changed.
            key_mask: (B, L) bool, True = attend, of these tokens.

        Returns:
            Attended(out, state): (B, L, E), and the stream after them.

        Raises:
            TypeError: `state` is no stream of this kind of layer; `key_mask` is not bool.
            ValueError: the layer is not causal; shapes do not fit.
        """
        if not self.is_causal:
            raise ValueError("a stream needs a causal layer, got is_causal=False; build it with is_causal=True")
        if self.parts is not None:
            raise ValueError(
                "a stream is read by one process, and this layer is given parts of sequences; set its `parts` to None, "
                "or load its weights into another"
            )
        self._check_tokens(x, None, key_mask)
        if state is not None and not (isinstance(state, Stream) and isinstance(state.kept, self._keeps)):
            kind = f"a Stream of {type(state.kept).__name__}" if isinstance(state, Stream) else type(state).__name__
            raise TypeError(
                f"a {type(self).__name__} goes on from the Stream of a {self._keeps.__name__}, got {kind}; give each "
                "layer the state that it returned"
            )
        x = _silenced(x, key_mask)
        before, past = (None, None) if state is None else (state.num_before(x), state.kept)
        out, after = self._attend_with_state(self._heads(x, x, key_mask, before), past)
        number = torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
        number = number if key_mask is None else key_mask.sum(1)
        return Attended(self._merged(out, x), Stream(after, number if before is None else before + number))

    def _attend(self, heads: Heads) -> Tensor:
        """Attention of a whole sequence, (B, H, Lq, D): that of a stream that begins, unless overridden."""
        return self._attend_with_state(heads, None)[0]

    @abstractmethod
    def _attend_with_state(self, heads: Heads, past: Any) -> tuple[Tensor, State | KeptTokens]:
        """Attention after what was kept, None for nothing: (B, H, L, D), and what is kept now."""

    def _heads(self, x: Tensor, source: Tensor, key_mask: Tensor | None, before: Tensor | None) -> Heads:
        """The call's tokens in heads, at their positions after so many (B,) before, with their gates."""
        projected = self.q_proj(x), self.k_proj(source), self.v_proj(source)
        wide, narrow, of_values = (y.shape[-1] for y in projected)  # Some heads alone, where ranks share them.
        if narrow != of_values or narrow % self.head_dim or wide * self.num_kv_heads != narrow * self.num_heads:
            raise ValueError(
                f"projections of queries, keys and values are {wide}, {narrow} and {of_values} wide, wanted heads of "
                f"width {self.head_dim}, {self.num_heads} of queries for {self.num_kv_heads} of keys and values; split "
                "all three over ranks alike, each rank with entire groups of heads"
            )
        query, key, value = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)
        normed = _normed(self.q_norm, query), _normed(self.k_norm, key), value
        query, key, value = (y.transpose(1, 2) for y in normed)
        if self.positions is not None:
            query, key = self.positions(query, key, _places(x, key_mask, before))
        return Heads(query, key, value, key_mask, None if self.gate is None else self.gate(source))

    def _merged(self, out: Tensor, x: Tensor) -> Tensor:
        """Heads (B, H, L, D) back in tokens (B, L, E)."""
        merged = out.transpose(1, 2).flatten(-2)
        if self.g_proj is not None:
            merged = merged * torch.sigmoid(self.g_proj(x))
        projected: Tensor = self.o_proj(merged)
        return projected

    def _check_order(self, positions: Position | None, gate: Gate | None) -> None:
        """Refuse positions and gates of another layer."""
        for name, part, kind in (("positions", positions, Position), ("gate", gate, Gate)):
            if part is not None and not isinstance(part, kind):
                raise TypeError(
                    f"{name} must be a linattn.positions.{kind.__name__} or None, got {type(part).__name__}"
                )
        if positions is not None and positions.head_dim != self.head_dim:
            raise ValueError(
                f"positions were built for head_dim={positions.head_dim}, the layer has heads of width "
                f"{self.head_dim}; build them with head_dim={self.head_dim}"
            )
        if gate is not None and gate.num_heads != self.num_kv_heads:
            raise ValueError(
                f"the gate is one of {gate.num_heads} heads, the layer has {self.num_kv_heads} key/value heads; build "
                f"it with num_heads={self.num_kv_heads}"
            )
        if gate is not None and not self.is_causal:
            raise ValueError("a gate makes earlier tokens fade, got is_causal=False; build it with is_causal=True")

    def _check_tokens(self, x: Tensor, memory: Tensor | None, key_mask: Tensor | None) -> None:
        """Refuse tokens of another shape, and a memory where an order matters."""
        _check_shape("x", x, self.embed_dim)
        if memory is None and self.memory_dim != self.embed_dim:
            widths = f"of width {self.memory_dim}, its own tokens are {self.embed_dim} wide"
            raise ValueError(f"this layer attends to a memory {widths}; give memory")
        if memory is not None:
            _check_shape("memory", memory, self.memory_dim)
            ordered = {"is_causal": self.is_causal, "positions": self.positions, "gate": self.gate}
            if names := [name for name, value in ordered.items() if value not in (None, False)]:
                raise ValueError(
                    f"a memory has no order in common with the tokens that attend to it, got a layer with "
                    f"{' and '.join(names)}; build a layer without for it"
                )
            if memory.shape[0] != x.shape[0]:
                raise ValueError(
                    f"x and memory must share the batch size, got {x.shape[0]} and {memory.shape[0]}; expand one"
                )
        if key_mask is not None:
            check_mask(key_mask, x if memory is None else memory)

    def extra_repr(self) -> str:
        """The sizes, and what is not seen in the modules."""
        settings = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "is_causal")
        return ", ".join(f"{name}={getattr(self, name)}" for name in settings)


def _normed(norm: nn.RMSNorm | nn.LayerNorm | None, x: Tensor) -> Tensor:
    """The norm in its own precision, which autocast does not see to."""
    return x if norm is None else norm(x.to(norm.weight.dtype))


def _silenced(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Tokens with 0 for masked ones: were they NaN, so would be the projections' gradients."""
    return x if key_mask is None else torch.where(key_mask.unsqueeze(-1), x, 0)


def _places(x: Tensor, key_mask: Tensor | None, before: Tensor | None) -> Tensor:
    """The position of each token in its stream, (B, L) or (L,)."""
    if key_mask is not None:
        return token_positions(key_mask, 0 if before is None else before)[0].masked_fill(~key_mask, 0)  # they take none
    places = torch.arange(x.shape[1], device=x.device)
    return places if before is None else before.unsqueeze(1) + places


def _checked_head_dim(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    """The width of a head; sizes that do not fit are refused."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, size in (sizes if head_dim is None else {**sizes, "head_dim": head_dim}).items():
        check_count(name, size)
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}; or set head_dim")
    return embed_dim // num_heads if head_dim is None else head_dim


def _check_shape(name: str, x: Tensor, width: int) -> None:
    """Refuse anything but (B, L, width)."""
    check_dense(**{name: x})
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[-1] != width:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be (B, L, {width}), the batch first, got {got}")
