"""The state of a stream with merged keys, n tokens kept; letters as in kv_cache/__init__.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from linattn.kv_cache.config import MergedKV
from linattn.kv_cache.keys import MergedKeys
from linattn.kv_cache.state_checks import Sizes, check_tensors, checked_sizes
from linattn.softmax.attention import attend_to_all
from linattn.softmax.checking import DTYPES, check_dense, check_dtype, check_indices, check_soft_cap
from linattn.softmax.partial import Partial
from linattn.softmax.precision import outside_autocast
from linattn.softmax.row_groups import RowGroups
from linattn.softmax.tokens import StreamState, Tokens, register
from linattn.softmax.tracing import outside_inference


@dataclass(frozen=True, eq=False)
class MergedState(StreamState):
    """A KV cache of constant size: merged keys and values, the latest exact ones, and a sample of the queries.

    Immutable: every verb returns a new state, and holding an old one is a fork or a roll-back. `torch.save` writes it
    and `torch.load` reads it, with `weights_only` as by default; copies for other devices are made by `to`.

    Attributes:
        keys: what is kept, a `linattn.kv_cache.MergedKeys`; where rows of the batch began at different tokens, as
            left-padded ones do, that of each group of rows.

    Example:
        >>> import torch
        >>> from linattn import MergedKV, merged_attention_with_state
        >>> q, k, v = torch.ones(1, 1, 6, 1), torch.zeros(1, 1, 6, 1), torch.arange(6.0).view(1, 1, 6, 1)
        >>> out, state = merged_attention_with_state(q, k, v, MergedKV(1, 2, bits=None, num_sinks=0))
        >>> state.num_tokens, round(state.read(q[:, :, :1]).out.item(), 4)  # of 6 tokens; their mean
        (4, 2.5)
    """

    keys: MergedKeys | RowGroups[MergedKeys]

    # The width of keys, and the query heads of each.
    _fits: ClassVar[tuple[int, int] | None] = None

    @property
    def groups(self) -> tuple[MergedKeys, ...]:
        """Keys of each group of rows that began at the same token."""
        return self.keys.keys if isinstance(self.keys, RowGroups) else (self.keys,)

    @property
    def config(self) -> MergedKV:
        """The window, the number of merged keys, and their bits."""
        return self.groups[0].config

    @property
    def num_tokens(self) -> int:
        """How many keys and values it holds for each head at most, merged and exact."""
        groups = ((keys.sinks, *keys.coded, keys.merged, keys.recent) for keys in self.groups)
        return max(sum(part.bias.shape[2] for part in parts) for parts in groups)

    def tokens(self) -> Tokens:
        """All of them, dequantized: keys, values and biases (B, H, n, ·), -inf for free places."""
        self.checked_sizes()
        with outside_autocast(self.groups[0].recent.key.device):
            return self.keys.tokens()

    def read(self, query: Tensor, *, soft_cap: float | None = None) -> Partial:
        """Attention of queries over all tokens in the state; O(Lq·n·(D + Dv)).

        Args:
            query: (B, Hq, Lq, D), Hq a multiple of H: query heads share key/value heads in consecutive groups.
            soft_cap: as in `linattn.merged_attention`, that of the stream's calls.

        Returns:
            The partial result over the state's tokens, at the temperature D**-0.5, ready for `linattn.combine`.

        Raises:
            TypeError: `query` is no floating tensor.
            ValueError: shapes or devices do not fit the state; `soft_cap` is no finite number > 0.
        """
        check_dense(query=query)
        check_dtype("query", query, DTYPES, "a floating tensor", "convert it with .float()")
        sizes = self.checked_sizes()
        fits = query.ndim == 4 and query.shape[0] == sizes.batch and query.shape[-1] == sizes.head_dim
        if not fits or not sizes.heads or query.shape[1] % sizes.heads or query.device != sizes.device:
            raise ValueError(
                f"query must be (B={sizes.batch}, a multiple of {sizes.heads} heads, L, D={sizes.head_dim}) on "
                f"{sizes.device}, got {tuple(query.shape)} on {query.device}; give queries of the "
                "state's rows and heads"
            )
        grouped = query.unflatten(1, (sizes.heads, -1))
        with outside_autocast(query.device):
            tokens, cap = Tokens(*map(outside_inference, self.tokens())), check_soft_cap(soft_cap)
            return attend_to_all(grouped, tokens, sizes.head_dim**-0.5, cap).ungrouped()

    def select(self, indices: Tensor) -> MergedState:
        """The rows `indices` (1-D integer tensor) of the batch, in that order, copied: beams, forks, compaction."""
        indices = check_indices(indices, self.checked_sizes().batch)
        if isinstance(self.keys, RowGroups):
            return MergedState(self.keys.select(indices)).known_to_fit(self._fits)
        return self._each(lambda x: x.index_select(0, indices))

    def checked_sizes(self, head_dim: int | None = None, num_groups: int | None = None) -> Sizes:
        """The sizes of its tokens; refuse tensors that are not of its config, a width, and so many query heads."""
        sizes = checked_sizes(self.keys)
        head_dim = sizes.head_dim if head_dim is None else head_dim
        fits = self._fits is not None and self._fits[0] == head_dim and num_groups in (None, self._fits[1])
        if torch.compiler.is_compiling() or not fits:
            check_tensors(self.keys, head_dim, num_groups)
        return sizes

    def __repr__(self) -> str:
        """Shapes, dtype, device and the config, on one line."""
        first = self.groups[0].recent
        batch = sum(len(keys.recent.key) for keys in self.groups)
        return (
            f"MergedState(batch={batch}, heads={first.key.shape[1]}, tokens={self.num_tokens}, "
            f"head_dim={first.key.shape[-1]}, value_dim={first.value.shape[-1]}, {first.key.dtype}, "
            f"{first.key.device}, {self.config.label!r})"
        )

    def _each(self, change: Callable[[Tensor], Tensor]) -> MergedState:
        """The state with each of its tensors changed alike."""
        self.checked_sizes()
        return MergedState(self.keys.each(change)).known_to_fit(self._fits)


register(MergedState, lambda state: ([state.keys], None), lambda leaves, _: MergedState(*leaves))
