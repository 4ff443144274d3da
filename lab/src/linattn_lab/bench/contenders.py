"""The two contenders on one set of inputs: linear attention and exact attention, forward or with backward.

Letters: B batch, H heads, L tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.softmax import softmax_attention
from linattn_lab.bench.settings import Settings
from linattn_lab.built_methods import BuiltMethod

LINEAR = "linear"
EXACT = "exact"
Run = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What both contenders are given."""

    tokens: tuple[Tensor, Tensor, Tensor]  # query, key and value, each (B, H, L, D)
    upstream: Tensor | None  # the output's gradient, (B, H, L, D); None where only the output is wanted

    def first(self, num_tokens: int, num_heads: int) -> Inputs:
        """The first tokens of the first heads alone, of one text."""
        query, key, value = (x.detach()[:1, :num_heads, :num_tokens] for x in self.tokens)
        upstream = None if self.upstream is None else self.upstream[:1, :num_heads, :num_tokens]
        return Inputs((query, key, value), upstream)

    def double(self) -> Inputs:
        """The very same numbers in float64."""
        query, key, value = (x.detach().double() for x in self.tokens)
        return Inputs((query, key, value), None if self.upstream is None else self.upstream.double())


def draw_inputs(settings: Settings, length: int) -> Inputs:
    """Standard normal queries, keys, values and upstream gradient."""
    # Not the map's own seed, whose first draw is its projection.
    generator = torch.Generator().manual_seed(settings.seed + 1)
    shape = (settings.batch, settings.heads, length, settings.head_dim)

    def one() -> Tensor:
        """One tensor, drawn on the CPU in float32 so that every device and dtype starts from the same numbers."""
        return torch.randn(*shape, generator=generator).to(settings.device, settings.torch_dtype)

    return Inputs((one(), one(), one()), one() if settings.backward else None)


def fitted_method(settings: Settings, inputs: Inputs) -> BuiltMethod:
    """The method, its map fitted on these inputs where it takes statistics, so that no call has to take them."""
    built = settings.build()
    built.fit(inputs.tokens[0], inputs.tokens[1])
    return built


def linear_run(settings: Settings, inputs: Inputs, built: BuiltMethod, *, reference: bool = False) -> Run:
    """A call of linear attention: its output, and the three gradients where the inputs hold an upstream one.

    `reference` follows the map's definition, slowly, instead of the fast way; merged keys are their own. The call
    returns when the result is there.
    """

    backend = "reference" if reference and built.feature_map is not None else "auto"

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output."""
        return built.attend(query, key, value, is_causal=settings.is_causal, backend=backend)

    return _run(attend, inputs)


def exact_run(settings: Settings, inputs: Inputs, built: BuiltMethod) -> Run:
    """A call of exact attention, as `linear_run`, at the temperature of the map where that stands for softmax."""
    scale = None
    if built.softmax_kernel:
        # A map may have been given a temperature of its own.
        scale = built.scale if built.feature_map is None else built.feature_map.scale

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output."""
        return softmax_attention(query, key, value, is_causal=settings.is_causal, scale=scale)

    return _run(attend, inputs)


def _run(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> Run:
    """Output and gradients of one kind of attention; on an accelerator the call waits for them."""
    upstream = inputs.upstream
    query, key, value = (x.detach().requires_grad_(upstream is not None) for x in inputs.tokens)

    def call() -> tuple[Tensor, ...]:
        """One call."""
        out = attend(query, key, value)
        gradients = () if upstream is None else torch.autograd.grad(out, (query, key, value), upstream)
        if out.device.type == "cuda":
            torch.cuda.synchronize(out.device)
        return (out.detach(), *gradients)

    return call
