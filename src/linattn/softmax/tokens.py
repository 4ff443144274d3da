"""Keys and values with biases on their logits; letters as in softmax/__init__.py, w tokens of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Tokens(NamedTuple):
    """Keys (B, H, n, D), values (B, H, n, Dv), and biases on their logits (B, H or 1, n), -inf for absent ones."""

    key: Tensor
    value: Tensor
    bias: Tensor

    def then(self, other: Tokens) -> Tokens:
        """Append other tokens; neither is copied where the other is none."""
        if self.bias.shape[2] == 0 or other.bias.shape[2] == 0:
            return other if self.bias.shape[2] == 0 else self
        return Tokens(*(torch.cat(pair, 2) for pair in zip(self, other, strict=True)))

    def pick(self, index: Tensor) -> Tokens:
        """Select the tokens of the numbers (B, H, n)."""
        return Tokens(picked(self.key, index), picked(self.value, index), self.bias.gather(-1, index))

    def cut(self, start: int, stop: int) -> Tokens:
        """Consecutive ones."""
        return Tokens(*(x[:, :, start:stop] for x in self))


def picked(x: Tensor, index: Tensor) -> Tensor:
    """Tokens (B, H, L, ·) by number (B, H, n)."""
    # `take_along_dim` takes the remainder of every place, which costs several times as much.
    return x.gather(2, index.unsqueeze(-1).expand(*x.shape[:2], -1, x.shape[3]))


class Restored:
    """A frozen dataclass that files and copies hold."""

    # Of a state: what its tensors were seen to fit. No field, so no file says it.
    _fits: ClassVar[Any] = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the fields that a file or a copy has; they are checked where the record is used."""
        record: Any = self
        # A field that its repr leaves out is none of its value.
        self.__dict__.update({field.name: state.get(field.name) for field in fields(record) if field.repr})

    def known_to_fit(self, fits: Any) -> Self:
        """The record itself, whose tensors need no other look before tokens of this kind."""
        if not torch.compiler.is_compiling():
            object.__setattr__(self, "_fits", fits)
        return self


class StreamState(Restored):
    """A state of a stream, whose tensors go elsewhere together."""

    _each: Callable[..., Self]  # with a function of each tensor

    def detach(self) -> Self:
        """The state, cut from the graph that built it."""
        return self._each(Tensor.detach)

    def to(self, device: torch.device | str) -> Self:
        """The state on another device.

        Raises:
            TypeError: a dtype was given: sums and biases keep at least float32, whatever the tokens' dtype.
        """
        if not isinstance(device, torch.device | str | int):
            raise TypeError(
                f"{type(self).__name__}.to takes a device, got {device!r}; to go on in tokens of another dtype, begin "
                "a new state with them"
            )
        return self._each(lambda x: x.to(device))


def register(
    kind: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[..., Any], **context: Any
) -> None:
    """Have a kind read by torch.load under weights_only, as tensors and numbers, and taken apart by torch's trees."""

    def with_places(x: Any) -> Any:
        """Each leaf beside its place, as torch.export names its inputs, and what is no leaf."""
        leaves, rest = flatten(x)
        return [(pytree.SequenceKey(place), leaf) for place, leaf in enumerate(leaves)], rest

    torch.serialization.add_safe_globals([kind])
    name = f"linattn.{kind.__name__}"
    pytree.register_pytree_node(
        kind, flatten, unflatten, flatten_with_keys_fn=with_places, serialized_type_name=name, **context
    )


torch.serialization.add_safe_globals([Tokens])


def by_block(rows: Tensor, num_blocks: int, window: int) -> Tensor:
    """Rows (B, H, G, L, D), L ≤ n·w, as the rows of blocks (B, H, n, G·w, D), zeros after the last."""
    short = num_blocks * window - rows.shape[3]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, short)) if short else rows
    return torch.unflatten(rows, 3, (num_blocks, window)).transpose(2, 3).flatten(3, 4)
