"""Checks of public functions' arguments, and their words; letters as in softmax/__init__.py."""

import functools
import math
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn, SupportsFloat

import torch
from torch import Tensor

from linattn.softmax.precision import accumulation_dtype
from linattn.softmax.tokens import Tokens
from linattn.softmax.tracing import has_values

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Qkv = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""
KeyWeights = tuple[Tensor | None, Tensor | None]
"""Mask and bias of the keys."""


def checked(
    tokens: Qkv, key_mask: Tensor | None, key_bias: Tensor | None, *, enable_gqa: bool, takes_jagged: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Query, key and value in one dtype, and mask and bias as one: (B, Hkv or 1, Lk), -inf for masked keys, or None."""
    # torch.jit's own function for this has no annotation.
    if torch._C._get_tracing_state() is not None:
        raise ValueError(
            "torch.jit.trace records the branches that its example takes, and other masks, lengths or values would be "
            "computed by them; record attention with torch.export.export, or compile it with torch.compile"
        )
    if not (takes_jagged and all(isinstance(x, Tensor) and x.layout == torch.jagged for x in tokens)):
        query, key, value = tokens
        check_dense(query=query, key=key, value=value, key_mask=key_mask, key_bias=key_bias)
    query, key, value = _in_one_dtype(*tokens)
    _check_tensors(query, key, value)
    _check_shapes(query, key, value, enable_gqa=enable_gqa)
    return query, key, value, _as_bias(key_mask, key_bias, key)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse what is no four-dimensional floating tensor, and tensors of several dtypes or devices."""
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(
                f"{name} must be (B, H, L, width) like scaled_dot_product_attention's, got {x.ndim} dimensions "
                f"{tuple(x.shape)}; add dimensions with unsqueeze, or transpose(1, 2) from (B, L, H, width)"
            )
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}; call {name}.float()")
    if len({x.dtype for x in named.values()}) > 1:
        dtypes = f"{query.dtype}, {key.dtype}, {value.dtype}"
        raise TypeError(f"query, key and value must share one dtype, got {dtypes}; convert with .to()")
    if len({x.device for x in named.values()}) > 1:
        devices = f"{query.device}, {key.device}, {value.device}"
        raise ValueError(f"query, key and value must be on one device, got {devices}; move with .to()")
    if query.is_meta:
        raise ValueError(
            "query, key and value are on the meta device, which holds shapes without values; attention needs values: "
            "move the tensors to a real device, or trace shapes under torch's FakeTensorMode"
        )


def _in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, which mixes dtypes (float32 from rotary positions, bfloat16), in the widest; else as they are."""
    # Asked first, since most calls and every decoding step end here.
    first = tensors[0]
    if not isinstance(first, Tensor) or first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return tensors
    if any(not isinstance(x, Tensor) or x.dtype not in DTYPES for x in tensors):
        return tensors
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return tuple(x.to(dtype) for x in tensors)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> None:
    """Refuse shapes that do not belong together."""
    if query.shape[0] != key.shape[0]:
        raise ValueError(
            f"query and key must share the batch size, got {query.shape[0]} and {key.shape[0]}; "
            "expand the smaller one along its first dimension"
        )
    if query.shape[-1] == 0:
        raise ValueError(f"query must have a head width, got {tuple(query.shape)}; give one number a head or more")
    if query.shape[-1] != key.shape[-1]:
        widths = f"{query.shape[-1]} and {key.shape[-1]}"
        raise ValueError(f"query and key must share the head width, got {widths}; project one to the other's")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key and value must share (batch, heads, length), got {tuple(key.shape[:3])} and "
            f"{tuple(value.shape[:3])}; give one value for each key"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[1]} heads, key and value have {key.shape[1]}; pass enable_gqa=True if groups of "
            "query heads share a key/value head"
        )
    if 0 in (query.shape[1], key.shape[1]) or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query heads must be one or more, a multiple of the key/value heads, got {query.shape[1]} and "
            f"{key.shape[1]}; give each key/value head as many query heads"
        )


def _as_bias(key_mask: Tensor | None, key_bias: Tensor | None, key: Tensor) -> Tensor | None:
    """Mask and bias as one, in the accumulation dtype."""
    batch, heads, length = key.shape[:3]
    if key_mask is not None:
        check_mask(key_mask, key)
    if key_bias is not None:
        wanted = "a floating tensor, the logarithm of a factor on each key's weight"
        check_dtype("key_bias", key_bias, DTYPES, wanted, "a bool mask goes into key_mask")
        if tuple(key_bias.shape) not in ((batch, heads, length), (batch, 1, length)):
            raise ValueError(
                f"key_bias must be (B, Hkv or 1, Lk) = {(batch, heads, length)} or {(batch, 1, length)}, got "
                f"{tuple(key_bias.shape)}; expand it along the batch, or unsqueeze(1) for all heads"
            )
        if key_bias.device != key.device:
            raise ValueError(f"key_bias is on {key_bias.device}, the keys on {key.device}; move it with .to()")
    dtype = accumulation_dtype(key.dtype)
    bias = None if key_bias is None else key_bias.to(dtype)
    if key_mask is None:
        return bias
    bias = torch.zeros((), dtype=dtype, device=key.device) if bias is None else bias
    return torch.where(key_mask.unsqueeze(1), bias, -torch.inf)


def check_mask(key_mask: Tensor, keys: Tensor) -> None:
    """Refuse what is no mask (B, Lk) of keys (B, …, Lk, width)."""
    check_bool(key_mask)
    if tuple(key_mask.shape) != (shape := (keys.shape[0], keys.shape[-2])):
        raise ValueError(
            f"key_mask must be (B, Lk) = {shape}, got {tuple(key_mask.shape)}; it masks keys, for all queries: give "
            "mask[:, 0, 0] of a (B, 1, 1, Lk) mask, and is_causal=True in place of a causal one"
        )
    if key_mask.device != keys.device:
        raise ValueError(f"key_mask is on {key_mask.device}, the keys on {keys.device}; move it with .to()")


def check_bool(key_mask: object) -> None:
    """Refuse what is no bool mask."""
    remedy = "convert a mask of 1 and 0 with mask.bool(), one of 0 and -inf with mask == 0"
    check_dtype("key_mask", key_mask, (torch.bool,), "a bool tensor, True = attend", remedy)


def check_dtype(name: str, x: object, dtypes: tuple[torch.dtype, ...], wanted: str, remedy: str) -> None:
    """Refuse what is no tensor of these dtypes."""
    if not isinstance(x, Tensor) or x.dtype not in dtypes:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be {wanted}, got {got}; {remedy}")


def check_dense(**tensors: object) -> None:
    """Refuse nested and sparse tensors, and those of which ranks hold parts."""
    for name, x in tensors.items():
        if type(x).__name__ == "DTensor":  # To import it takes longer than all of linattn.
            raise ValueError(
                f"{name} must be a plain tensor, got a DTensor; call through "
                "torch.distributed.tensor.experimental.local_map, with batch or heads split, or give x.full_tensor()"
            )
        if isinstance(x, torch.Tensor) and x.is_nested:
            kind = "jagged" if x.layout == torch.jagged else "strided"
            raise ValueError(
                f"{name} must be a dense tensor, got a nested one, {kind}; give sequences of different lengths, one "
                "after the other as (1, H, T, width), to linear_attention_packed, which takes x.values().unsqueeze(0) "
                "and x.offsets() of a jagged x of shape (B, H, L, width); or pad them, and say with "
                "key_mask where tokens are"
            )
        if isinstance(x, torch.Tensor) and x.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got one of layout {x.layout}; give {name}.to_dense()")


def check_indices(indices: Tensor, number: int | None = None, name: str = "indices") -> Tensor:
    """Numbers of rows in int64, what is no list of them, or of so many rows, refused."""
    if not isinstance(indices, Tensor):
        raise TypeError(f"{name} must be a 1-D integer tensor, got {type(indices).__name__}; write torch.tensor([…])")
    if indices.ndim != 1 or indices.dtype.is_floating_point or indices.dtype == torch.bool:
        raise ValueError(
            f"{name} must be a 1-D integer tensor, got {indices.dtype} of shape {tuple(indices.shape)}; "
            "turn a mask into indices with mask.nonzero().squeeze(1)"
        )
    # On another device a look would wait for it.
    looked_at = indices.tolist() if number is not None and indices.is_cpu and has_values(indices) else []
    if wrong := [row for row in looked_at if not 0 <= row < (number or 0)]:
        raise IndexError(f"{name} must lie in [0, {number}), the rows, got {wrong[0]}; give numbers of rows")
    return indices.long()


def as_float(value: object) -> float:
    """A number; NaN for text and the like, tensors of several or complex numbers, and integers that no float holds."""
    try:
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except (OverflowError, RuntimeError, TypeError, ValueError):
        return math.nan


def checked_scale(scale: Any) -> Any:
    """The factor on q·k as a float, or None for the default; a graph may leave a number open."""
    if scale is None or torch.compiler.is_compiling():
        return scale
    if isinstance(scale, Tensor) or not math.isfinite(as_float(scale)):
        cure = "give a number of Python's, or multiply the query by a tensor that is learned"
        raise ValueError(f"scale must be a finite number, or None for D**-0.5, got {scale!r}; {cure}")
    return float(scale)


def check_soft_cap(soft_cap: float | None) -> float | None:
    """A cap on logits as a float, or None for none; refuse what is no finite number > 0."""
    if soft_cap is None:
        return None
    if isinstance(soft_cap, bool) or not isinstance(soft_cap, int | float) or not 0 < as_float(soft_cap) < math.inf:
        raise ValueError(f"soft_cap must be a finite number > 0, or None for no cap, got {soft_cap!r}")
    return float(soft_cap)


TOKEN_DTYPES = {torch.float32: (torch.float32, torch.float16, torch.bfloat16), torch.float64: (torch.float64,)}
"""By the dtype of sums and biases, those of tokens beside them."""


def check_tensor(
    name: str, x: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, remedy: str
) -> None:
    """Refuse what is no tensor of this shape and dtype, or is on another device."""
    if not isinstance(x, Tensor) or x.shape != shape or x.dtype != dtype or x.device != device:
        refuse(name, x, f"{dtype} of shape {shape} on {device}", remedy)


def checked_length(name: str, x: object, most: int | None, remedy: str) -> int:
    """How many tokens there are numbers (B, H, n) of, more than may be kept refused."""
    count: int = x.shape[2] if isinstance(x, Tensor) and x.ndim == 3 else -1
    if count < 0 or (most is not None and count > most):
        refuse(name, x, f"of shape (B, H, n{'' if most is None else f' ≤ {most}'})", remedy)
    return count


def check_tokens(
    name: str,
    tokens: object,
    most: int | None,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    remedy: str,
    *,
    is_wide: bool = False,
) -> None:
    """Refuse what is no tokens of sizes (B, H, D, Dv), at most so many; biases have this dtype, as all have if wide."""
    check_kind(Tokens, name, tokens, remedy)
    assert isinstance(tokens, Tokens)
    (batch, heads, *widths), held = sizes, tokens.key
    number = checked_length(f"{name}.bias", tokens.bias, most, remedy)
    is_beside = not is_wide and isinstance(held, Tensor) and held.dtype in TOKEN_DTYPES[dtype]
    dtypes = (held.dtype, held.dtype, dtype) if is_beside else (dtype,) * 3
    for field, x, kind, rest in zip(Tokens._fields, tokens, dtypes, (*((width,) for width in widths), ()), strict=True):
        check_tensor(f"{name}.{field}", x, (batch, heads, number, *rest), kind, device, remedy)


def check_kind(kind: type, name: str, x: object, remedy: str) -> None:
    """Refuse another kind of record."""
    if not isinstance(x, kind):
        refuse(name, x, f"a {kind.__name__}", remedy)


def refuse(name: str, x: object, wanted: str, remedy: str) -> NoReturn:
    """Say what was got, what was wanted and what to do."""
    if isinstance(x, Tensor):
        raise ValueError(
            f"the state's {name} must be {wanted}, got {x.dtype} of shape {tuple(x.shape)} on {x.device}; {remedy}"
        )
    raise TypeError(f"the state's {name} must be {wanted}, got {type(x).__name__}; {remedy}")


def refuse_sdpa_options(attn_mask: object, dropout_p: float) -> None:
    """Refuse a mask of pairs, and dropout on the weights: say which options, or what, to take in their place."""
    if attn_mask is not None:
        kind = f"{attn_mask.dtype} of shape {tuple(attn_mask.shape)}" if isinstance(attn_mask, Tensor) else attn_mask
        raise TypeError(
            f"attn_mask must be None, got {kind}: keys are masked here, not pairs; give padding as key_mask=, (B, Lk) "
            "bool with True = attend, a causal mask as is_causal=True (calls with a state are causal), a bias on keys "
            "as key_bias=, (B, Hkv or 1, Lk); for other masks call torch's scaled_dot_product_attention"
        )
    if dropout_p:
        raise ValueError(
            f"dropout_p must be 0, got {dropout_p}; no weights are stored that could be dropped: drop outputs, with "
            "torch.nn.functional.dropout"
        )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The known word that is nearest to a misspelt one, as an error asks for it; nothing where none is near."""
    exact = {name.lower(): name for name in known}
    nearest = get_close_matches(word.lower(), exact, 1)
    return f", did you mean {exact[nearest[0]]!r}?" if nearest else ""


def check_count(name: str, value: int, at_least: int = 1) -> int:
    """Return an integer that is at least `at_least`, or refuse it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, got {value!r}")
    return value


def check_seed(seed: int) -> int:
    """Return a seed that an int64 holds, or refuse it."""
    if check_count("seed", seed, at_least=0) >= 2**63:
        raise ValueError(f"seed must be below 2**63, got {seed!r}")
    return seed


def check_number(name: str, value: float, *, positive: bool = False) -> float:
    """Return a finite number that is ≥ 0, or > 0 when `positive`, as a float, or refuse it."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, int | float) else as_float(value)
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise ValueError(f"{name} must be a finite number {'> 0' if positive else '>= 0'}, got {value!r}")
    return number


def temperature(scale: float | None, head_dim: int) -> float:
    """The factor on q·k: `scale`, or D**-0.5 when it is None."""
    return head_dim**-0.5 if scale is None else check_number("scale", scale, positive=True)
