"""A feature map with the tensors it uses in one call; letters as in attention/__init__.py."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from linattn.feature_maps import FeatureMap, GroupedFeatureMap
from linattn.feature_maps.random_base import check_not_redrawn
from linattn.softmax.precision import accumulation_dtype, outside_autocast


class BoundMap(NamedTuple):
    """A map, and the tensors that take the place of its own in one call."""

    feature_map: FeatureMap  # no call writes to it
    tensors: Mapping[str, Tensor]  # by name; all others are constants that a fold may read from the map itself

    @property
    def is_grouped(self) -> bool:
        """Whether a query reads one group of the features."""
        return isinstance(self.feature_map, GroupedFeatureMap)

    @property
    def swapped(self) -> FeatureMap:
        """The map with the call's tensors in place of its own."""
        return with_swapped_tensors(self.feature_map, self.tensors)

    def run(self, function: Callable[..., Any], device: torch.device, *arguments: Any) -> Any:
        """function(map with the call's tensors, *arguments), outside autocast."""
        with outside_autocast(device):
            return function(self.swapped, *arguments)

    def query_log_weight(self, query: Tensor) -> Tensor | None:
        """The map's logarithmic weights (B, H, G, L) of queries (B, H, G, L, D), in plain differentiable torch."""
        if self.feature_map.exponential:
            return None
        weight: Tensor | None = self.run(lambda bound, x: bound.query_log_weight(x), query.device, query.flatten(2, 3))
        return None if weight is None else weight.to(accumulation_dtype(query.dtype)).unflatten(-1, query.shape[2:4])


def bind(
    feature_map: FeatureMap, query: Tensor, key: Tensor, key_mask: Tensor | None = None, *, is_causal: bool
) -> tuple[BoundMap, Tensor, Tensor]:
    """The map with the tensors of a call, and the call's queries (B, H, Lq, D) and keys (B, Hkv, Lk, D).

    Half-precision tokens are widened where those tensors have gradients: what flows back through a mean and beside it
    may cancel, and is added before it is rounded. The mask is (B, Lk) or (B, Hkv, Lk).
    """
    check_not_redrawn(feature_map)
    _check_repeatable(feature_map)
    with outside_autocast(query.device):
        call = feature_map.call_tensors(query, key, key_mask=key_mask, is_causal=is_causal)
        if query.dtype != (wide := accumulation_dtype(query.dtype)) and any(map(_is_followed, call.values())):
            query, key = query.to(wide), key.to(wide)
            call = feature_map.call_tensors(query, key, key_mask=key_mask, is_causal=is_causal)
    followed = {name: tensor for name, tensor in named_tensors(feature_map) if _is_followed(tensor)}
    return BoundMap(feature_map, followed | dict(call)), query, key


def check_unchanged(feature_map: FeatureMap, of_forward: str, followed: Collection[str] = ()) -> None:
    """Refuse a backward pass of another map than the forward pass had; of the followed tensors autograd notices."""
    if (now := feature_map.fingerprint(followed)) != of_forward:
        raise RuntimeError(
            f"the feature map was {of_forward} in the forward pass and is {now} now: features are recomputed for "
            "gradients; redraw or fit after backward(), not before"
        )


def _check_repeatable(feature_map: FeatureMap) -> None:
    """Refuse a map whose modules draw numbers in training: its features are computed again for gradients."""
    for part in feature_map.modules() if feature_map.training and feature_map._modules else ():
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p:
            raise ValueError(
                f"{type(feature_map).__name__} holds {part!r}, and features are computed more than once in a call, and "
                "again for gradients; drop out entries of queries and keys before the call, or outputs after it"
            )


def _is_followed(tensor: Tensor) -> bool:
    """Whether autograd or a torch.func transform follows this tensor; a Function must get those as arguments."""
    if tensor.requires_grad or torch.compiler.is_compiling():
        return tensor.requires_grad
    # torch has no public name for this.
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


M = TypeVar("M", bound=nn.Module)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by each of their dotted names, those that `DataParallel` gives its replicas included."""
    # A decoding step asks twice; torch's own iterators would cost it a tenth of its time.
    for prefix, child in module.named_modules(remove_duplicate=False) if module._modules else (("", module),):
        # A replica's parameters are plain tensors with a gradient; torch keeps their names here.
        former = vars(child).get("_former_parameters", {})
        for name, tensor in (*child._parameters.items(), *child._buffers.items(), *former.items()):
            if tensor is not None:
                yield f"{prefix}.{name}" if prefix else name, tensor


def with_swapped_tensors(module: M, tensors: Mapping[str, Tensor]) -> M:
    """The module with other parameters and buffers of these dotted names: a shallow copy where there are any."""
    if not tensors:
        return module
    copy: M = object.__new__(type(module))
    held = dict(vars(module))
    held["_parameters"], held["_buffers"] = dict(module._parameters), dict(module._buffers)
    held["_modules"] = dict(module._modules)
    inner: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        child, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(child, {})[rest] = tensor
        elif child in held["_parameters"] or child in held["_buffers"]:
            held["_parameters" if child in held["_parameters"] else "_buffers"][child] = tensor
        else:
            held[child] = tensor
    for child, swapped in inner.items():
        held["_modules"][child] = with_swapped_tensors(module.get_submodule(child), swapped)
    vars(copy).update(held)
    return copy
