"""Layers that are given a part of each sequence; letters as in parallel/__init__.py."""

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from linattn.feature_maps import FeatureMap
from linattn.nn import Attention, LinearAttention, SoftmaxAttention
from linattn.nn.attention import Heads
from linattn.nn.streams import KeptTokens
from linattn.parallel.functional import linear_attention
from linattn.parallel.parts import Part, Views, with_neighbours
from linattn.parallel.ranks import Fields, Ranks, agreed, exchange_fields, fields_of_call, kind_of_gates
from linattn.positions import gate_bias


@final
class ContextParallel(ParallelStyle):
    """Sequences split over ranks, for `torch.distributed.tensor.parallel.parallelize_module`.

        parallelize_module(model, mesh["sequence"], {"blocks.*.attention": ContextParallel()})

    The layers' input is then this rank's part (B, L, E) of each sequence, consecutive parts in the order of the ranks,
    and so is their output; parameters stay whole on every rank, and their gradients are this rank's share, to be summed
    over the mesh. Linear layers exchange states (`parallel.linear_attention`), whatever the length; softmax layers of a
    hybrid are sent all keys and values that they see, one all-to-all. Positions go on from rank to rank.

    Args:
        equal_lengths: whether all parts have the same number of tokens, so that layers with positions need not ask for
            them; with key masks they ask for a number per row from each rank. Others are refused.

    Raises:
        TypeError: the module is no `LinearAttention` or `SoftmaxAttention`.
        ValueError: the mesh has several dimensions; the ranks' layers differ, or their maps: other draws, or other
            weights, then or in a call.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from linattn.feature_maps import EluPlusOne
        >>> from linattn.nn import Block, LinearAttention, LinearLM
        >>> model = LinearLM(7, [Block(LinearAttention(8, 2, EluPlusOne(4), is_causal=True))])
        >>> text = torch.tensor([[1, 2, 3]])
        >>> whole = model(text)
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun starts more
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        >>> model = parallelize_module(model, mesh, {"blocks.*.attention": ContextParallel()})
        >>> bool(torch.allclose(model(text), whole, atol=1e-6))
        True
        >>> dist.destroy_process_group()
    """

    def __init__(self, *, equal_lengths: bool = False) -> None:
        super().__init__()
        self.equal_lengths = equal_lengths

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Tell a layer that the rest of its sequences is elsewhere."""
        ranks = Ranks.of(device_mesh)
        fields: Fields = {"layer": repr(module), "equal_lengths": str(self.equal_lengths)}
        feature_map = getattr(module, "feature_map", None)
        if isinstance(feature_map, FeatureMap):
            fields["feature_map"] = feature_map.fingerprint()
        layer, _ = agreed(ranks, fields, lambda: _checked(module))
        layer.parts = SequenceParts(device_mesh, ranks, self.equal_lengths)
        return module


@dataclass(frozen=True)
class SequenceParts:
    """How a layer attends to a sequence whose parts the ranks of a mesh hold."""

    mesh: DeviceMesh
    ranks: Ranks
    equal_lengths: bool

    def num_before(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """How many tokens each row has on earlier ranks, (B,), masked ones left out."""
        batch, length = x.shape[:2]
        if key_mask is None and self.equal_lengths:
            return torch.full((batch,), self.ranks.rank * length, device=x.device)
        asker = f"positions of a layer {'without' if key_mask is None else 'with'} key_mask"
        fields: Fields = {"call": asker, "batch size": batch, "width": x.shape[2]}
        lengths = exchange_fields(self.ranks, fields, (length, length))
        if key_mask is None:
            return lengths[: self.ranks.rank, 0].sum().expand(batch)
        num_tokens = key_mask.sum(1)
        every = num_tokens.new_empty(self.ranks.size * batch)
        dist.all_gather_single(every, num_tokens, group=self.ranks.group)
        return every.view(self.ranks.size, batch)[: self.ranks.rank].sum(0)

    def attend(self, layer: Attention, heads: Heads) -> Tensor:
        """This part's rows of the whole attention, (B, H, L, D)."""
        if isinstance(layer, SoftmaxAttention):
            return self._by_softmax(layer, heads)
        assert isinstance(layer, LinearAttention)
        options: dict[str, Any] = {"is_causal": layer.is_causal, "enable_gqa": True, "window": layer.window}
        options |= {"key_mask": heads.key_mask, "gates": heads.gates}
        return self.attend_linearly(*heads[:3], layer.feature_map, **options)

    def attend_linearly(
        self, query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap, **options: Any
    ) -> Tensor:
        """The rows of `linattn.parallel.linear_attention`, which takes the options."""
        return linear_attention(query, key, value, feature_map, mesh=self.mesh, lengths=self._lengths(key), **options)

    def _lengths(self, key: Tensor) -> tuple[int, ...] | None:
        """Every rank's number of keys, where it is known."""
        return (key.shape[2],) * self.ranks.size if self.equal_lengths else None

    def _by_softmax(self, layer: SoftmaxAttention, heads: Heads) -> Tensor:
        """Softmax over every key that is seen: they are all sent here."""
        lengths = self._lengths(heads.key)
        tokens, has_mask = (heads.query, heads.key, heads.value), heads.key_mask is not None
        options = {"is_causal": layer.is_causal, "gates": kind_of_gates(heads.gates), "has key_mask": has_mask}
        fields = fields_of_call("softmax layer", tokens, None, None, (), **options)
        fields |= {f"lengths[{rank}]": length for rank, length in enumerate(lengths or ())}
        every = exchange_fields(self.ranks, fields, (heads.query.shape[2], heads.key.shape[2]))
        every_length = every[:, 1].tolist() if lengths is None else lengths
        # As through a window over the whole sequence.
        views = Views.of(every_length, max(sum(every_length), 1), is_causal=layer.is_causal)
        mask = None
        if heads.key_mask is not None:
            mask = heads.key.new_zeros(heads.key_mask.shape).masked_fill(~heads.key_mask, -torch.inf).unsqueeze(1)
        part = with_neighbours(self.ranks, Part(heads.query, heads.key, heads.value, mask, heads.gates), views)
        if not layer.is_causal:
            past = KeptTokens(part.key, part.value, None if mask is None else part.key_mask)
            return layer._attend_to(part.query, past)
        before = part.keys(slice(views.starts[self.ranks.rank]))
        key_mask = None if mask is None else before.key_mask
        bias = None
        if before.gates is not None:
            bias = gate_bias(before.gates, key_mask=key_mask).key_bias.expand(before.key.shape[:3])
        past = KeptTokens(before.key, before.value, key_mask, bias)
        return layer._attend_with_state(heads._replace(query=part.query), past)[0]


def _checked(layer: nn.Module) -> Attention:
    """The layer; refuse what is no attention layer."""
    if not isinstance(layer, LinearAttention | SoftmaxAttention):
        raise TypeError(
            f"ContextParallel is for LinearAttention and SoftmaxAttention, got {type(layer).__name__}; name the "
            'attention layers, as {"blocks.*.attention": ContextParallel()}'
        )
    return layer
