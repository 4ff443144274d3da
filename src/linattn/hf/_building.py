"""Kernels for attention modules, built from what `linearize_` was given, and, when they are fitted, tried."""

from __future__ import annotations

from collections.abc import Callable

import torch

from linattn.attention import Exact
from linattn.feature_maps import FeatureMap, FittedMap
from linattn.hf._attention_modules import AttentionModule
from linattn.hf._kernels import Kernel
from linattn.hf.kernel_attention import KernelAttention
from linattn.hf.planned_attention import PlannedAttention
from linattn.planning import Plan
from linattn.planning.methods import parse_method


def written_kernel(
    found: AttentionModule, text: str, num_features: int | None, seed: int
) -> tuple[KernelAttention, str]:
    """The kernel of a written form, and the form in exact names."""
    width, method = found.head_dim, parse_method(text)
    # At the default scale whatever the module's: KernelAttention makes up the difference with each call.
    built = method.build(width, num_features=num_features, scale=width**-0.5, seed=seed + found.number)
    # Methods are built frozen, to be measured; in a model the weights of a learned map train with the model's.
    built.requires_grad_(True)
    return KernelAttention(built, found.name, exact=method.exact), method.label


def own_kernel(
    found: AttentionModule, feature_map: Callable[[int], FeatureMap] | None, exact: Exact | None
) -> KernelAttention:
    """The kernel of a map that a function builds."""
    if isinstance(feature_map, FeatureMap) or not callable(feature_map):
        raise TypeError(
            f"feature_map must be text, or a function that builds a map from a head width, got "
            f"{type(feature_map).__name__}; write feature_map=lambda head_dim: FavorPlus(head_dim, 256)"
        )
    return KernelAttention(feature_map(found.head_dim), found.name, exact=exact)


def check_plan(found: AttentionModule, plan: Plan) -> None:
    """Refuse the plan of another layer."""
    if plan.head_dim != found.head_dim or plan.is_causal != found.is_causal:
        kinds = ("bidirectional", "causal")
        raise ValueError(
            f"{found.name} (layer {found.number}) has heads of width {found.head_dim} and is {kinds[found.is_causal]}, "
            f"its plan is for heads of width {plan.head_dim} and {kinds[plan.is_causal]}; give the plans of this "
            "model's layers, in order"
        )


def in_words(kernel: Kernel) -> str:
    """The map, or the plan."""
    if isinstance(kernel, PlannedAttention):
        return kernel.plan.summary
    return " ".join(repr(kernel.feature_map).split())


def try_out(found: AttentionModule, kernel: Kernel, label: str) -> None:
    """One token, so that a map the layer can never use is refused now and not in the first forward pass.

    The kernel moves to the module's device.
    """
    device = next(found.module.parameters(), torch.empty(0)).device
    kernel.to(device)
    heads, value_dim = _sizes(kernel)
    token = torch.zeros(1, heads, 1, found.head_dim, device=device)
    value = token.new_zeros(1, heads, 1, value_dim or found.head_dim)
    try:
        with torch.no_grad():
            kernel(token, token, value, scale=found.head_dim**-0.5, is_causal=found.is_causal)
    except ValueError as error:
        cure = "; in linearize_, calibrate=batches fits it to samples" if _is_unfitted(kernel) else ""
        raise ValueError(f"{found.name} (layer {found.number}) cannot attend by {label}: {error}{cure}") from error


def _is_unfitted(kernel: Kernel) -> bool:
    """Whether some map takes statistics of samples and has none."""
    fitted = [part for part in kernel.modules() if isinstance(part, FittedMap)]
    return any(all(getattr(part, name) is None for name in part.fitted_buffers) for part in fitted)


def _sizes(kernel: Kernel) -> tuple[int, int | None]:
    """How many heads the kernel can be tried with, and the width of values where it asks for one."""
    if isinstance(kernel, PlannedAttention):
        return len(kernel.plan.heads), kernel.plan.value_dim
    # What a map holds for each key/value head is (Hkv, ·, ·), what it holds for all of them has two dimensions.
    held = (x.shape[0] for x in (*kernel.parameters(), *kernel.buffers()) if x.ndim == 3)
    return max(held, default=1), None
