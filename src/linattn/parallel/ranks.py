"""The ranks that each hold a part of a sequence, in the order of its tokens: two exchanges, and agreement before them.

Every rank calls its collectives in the same order, backward too, or all wait for ever. So each exchange takes, and
returns, the queries beside what it sends: outputs depend on those on every rank, hence autograd comes by on every rank,
the first one too, that reads nothing of what it was sent. Before a call each rank sends 24 bytes: a digest of it, and
how many queries and keys it holds, the first collective of every call, of one size whatever the call, so that ranks in
different calls meet in it. Where digests differ, the ranks send the calls themselves, and all raise one error. Letters
as in parallel/__init__.py.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from linattn.feature_maps import FeatureMap
from linattn.positions import Gates
from linattn.softmax.checking import Qkv


class Ranks(NamedTuple):
    """A dimension of a mesh, as one rank sees it."""

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device  # of what is sent

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ranks:
        """Ranks of a mesh of one dimension; others are refused, and sequences that torch has dealt out otherwise."""
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"mesh must be a torch.distributed.device_mesh.DeviceMesh, got {type(mesh).__name__}; make one with "
                'init_device_mesh("cpu", (num_ranks,))'
            )
        if mesh.ndim != 1:
            raise ValueError(
                f"a sequence is split over one dimension, got a mesh of {mesh.ndim} dimensions "
                f'{mesh.mesh_dim_names}; give one of them, as mesh["sequence"]'
            )
        _refuse_other_order()
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size(), torch.device(mesh.device_type))

    @property
    def is_last(self) -> bool:
        """Whether no part comes after this rank's."""
        return self.rank + 1 == self.size


def _refuse_other_order() -> None:
    """Refuse to work inside torch's `context_parallel` while that deals tokens out from both ends of a text."""
    # It replaces torch's attention, whose own function is a builtin; torch has no public name for either setting.
    if torch.compiler.is_compiling() or inspect.isbuiltin(torch.nn.functional.scaled_dot_product_attention):
        return
    at_work = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if at_work is not None and at_work._cp_options.enable_load_balance:
        raise ValueError(
            "torch's context_parallel gives each rank tokens from both ends of a text, wanted consecutive parts in the "
            "order of the ranks; leave its block, or switch its load balancer off before it begins: "
            "torch.distributed.tensor.experimental._attention._cp_options.enable_load_balance = False"
        )


class Gather(torch.autograd.Function):
    """Tensors of every rank, (B, …) -> (P, B, …), and the anchor, by one all-gather; backward one reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, x: Tensor, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """Send to all."""
        ctx.ranks = ranks
        gathered = x.new_empty(ranks.size * x.shape[0], *x.shape[1:])
        dist.all_gather_single(gathered, tied(x.contiguous(), anchor), group=ranks.group)
        return gathered.unflatten(0, (ranks.size, -1)), anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum over the readers."""
        grad, of_anchor = _first(*grads), grads[1]
        total = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_single(total, grad.flatten(0, 1).contiguous(), group=ctx.ranks.group)
        return None, total, tied(of_anchor, total)


class Exchange(torch.autograd.Function):
    """Numbers (Σ sent,), so many to each rank, and the numbers (Σ received,) from each; backward the way back."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, sent: tuple[int, ...], received: tuple[int, ...], x: Tensor, anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send to each."""
        ctx.ranks, ctx.sizes = ranks, (sent, received)
        return _swapped(ranks, tied(x, anchor), sent, received), anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send the gradients back."""
        grad, of_anchor = _first(*grads), grads[1]
        sent, received = ctx.sizes
        returned = _swapped(ctx.ranks, grad, received, sent)
        return None, None, None, returned, tied(of_anchor, returned)


def _first(grad: Tensor, of_anchor: Tensor) -> Tensor:
    """The tied gradient; refused with create_graph=True, for second derivatives would leave other ranks out."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError("attention across ranks has first derivatives only; give one rank whole sequences")
    return tied(grad, of_anchor)


def _swapped(ranks: Ranks, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """One all-to-all."""
    numbers = x.new_empty(sum(received))
    dist.all_to_all_single(numbers, x.contiguous(), list(received), list(sent), group=ranks.group)
    return numbers


def tied(x: Tensor, to: Tensor) -> Tensor:
    """The first tensor; to a compiler it depends on the second."""
    # Or it would move a collective of a constant into the forward pass, and leave out one whose result no gradient
    # needs; other ranks would wait for it.
    if not torch.compiler.is_compiling():
        return x
    return x + (0 * to.sum()).nan_to_num().to(x.dtype)


T = TypeVar("T")
# Numbers stay numbers: a compiled graph may leave them open.
Fields = dict[str, str | int]
_REFUSAL = "refusal"
_FIELD, _VALUE = "\x1e", "\x1f"


def fields_of_call(
    call: str,
    tokens: Qkv,
    feature_map: FeatureMap | None,
    window: int | None,
    weights: Sequence[Tensor | None] = (),
    **options: object,
) -> Fields:
    """Sizes, dtypes, map and options of a call on tokens (B, heads, L, width): all that no two ranks may have apart."""
    fields: Fields = {"call": call, **{name: str(value) for name, value in options.items()}}
    if not all(isinstance(x, Tensor) and not x.is_nested and x.ndim == 4 for x in tokens):
        return fields
    for name, x in zip(("query", "key", "value"), tokens, strict=True):
        fields |= {f"{name} dtype": str(x.dtype), f"{name} heads": x.shape[1], f"{name} width": x.shape[3]}
    fields["batch size"] = tokens[1].shape[0]
    if isinstance(feature_map, FeatureMap):
        fields["feature_map"] = feature_map.fingerprint()
    fields["window"] = str(window)
    followed = [*tokens, *weights, *(feature_map.parameters() if isinstance(feature_map, FeatureMap) else ())]
    follows = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in followed)
    return fields | {"gradients": "followed" if follows else "not followed"}


def kind_of_gates(gates: Gates | None) -> str:
    """Which gates there are."""
    if not isinstance(gates, Gates):
        return "None" if gates is None else type(gates).__name__
    return "log_forget" if gates.log_input is None else "log_forget and log_input"


def agreed(ranks: Ranks, fields: Fields, check: Callable[[], T], tokens: Sequence[Tensor] = ()) -> tuple[T, Tensor]:
    """The check of this rank's call, refused on all if on one, and the numbers of two tokens on each rank, (P, 2)."""
    if torch.compiler.is_compiling():
        return check(), exchange_fields(ranks, fields, _lengths(tokens))
    failure: Exception | None = None
    try:
        result = check()
        lengths = _lengths(tokens)
    # Whatever is wrong here, the other ranks wait for this one.
    except Exception as error:
        failure, lengths = error, (0, 0)
        fields = fields | {_REFUSAL: str(error)}
    every = exchange_fields(ranks, fields, lengths)
    if failure is not None:
        raise failure
    return result, every


def _lengths(tokens: Sequence[Tensor]) -> tuple[int, int]:
    """The queries and keys of tokens (B, heads, L, width)."""
    return (tokens[0].shape[2], tokens[1].shape[2]) if tokens else (0, 0)


def exchange_fields(ranks: Ranks, fields: Fields, lengths: tuple[int, int] = (0, 0)) -> Tensor:
    """Two lengths of every rank, (P, 2) int64, by one all-gather; fields that differ between ranks are refused."""
    if not torch.compiler.is_compiling():
        return _exchanged(ranks.group, fields, lengths, ranks.device)
    words = _FIELD.join([f"{name}{_VALUE}{value}" for name, value in fields.items() if isinstance(value, str)])
    numbers = {name: value for name, value in fields.items() if not isinstance(value, str)}
    like = torch.empty(0, dtype=torch.int64, device=ranks.device)
    group = ranks.group.group_name
    every: Tensor = _agree(like, words, _FIELD.join(numbers), list(numbers.values()), list(lengths), group, ranks.size)
    return every


@torch.library.custom_op("linattn::agree", mutates_args=())
def _agree(
    like: Tensor, words: str, names: str, numbers: Sequence[int], lengths: Sequence[int], group: str, size: int
) -> Tensor:
    """`exchange_fields`, opaque to a compiler: a graph cannot raise by what it was sent."""
    fields: Fields = {}
    for field in words.split(_FIELD):
        name, fields[name] = field.split(_VALUE, 1)
    fields |= zip(names.split(_FIELD) if names else (), numbers, strict=True)
    return _exchanged(_resolve_process_group(GroupName(group)), fields, lengths, like.device)


@_agree.register_fake
def _(
    like: Tensor, words: str, names: str, numbers: Sequence[int], lengths: Sequence[int], group: str, size: int
) -> Tensor:
    return like.new_empty(size, 2)


def _exchanged(group: dist.ProcessGroup, fields: Fields, lengths: Sequence[int], device: torch.device) -> Tensor:
    """Digests there and back, and what they are of where they differ."""
    said = repr(sorted(fields.items())).encode()
    digest = int.from_bytes(blake2b(said, digest_size=8).digest(), "big", signed=True)
    message = torch.tensor([digest, *lengths], dtype=torch.int64, device=device)
    size = dist.get_world_size(group)
    every = message.new_empty(size * 3)
    dist.all_gather_single(every, message, group=group)
    every = every.view(size, 3)
    if len(set(every[:, 0].tolist())) > 1:
        calls: list[Fields] = [{} for _ in range(size)]
        dist.all_gather_object(calls, fields, group=group)
        # Where every rank refuses its call each says so in its own words.
        if not all(_REFUSAL in call for call in calls):
            raise ValueError(_differences(calls))
    return every[:, 1:].clone()


def _differences(calls: list[Fields]) -> str:
    """Who has what, field by field."""
    refusals = [f"rank {n} refuses its call: {call[_REFUSAL]}" for n, call in enumerate(calls) if _REFUSAL in call]
    names = list(dict.fromkeys(name for call in calls for name in call if name != _REFUSAL))
    if len({call.get("call") for call in calls}) > 1:
        names = [name for name in names if all(name in call for call in calls)]
    differing = []
    for name in names:
        by_value: dict[str | int, list[int]] = {}
        for rank, call in enumerate(calls):
            by_value.setdefault(call.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            holders = [f"{_named(ranks)} {value}" for value, ranks in by_value.items()]
            differing.append(f"{name} ({', '.join(holders)})")
    return (
        f"every rank must make the same call on its part, got different ones: {'; '.join(differing + refusals)}; give "
        "all ranks the same arguments, and a map built from one seed with the same weights"
    )


def _named(ranks: list[int]) -> str:
    """Ranks in words."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
