"""linear_attention and linear_partial, bidirectional and causal, with and without a window."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import linattn
from fuzzing.dice import Dice
from fuzzing.limits import Limit, map_limits, window_limits
from fuzzing.machine import draw_machine, sums_dtype
from fuzzing.maps import draw_map
from fuzzing.oracle import Rows
from fuzzing.task import Result, Task
from fuzzing.tokens import (
    DTYPES,
    Sizes,
    draw_bias,
    draw_mask,
    draw_sizes,
    draw_values,
    draw_vectors,
    fill_masked,
    laid_out,
)
from fuzzing.truth import Tokens, parts_of
from fuzzing.weights import Noise, Weigher, in_call

BACKENDS = {"blocked": 6.0, "auto": 1.0, "reference": 2.0}


class Given(NamedTuple):
    """The tokens of a call."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None = None

    @property
    def live(self) -> Tensor:
        """(B, M)."""
        return torch.ones(self.key.shape[0], self.key.shape[2], dtype=torch.bool) if self.mask is None else self.mask

    @property
    def exact_bias(self) -> Tensor | None:
        """The bias as the truth takes it."""
        return None if self.bias is None else self.bias.double()

    @property
    def words(self) -> str:
        """Mask and bias."""
        bias = "None" if self.bias is None else f"{tuple(self.bias.shape)} of {self.bias.dtype}"
        return f"key_mask={'None' if self.mask is None else 'mask'}, key_bias={bias}"


def draw_given(dice: Dice, sizes: Sizes, num_queries: int, num_keys: int, dtype: torch.dtype) -> Given:
    """Tokens of any scale, masked ones holding anything, in any layout."""
    shape = sizes.batch, sizes.kv_heads, num_keys
    query = draw_vectors(dice, (sizes.batch, sizes.heads, num_queries, sizes.head_dim), dtype)
    key, value = (
        draw_vectors(dice, (*shape, sizes.head_dim), dtype),
        draw_values(dice, (*shape, sizes.value_dim), dtype),
    )
    mask = draw_mask(dice, sizes.batch, num_keys)
    key, value = (fill_masked(dice, x, mask) for x in (key, value))
    return Given(*(laid_out(dice, x) for x in (query, key, value)), mask)


def draw_biased(dice: Dice, given: Given, *, closes: bool) -> Given:
    """The same tokens, sometimes with a bias of keys in the dtype of the tokens or of sums; -inf if it `closes`."""
    if not dice.chance(0.25):
        return given
    batch, heads, length = given.key.shape[:3]
    bias = draw_bias(dice, batch, heads, length)
    if closes and dice.chance(0.2):
        bias = torch.where(dice.flags(*bias.shape, share=0.8), bias, -torch.inf)
    dtype = dice.pick(given.key.dtype, sums_dtype(given.key.dtype))
    return given._replace(bias=bias.to(dtype))


def draw_window(dice: Dice, *, share: float = 0.35) -> int | None:
    """A window, more often none."""
    return dice.pick(1, 1, 2, 2, 4, 4, 8, 16, 64) if dice.chance(share) else None


def draw(
    dice: Dice, *, most: int = 40, dtypes: dict[torch.dtype, float] = DTYPES, fitted: bool = False, share: float = 0.35
) -> Task:
    """Any call."""
    sizes, dtype, is_causal = draw_sizes(dice), dice.weighted(dtypes), dice.chance(0.5)
    window = draw_window(dice, share=share)
    drawn = draw_map(dice, sizes, dtype, softmax=window is not None and dice.chance(0.97), fitted=fitted)
    num_keys = dice.length(most)
    if window is not None and dice.chance(0.4):
        # Around the lengths where the first keys leave a neighbourhood.
        num_keys = min(dice.integer(1, 4 * window + 1), most)
    num_queries = num_keys if dice.chance(0.95 if window else 0.6) else dice.length(most)
    given = draw_given(dice, sizes, num_queries, num_keys, dtype)
    backend, name = dice.weighted(BACKENDS), dice.pick("linear_attention", "linear_partial")
    gqa = sizes.groups > 1 or dice.chance(0.5)
    options = {"is_causal": is_causal, "window": window, "backend": backend, "enable_gqa": gqa}
    if gqa and dice.chance(0.01):
        options["enable_gqa"] = gqa = False
    given = draw_biased(dice, given, closes=window is None and not drawn.from_call)
    # With a window the map may have no key to take.
    has_tokens = min(sizes.batch, num_queries, num_keys) > 0 and window is None
    limits = map_limits(drawn, is_causal=is_causal, has_tokens=has_tokens)
    limits += window_limits(drawn, num_queries, num_keys, window, is_causal=is_causal)
    if sizes.groups > 1 and not gqa:
        limits.append(Limit(ValueError, "pass enable_gqa=True"))

    def call(query: Tensor, key: Tensor, value: Tensor) -> list[Result]:
        found = getattr(linattn, name)(
            query, key, value, drawn.map, key_mask=given.mask, key_bias=given.bias, **options
        )
        out, log = (found, None) if name == "linear_attention" else found
        return [Result("out", out, log, roundings=4 if window else 1)]

    def truth(query: Tensor, key: Tensor, value: Tensor, noise: Noise | None) -> list[Rows]:
        places = torch.arange(num_queries) + (num_keys - num_queries if is_causal else 0)
        used = drawn.map if is_causal else in_call(drawn.map, query, key, given.mask, dtype)
        tokens = Tokens(query, key, value, given.live, places, given.exact_bias)
        return [
            parts_of(Weigher(used, sums_dtype(dtype)), tokens, window, is_causal=is_causal).rows(tokens, noise=noise)
        ]

    written = ", ".join(f"{key}={value!r}" for key, value in options.items())
    text = f"{name}({drawn}, {given.words}, {written})"
    return Task(text, [drawn], given[:3], given.live, call, truth, limits, draw_machine(dice), window is not None)
