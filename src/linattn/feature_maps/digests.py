"""Digests of tensors: what tells one map's, or one model's, numbers from another's."""

import ctypes
import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

UNREAD = "unread"
"""The digest of tensors on the meta device or under FakeTensorMode, which have shapes and no values."""
# Of frozen tensors: what they were when they were read, and their digest then.
_FROZEN = WeakTensorKeyDictionary()


def digest(*tensors: Tensor) -> str:
    """A digest of shapes and values, the same on every device and in every floating dtype; UNREAD without values."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        held = _held(tensor)
        if held is None:
            return UNREAD
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            held = torch.view_as_real(held.resolve_conj()) if held.is_complex() else held
            dtype = torch.float64 if held.is_floating_point() else torch.int64
            values = _bare(held.detach().to(device="cpu", dtype=dtype).contiguous())
            hasher.update(repr(tuple(values.shape)).encode())
            hasher.update(ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()))
    return hasher.hexdigest()[:16]


def digest_of_weights(weights: Iterable[Tensor]) -> str:
    """A digest of parameters; frozen ones are read once, until something is written into them."""
    return hashlib.sha256("".join(_one(weight) for weight in weights).encode()).hexdigest()[:16]


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the names and bytes of a model's `state_dict`."""
    hasher = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        hasher.update(name.encode())
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _one(parameter: Tensor) -> str:
    """The digest of one parameter."""
    weight = _held(parameter)
    if weight is None:
        return UNREAD
    # Trainable ones are read each time: fused optimisers do not say that they have written.
    if weight.requires_grad or weight.is_inference() or _bare(weight) is not weight:
        _FROZEN.pop(weight, None)
        return digest(weight)
    now = (weight._version, weight.dtype, weight.data_ptr())
    held: tuple[object, str] | None = _FROZEN.get(weight)
    if held is None or held[0] != now:
        held = _FROZEN[weight] = now, digest(weight)
    return held[1]


def _bare(tensor: Tensor) -> Tensor:
    """The tensor that torch.func has wrapped, itself where it has not; torch has no public name for this."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _held(tensor: Tensor) -> Tensor | None:
    """The tensor that has the values, None where there are none: torch.export puts a fake one in its place."""
    if not isinstance(tensor, FakeTensor):
        return None if tensor.is_meta else tensor
    # torch has no public way back.
    known = tensor.fake_mode.fake_tensor_converter.meta_converter
    numbers = known.describer.lookup_tensor.items()
    return next((real for real, number in numbers if known.tensor_memo.get(number) is tensor), None)
