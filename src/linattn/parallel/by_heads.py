"""All tokens of some heads on each rank: what needs a whole sequence.

Letters: B batch, H query heads, Hkv key/value heads, L tokens of this rank (Lq, Lk), D head width, Dv value width, P
ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import linattn.attention as whole
from linattn.attention._check import checked_for
from linattn.attention.backends import check_backend
from linattn.attention.window import check_width
from linattn.feature_maps import FeatureMap
from linattn.parallel.agreement import agreed, fields_of_call
from linattn.parallel.collectives import exchange
from linattn.parallel.ranks import Ranks


def linear_attention_by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    *,
    mesh: DeviceMesh,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    window: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """`linattn.linear_attention` of a sequence of which each rank holds a part, by heads in place of states.

        tokens of all heads -> all tokens of Hkv/P heads -> attention -> tokens of all heads

    For what is decided over all tokens: maps that take statistics from the call. Two all-to-alls forward and two
    backward, of B·L·(H·D + Hkv·(D + Dv) + H·Dv)/P numbers to each other rank: they grow with the sequence, where
    `linear_attention` sends states of constant size. One all-gather of 24 bytes goes before. A mask or a bias travels
    beside the keys, and 16-bit tokens with it in its own wider dtype.

    Args:
        query, key, value, key_mask, key_bias, is_causal, enable_gqa: as in `parallel.linear_attention`.
        feature_map: the kernel, the same on every rank, one set of parameters for all heads.
        mesh: one dimension, whose number of ranks divides the key/value heads.
        window, backend: as in `linattn.linear_attention`.

    Returns:
        (B, H, Lq, Dv): the rows of this rank's queries.

    Raises:
        TypeError, ValueError: as `linattn.linear_attention`; the ranks' calls differ; the ranks do not divide the
            key/value heads, or the map has parameters for each head.

    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses, arXiv 2309.14509), section 3.
    """
    ranks, parts = Ranks.of(mesh), (query, key, value)

    def check() -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        check_backend(backend)
        if window is not None:
            check_width(window)
        checked_tokens = checked_for(feature_map, parts, key_mask, key_bias, enable_gqa=enable_gqa)
        _check(ranks, key.shape[1], feature_map)
        return checked_tokens

    weights = [name for name, x in (("key_mask", key_mask), ("key_bias", key_bias)) if x is not None]
    options = {"is_causal": is_causal, "enable_gqa": enable_gqa, "backend": backend}
    options["weights of keys"] = weights or None
    fields = fields_of_call("parallel.linear_attention_by_heads", parts, feature_map, window, [key_bias], **options)
    (query, key, value, bias), every = agreed(ranks, fields, check, parts)
    num_queries, num_keys = (tuple(lengths) for lengths in every.T.tolist())
    tokens = [query, key, value]
    if bias is not None:
        tokens.append(bias.unsqueeze(-1).expand(-1, key.shape[1], -1, -1))
    lengths = [num_queries] + [num_keys] * (len(tokens) - 1)
    query, key, value, *rest = _to_heads(ranks, tokens, lengths)
    out = whole.linear_attention(
        query,
        key,
        value,
        feature_map,
        key_bias=rest[0].squeeze(-1) if rest else None,
        is_causal=is_causal,
        enable_gqa=True,
        window=window,
        backend=backend,
    )
    return _to_tokens(ranks, out, num_queries)


def _check(ranks: Ranks, num_kv_heads: int, feature_map: FeatureMap) -> None:
    """Refuse heads that cannot be dealt out, and a map that belongs to some of them."""
    if num_kv_heads % ranks.size:
        raise ValueError(
            f"heads are dealt out to {ranks.size} ranks, got {num_kv_heads} key/value heads; use a mesh whose size "
            "divides them"
        )
    if getattr(feature_map, "num_heads", None) is not None and ranks.size > 1:
        raise ValueError(
            f"{type(feature_map).__name__} has parameters for each of {num_kv_heads} key/value heads, of which a rank "
            "has some; build it with num_heads=None, or call parallel.linear_attention"
        )


def _to_heads(ranks: Ranks, tokens: list[Tensor], lengths: list[tuple[int, ...]]) -> list[Tensor]:
    """Tensors (B, H, L, ·) of all heads as (B, H/P, Σ L, ·), in one dtype's all-to-all."""
    dtypes = [x.dtype for x in tokens]
    dealt = [x.unflatten(1, (ranks.size, -1)) for x in tokens]
    sent = [torch.cat([x[:, reader].flatten() for x in dealt]) for reader in range(ranks.size)]
    shapes = [
        [(x.shape[0], x.shape[2], of[holder], x.shape[4]) for x, of in zip(dealt, lengths, strict=True)]
        for holder in range(ranks.size)
    ]
    received = [sum(torch.Size(shape).numel() for shape in of_holder) for of_holder in shapes]
    flat, _ = exchange(ranks, torch.cat(sent), [len(piece) for piece in sent], received, tokens[0])
    by_holder = [
        [
            part.view(shape)
            for part, shape in zip(piece.split([torch.Size(s).numel() for s in of_holder]), of_holder, strict=True)
        ]
        for piece, of_holder in zip(flat.split(received), shapes, strict=True)
    ]
    return [torch.cat(parts, 2).to(dtype) for parts, dtype in zip(zip(*by_holder, strict=True), dtypes, strict=True)]


def _to_tokens(ranks: Ranks, out: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Rows (B, H/P, Σ L, Dv) of some heads as this rank's (B, H, L, Dv)."""
    sent = [rows.flatten() for rows in out.split(list(lengths), 2)]
    shape = out.shape[0], out.shape[1], lengths[ranks.rank], out.shape[3]
    received = [torch.Size(shape).numel()] * ranks.size
    flat, _ = exchange(ranks, torch.cat(sent), [len(piece) for piece in sent], received, out)
    return torch.cat([rows.view(shape) for rows in flat.split(received)], 1)
