"""Sequences one after the other in one tensor: attention of each by itself; letters as in attention/__init__.py."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from linattn.attention.checking import checked_for
from linattn.attention.functional import linear_attention, linear_attention_with_state
from linattn.attention.state import State
from linattn.feature_maps import FeatureMap
from linattn.softmax.checking import KeyWeights, Qkv, check_dtype
from linattn.softmax.partial import Attended
from linattn.softmax.row_groups import in_order
from linattn.softmax.tracing import is_fake


def linear_attention_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    cu_seqlens: Tensor,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`linear_attention` of each of several sequences that lie one after the other, without padding.

        out[T_n : T_(n+1)] = linear_attention(query[T_n : T_(n+1)], key[T_n : T_(n+1)], value[T_n : T_(n+1)])

    Sequences whose lengths are within a factor of two run as one batch, filled with masked tokens to the longest of
    them: one call of the backend for each power of two among the lengths, and the work of less than 2·T tokens, that
    of T where all are equally long. Tokens are copied into the batches and back. The lengths are read on the host,
    which waits for a GPU once.

    Args:
        query: (1, H, T, D): tokens of all sequences; there are as many queries as keys.
        key: (1, H, T, D), or (1, Hkv, T, D) with `enable_gqa`.
        value: (1, H, T, Dv), or (1, Hkv, T, Dv) with `enable_gqa`.
        feature_map: the kernel; one that takes statistics from the call takes them from each sequence.
        cu_seqlens: (N + 1,) int32 or int64, where sequences start, and T: 0 = T_0 ≤ T_1 ≤ … ≤ T_N = T. Equal
            neighbours are an empty sequence.
        key_mask: (1, T) bool, True = attend.
        key_bias: (1, Hkv or 1, T), floating: the logarithm of a factor on each key's weight.
        is_causal: query i sees keys j ≤ i of its own sequence.
        enable_gqa, backend: as in `linear_attention`.

    Returns:
        (1, H, T, Dv) in the query's dtype.

    Raises:
        TypeError, ValueError: as `linear_attention`; the batch is not 1, queries and keys differ in number, or
            `cu_seqlens` is not of this kind.

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> q, k, v = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0] * 3, [1.0, 3.0, 2.0], [8.0, 4.0, 7.0]))
        >>> linear_attention_packed(q, k, v, relu, torch.tensor([0, 2, 3])).flatten().tolist()
        [5.0, 5.0, 7.0]
    """
    packing = _Packing((query, key, value), (key_mask, key_bias), feature_map, cu_seqlens, enable_gqa=enable_gqa)
    calls = packing.calls(is_causal=is_causal, enable_gqa=enable_gqa, backend=backend)
    return packing.packed([linear_attention(*qkv, feature_map, **options) for qkv, options in calls])


def linear_attention_packed_with_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    cu_seqlens: Tensor,
    *,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    enable_gqa: bool = False,
    backend: str = "auto",
) -> Attended[State]:
    """Causal attention to packed sequences, and the state after each: prompts of any lengths, continued as one batch.

    Cost, arguments and errors are those of `linear_attention_packed`; maps that take statistics must be fitted.

    Returns:
        Attended(out, state): (1, H, T, Dv) in the query's dtype, and a State of N rows, one for each sequence in turn.

    Example:
        >>> import torch, linattn
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> q, k, v = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0] * 3, [1.0, 3.0, 2.0], [8.0, 4.0, 7.0]))
        >>> found = linear_attention_packed_with_state(q, k, v, relu, torch.tensor([0, 2, 3]))
        >>> found.out.flatten().tolist(), found.state.z.flatten().tolist()
        ([8.0, 5.0, 7.0], [4.0, 2.0])
    """
    packing = _Packing((query, key, value), (key_mask, key_bias), feature_map, cu_seqlens, enable_gqa=enable_gqa)
    calls = packing.calls(enable_gqa=enable_gqa, backend=backend)
    attended = [linear_attention_with_state(*qkv, feature_map, **options) for qkv, options in calls]
    S, z, m = (in_order(packing.groups, rows) for rows in zip(*(x.state.sums for x in attended), strict=True))
    return Attended(packing.packed([one.out for one in attended]), State(S, z, m, attended[0].state.built_with))


class _Packing:
    """A packed call as batches of sequences of similar lengths, and its results put in the order of the tokens."""

    def __init__(
        self, tokens: Qkv, weights: KeyWeights, feature_map: FeatureMap, cu_seqlens: Tensor, *, enable_gqa: bool
    ) -> None:
        *self._tokens, _ = checked_for(feature_map, tokens, *weights, enable_gqa=enable_gqa)
        self._mask, self._bias = weights
        self._starts = _checked_starts(cu_seqlens, *self._tokens[:2])
        groups: dict[int, list[int]] = {}
        for sequence in range(len(self._starts) - 1):
            groups.setdefault(self._length(sequence).bit_length(), []).append(sequence)
        self.groups = [tuple(group) for group in groups.values()]

    def calls(self, **options: Any) -> Iterator[tuple[Qkv, dict[str, Any]]]:
        """Of each power of two tokens (n, heads, L, ·), and the options with their mask (n, L) and bias (n, ·, L)."""
        for group in self.groups:
            longest = max(map(self._length, group))
            starts = self._index([self._starts[x] for x in group]).unsqueeze(-1)
            lengths = self._index([self._length(x) for x in group]).unsqueeze(-1)
            numbers, shape = torch.arange(longest, device=starts.device), (len(group), longest)
            # Places beyond a sequence repeat its last token.
            index = (starts + torch.minimum(numbers, lengths - 1)).flatten()
            query, key, value = (_rows(x, index, shape) for x in self._tokens)
            mask = None if self._mask is None else self._mask[0].index_select(0, index).view(shape)
            if any(self._length(x) < longest for x in group):
                in_sequence = numbers < lengths
                mask = in_sequence if mask is None else in_sequence & mask
            bias = None if self._bias is None else _rows(self._bias.unsqueeze(-1), index, shape).squeeze(-1)
            yield (query, key, value), {"key_mask": mask, "key_bias": bias, **options}

    def packed(self, outs: Sequence[Tensor]) -> Tensor:
        """(1, H, T, Dv) of the batches' outputs (n, H, L, Dv)."""
        flat = torch.cat([out.transpose(0, 1).flatten(1, 2) for out in outs], 1)
        # How far each sequence has moved.
        moves, first = [0] * (len(self._starts) - 1), 0
        for group, out in zip(self.groups, outs, strict=True):
            for row, sequence in enumerate(group):
                moves[sequence] = first + row * out.shape[2] - self._starts[sequence]
            first += len(group) * out.shape[2]
        lengths = self._index([self._length(x) for x in range(len(moves))])
        places = self._index(moves).repeat_interleave(lengths, output_size=self._starts[-1])
        places = places + torch.arange(self._starts[-1], device=places.device)
        return flat.index_select(1, places).unsqueeze(0)

    def _length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._starts[sequence + 1] - self._starts[sequence]

    def _index(self, places: Sequence[int]) -> Tensor:
        """Numbers where the tokens are."""
        return torch.tensor(places, dtype=torch.int64, device=self._tokens[0].device)


def _rows(x: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
    """Tokens (1, heads, T, ·) as rows (n, heads, L, ·)."""
    return torch.unflatten(x[0].index_select(1, index), 1, shape).transpose(0, 1)


def _checked_starts(cu_seqlens: Tensor, query: Tensor, key: Tensor) -> list[int]:
    """Where sequences start and the last one stops, what is not that refused."""
    if query.shape[0] != 1:
        raise ValueError(
            f"packed sequences lie one after the other in one batch row, got {query.shape[0]} rows; join them along "
            "the tokens, or use linear_attention for sequences that are rows of a batch"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"packed queries and keys must be as many, got {query.shape[2]} and {key.shape[2]}; use linear_attention "
            "for each sequence where they differ"
        )
    wanted = "a tensor (N + 1,) of int32 or int64: where sequences start, and the number of tokens"
    check_dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64), wanted, "convert it with cu_seqlens.int()")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens must be {wanted}, got the shape {tuple(cu_seqlens.shape)}; it is the running sum of the "
            "lengths, with 0 before it"
        )
    if not torch.compiler.is_compiling() and is_fake(cu_seqlens):
        raise ValueError(
            "cu_seqlens says how long sequences are, and a fake tensor has no values; trace shapes of one sequence, or "
            "of a padded batch with key_mask, by linear_attention"
        )
    starts: list[int] = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != key.shape[2] or starts != sorted(starts):
        shown = starts if len(starts) <= 8 else f"[{', '.join(map(str, starts[:4]))}, …, {starts[-1]}]"
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens, {key.shape[2]}, got {shown}; it is the running sum "
            "of the lengths, with 0 before it"
        )
    return starts
