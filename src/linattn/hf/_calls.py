"""A call of transformers' attention interface and its mask, answered or refused; letters as in hf/__init__.py."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import _active_collector

from linattn.hf._attention_modules import attention_function

if TYPE_CHECKING:
    from linattn.hf.bounded_cache import BoundedCache

SINKS = "attention sinks"
"""In words, logits s (H,) that are learned: each stands for one more key, of value 0."""
CAPS = "soft-capped logits"
"""In words, c·tanh(x / c) in place of x = scale·q·k, before masks are added."""

# Keywords of transformers' attention functions that change the weights in a way φ(q)·φ(k) cannot express.
_INEXPRESSIBLE = {
    "a position bias added to the logits": ("position_bias",),
    CAPS: ("softcap",),
    SINKS: ("s_aux", "sinks"),
    "packed sequences": ("cu_seq_lens_q", "cu_seq_lens_k"),
    "a sparse choice of keys": ("indices", "block_indices"),
}


class PlainMask(NamedTuple):
    """Key padding, and the causal triangle or the full square, which a window, say, may be at these lengths."""

    key_mask: Tensor | None  # (B, Lk) bool, True = attend
    is_causal: bool


Mask = PlainMask | str
"""A mask, or in words one that no feature map can take: an error only where a layer reads it."""


class CachedTokens(int):
    """A number of tokens in a cache, which a mask is asked for with, and the cache itself."""

    number: int
    cache: BoundedCache


@dataclass(frozen=True, eq=False)
class AskedMask:
    """A request for a mask by transformers; layers build the masks they read from it, once in a forward pass."""

    sizes: tuple[int, int, int, int, int]  # B, Lq, Lk, and the positions of the first query and of the first key
    options: dict[str, Any]
    cache: BoundedCache | None = None  # that it was asked for, if one of ours
    part: Any = None  # of the mask (B, 1, Lq, Lk), as an index; None for all of it
    built: dict[Any, Any] = field(default_factory=dict)

    def __getitem__(self, part: Any) -> AskedMask:
        """A part of the mask, which some models take for layers that are given the last queries alone."""
        is_whole = all(isinstance(places, slice) and places in (slice(None), slice(0, None)) for places in part)
        return self if is_whole else replace(self, part=part, built={})

    # As of the mask of pairs that it stands for: what models look at before they pass it on.
    ndim: ClassVar[int] = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, 1, Lq, Lk)."""
        return self.sizes[0], 1, *self.sizes[1:3]

    def to(self, device: Any, *_: Any, **__: Any) -> AskedMask:
        """On another device, as accelerate moves what a layer is given there."""
        # A static cache gives its offset as a tensor, too.
        sizes, moved = tree_map_only(Tensor, lambda x: x.to(device), (self.sizes, self.options))
        return replace(self, sizes=sizes, options={**moved, "device": torch.device(device)}, built={})

    def contiguous(self) -> AskedMask:
        """Itself: `generate` asks it of the masks that it makes ahead of a static cache's steps."""
        return self

    @property
    def function(self) -> Any:
        """The function of a query's and a key's position that says whether one sees the other."""
        return self.options.get("mask_function", causal_mask_function)

    @property
    def is_plain(self) -> bool:
        """True if it hides nothing but padding and, in causal layers, later keys."""
        return self.function is causal_mask_function or self.function is bidirectional_mask_function

    def num_surplus(self, num_keys: int) -> int:
        """How many of a causal layer's keys the mask was not asked for."""
        return 0 if self.function is bidirectional_mask_function else num_keys - self.sizes[2] - self.sizes[4]

    @property
    def local_size(self) -> int | None:
        """Width of a window or a chunk, where the model tells its mask function."""
        return self.options.get("local_size")

    def _shown(self, num_queries: int, num_keys: int, q_offset: int) -> Any:
        """Which keys the mask function shows to queries from an offset on, (B, 1, Lq, Lk) bool, padding included."""
        options = {name: self.options[name] for name in ("use_vmap", "device") if name in self.options}
        sizes = self.sizes[0], num_queries, num_keys, q_offset, 0
        return sdpa_mask(*sizes, self.function, allow_is_causal_skip=False, **options)

    def hides_far_keys(self, length: int) -> bool:
        """True if the last of many tokens does not see all others, as far as its place alone decides that."""
        try:
            return not bool(self._shown(1, length, length - 1).all())
        # Functions that look tokens up have none so far away.
        except (IndexError, RuntimeError):
            return True

    def read(self, num_keys: int) -> Mask:
        """The columns of the last keys, as kernels take them; a structure is judged over all keys since the first."""
        num_columns = self.sizes[2] + self.sizes[4]
        if None not in self.built:
            self.built[None] = self._read_all(num_columns)
        if self.function is bidirectional_mask_function and num_columns != num_keys:
            return f"an attention mask of {num_columns} columns over {num_keys} keys"
        whole: Mask = self.built[None]
        if isinstance(whole, str) or whole.key_mask is None:
            return whole
        return whole._replace(key_mask=whole.key_mask[:, -num_keys:])

    def _read_all(self, num_keys: int) -> Mask:
        """The mask of all keys since the first that is asked for; a structure is compared by place, in O(B Lq Lk)."""
        if self.part is not None:
            return "a part of a mask, for some of its queries"
        _, num_queries, _, q_offset, _ = self.sizes
        # Column j of the argument is token j, as transformers reads it: missing ones are hidden, those beyond unread.
        padding = masking_utils.prepare_padding_mask(self.options.get("attention_mask"), num_keys, 0)
        key_mask = None if padding is None else padding[:, :num_keys]
        if int(num_keys) != int(q_offset + num_queries) and self.function is not bidirectional_mask_function:
            return (
                "keys beyond the last query (the empty slots of a static cache), or an attention_mask of "
                f"{int(num_keys)} columns for {int(q_offset + num_queries)} tokens"
            )
        if key_mask is not None and surely_all(key_mask):
            key_mask = None
        if self.is_plain:
            return PlainMask(key_mask, is_causal=self.function is causal_mask_function)
        # A window that holds all keys is none.
        if self.local_size is not None and num_keys < self.local_size:
            for skips, is_causal in (("allow_is_causal_skip", True), ("allow_is_bidirectional_skip", False)):
                if self.options.get(skips):
                    return PlainMask(key_mask, is_causal=is_causal)
        if torch.compiler.is_exporting():  # sizes alone can be read
            return (
                "a mask that torch.export, which knows sizes alone, cannot read (give the model an attention_mask: a "
                "text is then not looked at for packed sequences)"
            )
        allowed = self._shown(num_queries, num_keys, q_offset)
        if bool(allowed.all()):
            return PlainMask(key_mask, is_causal=False)
        ones = torch.ones(allowed.shape[-2:], dtype=torch.bool, device=allowed.device)
        if bool((allowed == ones.tril(num_keys - num_queries)).all()):
            return PlainMask(key_mask, is_causal=True)
        return "a mask that is neither causal nor full (a sliding window, chunks, packed sequences or a prefix)"

    def build(self, implementation: str | None, num_keys: int) -> Any:
        """The columns of the last keys, as another attention implementation's mask function makes them."""
        # Those without a mask function are given none.
        if implementation not in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping:
            return None
        batch_size, num_queries, length, q_offset, kv_offset = self.sizes
        if self.function is bidirectional_mask_function:
            # Columns that do not fit are an error of the function's own.
            num_keys = length
        place = implementation, num_keys
        if place not in self.built:
            offsets = {"q_offset": q_offset, "kv_offset": kv_offset + length - num_keys}
            sizes = {"batch_size": batch_size, "q_length": num_queries, "kv_length": num_keys, **offsets}
            # None for a plain mask would be read as that of the part alone.
            skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip") if self.part is not None else ()
            options = {**self.options, **dict.fromkeys(skips, False)}
            mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation](**sizes, **options)
            self.built[place] = mask if self.part is None or mask is None else mask[self.part]
        return self.built[place]


# Implementations that do not ask a module for their name, as those of FlashAttention do.
_NAMELESS = (None, "sdpa", "eager")


class _Former:
    """A module whose configuration names another attention implementation, as this one's function reads it."""

    def __init__(self, module: nn.Module, implementation: str | None) -> None:
        config: Any = copy(module.config)
        config._attn_implementation_internal = implementation
        self.behind, self.config = module, config

    def __getattr__(self, name: str) -> Any:
        """All else is the module's."""
        return getattr(self.behind, name)


AnyMask = AskedMask | Tensor | None
"""Mask of an attention function: an `AskedMask` where a model makes none itself, or is given one of pairs."""


@dataclass(frozen=True, eq=False)
class InterfaceCall:
    """A call of an attention function by transformers; the options are its keywords: scaling, dropout, is_causal…"""

    module: nn.Module
    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    mask: AnyMask
    options: dict[str, Any]
    former: str | None  # the attention implementation in whose place linattn's function was called

    @property
    def scale(self) -> float:
        """The factor of q·k: as passed, else SDPA's own default, on which a model that passes none relies."""
        scaling = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else float(scaling)

    @property
    def scoring(self) -> dict[str, float]:
        """The scale, and the soft cap where the call asks for one, as linattn's attention names them."""
        cap = self.options.get("softcap")
        return {"scale": self.scale} if cap is None else {"scale": self.scale, "soft_cap": cap}

    @property
    def sinks(self) -> Tensor | None:
        """The logits (H,) of one more key of value 0 in each head; None where the call asks for none."""
        sinks = self.options.get("s_aux")
        return self.options.get("sinks") if sinks is None else sinks

    @property
    def is_causal(self) -> bool | None:
        """Whether later keys are hidden, as the call or else the module says; None where neither does."""
        is_causal: bool | None = self.options.get("is_causal")
        return getattr(self.module, "is_causal", None) if is_causal is None else is_causal

    def hides_keys(self, num_keys: int) -> bool:
        """True if the call asks for a window, or for chunks, that so many keys do not fit in."""
        mask = self.mask
        hides = isinstance(mask, AskedMask) and mask.local_size is not None and isinstance(mask.read(num_keys), str)
        return hides or self._exceeds_window(num_keys)

    def _exceeds_window(self, num_keys: int) -> bool:
        """True if the options name a window that so many keys do not fit in."""
        window = self.options.get("sliding_window")
        # Qwen 2 MoE writes 0 for none.
        return window is not None and window != 0 and (not isinstance(window, int) or window < num_keys)

    def read_mask(self, name: str, num_keys: int, *, takes: Collection[str] = ()) -> tuple[Tensor | None, bool]:
        """Key padding, (B, Lk) bool or None, and causality, where that, and what it takes, is all a call asks for."""
        requests, dropout = inexpressible(self.options, takes), self.options.get("dropout")
        if self._exceeds_window(num_keys):
            requests.append(f"a sliding window of {self.options['sliding_window']} over {num_keys} keys")
        if dropout:
            requests.append(
                f"dropout of {dropout} on the weights (call model.eval(), or load the model with attention dropout 0)"
            )
        # Models say so in the call, or record them, which no graph looks up.
        collector: Any = _active_collector
        recorded = None if torch.compiler.is_compiling() else collector.get()
        if self.options.get("output_attentions") or "attentions" in (recorded or ()):
            requests.append("the weights themselves (output_attentions=True)")
        if requests:
            raise ValueError(_refusal(name, ", ".join(dict.fromkeys(requests))))
        mask = self.mask.read(self.key.shape[-2]) if isinstance(self.mask, AskedMask) else self.mask
        if isinstance(mask, str):
            raise ValueError(_refusal(name, mask))
        if isinstance(mask, PlainMask):
            return mask
        if mask is not None and mask.ndim != 2:
            raise ValueError(
                f"{name} was given a {mask.ndim}-D mask, of pairs, by the call or by its model (for packed texts, or "
                "pictures); a kernel hides keys: pass padding as attention_mask (B, Lk), or leave the layer its softmax"
            )
        if self.is_causal is None:
            kind = type(self.module).__name__
            raise ValueError(f"{name} ({kind}) does not say whether it is causal; its attention cannot be replaced")
        return None if mask is None else mask.bool(), bool(self.is_causal)

    def by_former(self) -> tuple[Tensor, Tensor | None]:
        """The output (B, Lq, H, Dv) by the function before linattn's, with the mask it takes, and weights if any."""
        mask = self.mask.build(self.former, self.key.shape[-2]) if isinstance(self.mask, AskedMask) else self.mask
        attend, module = attention_function(type(getattr(self.module, "behind", self.module)), self.former), self.module
        if self.former in _NAMELESS and self.options.get("block_indices") is not None:
            raise ValueError(f"{type(module).__name__} chooses keys by its attention implementation's name")
        named: Any = module if self.former in _NAMELESS else _Former(module, self.former)
        out: tuple[Tensor, Tensor | None] = attend(named, self.query, self.key, self.value, mask, **self.options)
        return out


def refuse_weights(part: Any, args: Any, options: dict[str, Any]) -> None:
    """Forward pre-hook of models: returned weights, which not every family tells its attention function of."""
    asked = options.get("output_attentions")
    if part.config.output_attentions if asked is None else asked:
        raise ValueError(
            f"{type(part).__name__} is asked for the weights themselves (output_attentions=True, in the call or in its "
            "config), and its attention returns none as long as linattn has replaced it; call it without them"
        )


def refuse_again(name: str, num_held: int, mask: object = None) -> None:
    """Refuse tokens at positions that a cache is past, but where padding is all that it holds."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask[:, :num_held].any()):
        raise ValueError(
            f"{name} would take a text in again beside a cache of {num_held} tokens: generate gives it the whole text "
            "again with use_cache=False (pass use_cache=True; model.generation_config has it too), by prompt lookup or "
            "assistants from a cache that is not empty, and where a prompt is no longer than what the cache holds; "
            "give the whole text so far, with new tokens at its end, or a new cache. Positions begin again in "
            "packed texts too, and after padding on the right: pad on the left"
        )


def by_token(out: Tensor) -> Tensor:
    """(B, H, Lq, Dv) as (B, Lq, H, Dv), in memory too: models rely on it."""
    return out.transpose(1, 2).contiguous()


def inexpressible(options: dict[str, Any], takes: Collection[str] = ()) -> list[str]:
    """In words, options that change the weights of pairs and are not taken, as sinks of no shape (H,) never are."""
    values = [(words, options.get(name)) for words, names in _INEXPRESSIBLE.items() for name in names]
    asked = [(words, value) for words, value in values if value is not None]
    return [words for words, value in asked if words not in takes or (words == SINKS and value.ndim != 1)]


def _refusal(name: str, asked: str) -> str:
    """The error for what a kernel cannot express."""
    return (
        f"{name} asks for {asked}, which its replacement for softmax cannot express: call the model without "
        "it, or leave this layer its softmax"
    )


def surely_all(x: Tensor) -> bool:
    """True if all of a bool tensor is known to be true: what is recorded now runs with other tensors later."""
    return not is_tracing(x) and bool(x.all())


def ask_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **options: Any
) -> AskedMask:
    """The registered mask function: keep what is asked for; layers differ in what they read of it."""
    # Models within models are given the mask that the outer one asked for.
    if isinstance(mask := options.get("attention_mask"), AskedMask):
        return mask
    cache = None
    if isinstance(kv_offset, CachedTokens):
        # Compilers know plain numbers alone.
        cache, kv_offset = kv_offset.cache, kv_offset.number
        cache.check_call(options.get("config"), batch_size)
        cache.check_mask(mask)
    # A static cache counts its tokens in place, before a mask is built.
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()
    return AskedMask((batch_size, q_length, kv_length, q_offset, kv_offset), options, cache)
