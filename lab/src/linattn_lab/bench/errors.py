"""Whether linear attention is right, and how far it is from exact attention, on a benchmark's own inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn.methods.measures import relative_error, uniform_average
from linattn_lab.bench.contenders import Inputs, exact_run, fitted_method, linear_run
from linattn_lab.bench.settings import Settings
from linattn_lab.built_methods import BuiltMethod

# Several blocks of the fast way, no whole number of them, and more than one segment of its causal backward pass.
NUM_VERIFIED = 2_500
# The definition holds every weight: of many heads and texts, all alike, they would not fit in memory.
_HEADS = 2


@dataclass(frozen=True)
class Errors:
    """The four errors of a `linattn_lab.bench.records.LengthRow`."""

    error: float
    gradient_error: float | None
    approximation_error: float
    uniform_error: float


def verify(settings: Settings, inputs: Inputs) -> Errors:
    """Compare linear attention with its definition and with exact attention, at the first 2,500 tokens of two heads.

    Raises:
        ValueError: if the output or a gradient is further from the definition than rounding explains; methods
            without such a bound are let through.

    Example:
        >>> from linattn_lab.bench.contenders import draw_inputs
        >>> settings = Settings(heads=1, head_dim=4)
        >>> verify(settings, draw_inputs(settings, 8)).error < 1e-4
        True
    """
    few = inputs.first(NUM_VERIFIED, _HEADS)
    built, in_double = fitted_method(settings, few), few.double()
    found = linear_run(settings, few, built)()
    defined = linear_run(settings, in_double, built, reference=True)()
    error = float(relative_error(found[0], defined[0]).max())
    gradient_error = None
    if settings.backward:
        gradient_error = float(relative_error(_joined(found), _joined(defined)).max())
    _require(settings, built, error, gradient_error)
    exact = exact_run(settings, Inputs(in_double.tokens, None), built)()[0]
    value = in_double.tokens[2]
    _, num_heads, num_tokens, _ = value.shape
    uniform = uniform_average(value, num_heads=num_heads, num_queries=num_tokens, is_causal=settings.is_causal)
    return Errors(
        error=error,
        gradient_error=gradient_error,
        approximation_error=float(relative_error(found[0], exact).mean()),
        uniform_error=float(relative_error(uniform, exact).mean()),
    )


def _joined(results: tuple[Tensor, ...]) -> Tensor:
    """The three gradients side by side: one alone may be zero, such as that of the query of a single token."""
    return torch.cat([gradient.double() for gradient in results[1:]], dim=-1)


def _require(settings: Settings, built: BuiltMethod, error: float, gradient_error: float | None) -> None:
    """Refuse to time a wrong result."""
    bound, chosen = settings.error_bound(built), settings.method.merged is not None
    # Rounding may choose the other of two keys that are worth the same.
    remedy = "Try another --seed, or --dtype float32," if chosen else "Try --dtype float32,"
    for name, wrong in (("output", error), ("gradients", gradient_error)):
        if bound is not None and wrong is not None and not wrong <= bound:
            raise ValueError(
                f"the {name} of {settings.method.label} in {settings.dtype} differ from the definition in float64 by "
                f"{wrong:.2e}, more than rounding explains ({bound:.2e}); nothing was timed at this length. "
                f"{remedy} and please report it if that is refused too"
            )
