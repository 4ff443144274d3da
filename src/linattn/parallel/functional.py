"""The op on parts of a sequence: absorb, exchange states, fold on; letters as in parallel/__init__.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from linattn.attention import State
from linattn.attention.backends import check_backend
from linattn.attention.window import check_window
from linattn.feature_maps import FeatureMap
from linattn.parallel import parts
from linattn.parallel.parts import Part, gathered, joined
from linattn.parallel.ranks import Ranks, agreed, fields_of_call, kind_of_gates, tied
from linattn.positions import Gates


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feature_map: FeatureMap,
    *,
    mesh: DeviceMesh,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    gates: Gates | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    window: int | None = None,
    lengths: Sequence[int] | None = None,
    backend: str = "auto",
) -> Tensor:
    """`linattn.linear_attention` of a sequence of which each rank holds a part.

        causal: rank r goes on from state_0 ∘ … ∘ state_{r-1};   else every rank reads state_0 ∘ … ∘ state_{P-1}

    The parts are consecutive, in the order of the ranks, of any lengths, 0 included. Each rank absorbs its own keys,
    all exchange their states by one all-gather, and in the backward pass the states' gradients by one reduce-scatter:
    B·Hkv·(R·Dv + R + M) numbers to each other rank, whatever the length. Causally keys are absorbed once more than on
    one machine, before the fold that reads them. Every rank of the mesh must make the same calls, of tensors that all
    require gradients or none do: one all-gather of 24 bytes tells so before anything else is sent. All must call
    backward through its output, be it empty. A parameter's gradient is this rank's share: sum them over
    the mesh, as data parallelism does.

    Args:
        query: (B, H, Lq, D), this rank's part.
        key: (B, H, Lk, D), or (B, Hkv, Lk, D) with `enable_gqa`.
        value: (B, H, Lk, Dv), or (B, Hkv, Lk, Dv) with `enable_gqa`.
        feature_map: the kernel, the same on every rank: built from one seed, with the same weights.
        mesh: one dimension, whose ranks hold the parts.
        key_mask: (B, Lk) bool, True = attend, of these keys.
        key_bias: (B, Hkv or 1, Lk), floating, of these keys.
        gates: of these tokens; each rank's make all that came before fade. For causal calls without `key_bias`.
        is_causal: whether a query sees its own and earlier keys alone, those of earlier ranks among them.
        enable_gqa: as in `linattn.linear_attention`.
        window: width of an exact window, None for none. Its blocks are counted from the first token of rank 0; a rank
            is sent the blocks next to its part by one collective more. Rows are padded on the right: in a graph, which
            cannot look at a mask, one that begins with masked tokens counts its blocks from them.
        lengths: how many keys each rank holds, in order, for a window; None: they come with the ranks' digests, which a
            graph without breaks cannot read.
        backend: as in `linattn.linear_attention`.

    Returns:
        (B, H, Lq, Dv): the rows of this rank's queries.

    Raises:
        TypeError, ValueError: as `linattn.linear_attention`; the mesh has several dimensions; queries and keys of a
            causal call differ in number; the ranks' calls, maps or weights differ, or one refuses its own, which is
            told on all of them; the map takes statistics from the call.

    Example:
        >>> import torch, linattn
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> q, k, v = (torch.tensor(x).view(1, 1, -1, 1) for x in ([1.0, 1.0], [1.0, 3.0], [8.0, 4.0]))
        >>> linear_attention(q, k, v, relu, mesh=mesh, is_causal=True).flatten().tolist()
        [8.0, 5.0]
        >>> dist.destroy_process_group()

    Source: Sun et al. 2025 (LASP-2, arXiv 2502.07563), algorithms 1 and 2, for one all-gather of states.
    """
    ranks, tokens, weights = Ranks.of(mesh), (query, key, value), (key_mask, key_bias)

    def check() -> Part:
        check_backend(backend)
        part = Part.checked(tokens, feature_map, weights, gates, is_causal=is_causal, enable_gqa=enable_gqa)
        if window is not None:
            check_window(window, feature_map, part.query.shape[2], part.key.shape[2], is_causal=is_causal)
        if lengths is not None and (len(lengths) != ranks.size or lengths[ranks.rank] != key.shape[2]):
            raise ValueError(
                f"lengths must say how many keys each of {ranks.size} ranks holds, and rank {ranks.rank} holds "
                f"{key.shape[2]}, got {tuple(lengths)}"
            )
        if window is not None and not any((lengths or ())[: ranks.rank]) and (lengths or ranks.rank == 0):
            parts.refuse_left_padding(part)
        return part

    options = {"is_causal": is_causal, "enable_gqa": enable_gqa, "gates": kind_of_gates(gates), "backend": backend}
    options["lengths"] = "None" if lengths is None else "given"
    followed = key_bias, *(gates if isinstance(gates, Gates) else ())
    fields = fields_of_call("parallel.linear_attention", tokens, feature_map, window, followed, **options)
    fields |= {f"lengths[{rank}]": int(length) for rank, length in enumerate(lengths or ())}
    part, lengths_of_ranks = agreed(ranks, fields, check, tokens)
    part = part._replace(query=tied(part.query, lengths_of_ranks), key=tied(part.key, lengths_of_ranks))
    if window is not None:
        every_length = lengths_of_ranks[:, 1].tolist() if lengths is None else lengths
        views = parts.Views.of(every_length, window, is_causal=is_causal)
        attend = parts.attend_causally if is_causal else parts.attend_both_ways
        return attend(ranks, parts.with_neighbours(ranks, part, views), views, feature_map, window, backend)
    # Nobody comes after the last rank.
    sent = part.keys(slice(0)) if is_causal and ranks.is_last else part
    (every,), query = gathered(ranks, [sent.absorbed(feature_map, backend)], part.query)
    part, nothing = part._replace(query=query), part.nothing(feature_map)
    if is_causal:
        return part.attended(feature_map, joined(every[: ranks.rank], nothing), None, backend)
    return part.read(feature_map, joined(every, nothing), backend)


def absorb(
    feature_map: FeatureMap,
    key: Tensor,
    value: Tensor,
    *,
    mesh: DeviceMesh,
    key_mask: Tensor | None = None,
    key_bias: Tensor | None = None,
    gates: Gates | None = None,
) -> State:
    """The state of all ranks' keys, on every rank: a prefix that each goes on from.

    One all-gather forward, after one of 24 bytes, one reduce-scatter backward: B·Hkv·(R·Dv + R + M) numbers per rank.

    Args:
        feature_map: the kernel, the same on every rank.
        key: (B, Hkv, L, D), this rank's part.
        value: (B, Hkv, L, Dv).
        mesh: one dimension, whose ranks hold the parts in order.
        key_mask: (B, L) bool, True = attend.
        key_bias: (B, Hkv or 1, L), floating.
        gates: of these tokens; the state's weights are relative to the last one.

    Returns:
        The state, the same on every rank: its sums are added in the order of the ranks.

    Raises:
        TypeError, ValueError: as `linear_attention`.

    Example:
        >>> import torch, linattn
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        >>> relu = linattn.feature_maps.Relu(1, floor=0.0)
        >>> state = absorb(relu, torch.ones(1, 1, 2, 1), torch.tensor([[[[2.0], [6.0]]]]), mesh=mesh)
        >>> state.S.item(), state.z.item()
        (8.0, 2.0)
        >>> dist.destroy_process_group()
    """
    ranks, tokens, weights = Ranks.of(mesh), (key, key, value), (key_mask, key_bias)

    def check() -> Part:
        return Part.checked(tokens, feature_map, weights, gates, is_causal=gates is not None, enable_gqa=True)

    followed = key_bias, *(gates if isinstance(gates, Gates) else ())
    fields = fields_of_call("parallel.absorb", tokens, feature_map, None, followed, gates=kind_of_gates(gates))
    part, lengths = agreed(ranks, fields, check, tokens)
    (every,), _ = gathered(ranks, [part.absorbed(feature_map, "auto")], tied(key, lengths))
    return joined(every, part.nothing(feature_map))
