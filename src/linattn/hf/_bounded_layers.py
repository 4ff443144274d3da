"""A bounded layer of a cache, handed along with the keys that it returns; letters as in hf/__init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from linattn.hf._cache_layers import Kernel, RecordingLayer
from linattn.hf._calls import CAPS, SINKS, InterfaceCall
from linattn.hf.layer_attention import ATTRIBUTE, rescale_query
from linattn.kv_cache import MergedKV, MergedState
from linattn.kv_cache.budget import Sizes
from linattn.kv_cache.functional import merged_attention_with_state, merged_partial_with_state
from linattn.softmax.partial import Attended


class HandedKeys(Tensor):
    """New keys on their way from a bounded layer to linattn's attention function, which alone can read them."""

    layer: BoundedLayer  # that they come from, whose state is to take them in
    key: Tensor  # the keys themselves, (B, Hkv, L, D)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Shapes and the like as of any tensor; an error for all else, as earlier keys are missing here."""
        if function in _SHOWN:
            return super().__torch_function__(function, types, args, kwargs or {})
        raise RuntimeError(
            "the keys that a BoundedCache returned were read before linattn's attention function had them: the model "
            "is compiled with dynamic=True (leave that out), it attends by another implementation, or it changes its "
            "keys after its cache has them; call model.set_attn_implementation('linattn') and go on from a fork of "
            "the cache, or leave the cache out"
        )


# What a model may look at on the way.
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "requires_grad")
_SHOWN = frozenset({Tensor.size, Tensor.dim, *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES)})


class BoundedLayer(RecordingLayer[MergedState]):
    """One layer of a `BoundedCache`: the latest keys and values, and merged ones of all before."""

    def __init__(self, module_name: str, config: MergedKV, sizes: Sizes | None = None) -> None:
        super().__init__(module_name)
        self.config, self._sizes = config, sizes

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention module: the new keys, with this layer, and values."""
        # Of fewer bytes they are under autocast, or where a wrapper of the model casts its weights.
        if self._sizes is not None and key_states.element_size() > self._sizes.number_bytes:
            raise ValueError(
                f"{self.module_name} has keys in {key_states.dtype}, and the cache was made for numbers of "
                f"{self._sizes.number_bytes} bytes, so that it would hold more bytes than its budget; cast the model "
                "first, and make the cache after that"
            )
        handed = super().update(key_states, value_states)[0].as_subclass(HandedKeys)
        handed.key, handed.layer = key_states, self
        return handed, value_states

    def _advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: MergedState | None,
        *,
        scale: float,
        key_mask: Tensor | None = None,
        sinks: Tensor | None = None,
        soft_cap: float | None = None,
    ) -> Attended[MergedState]:
        """The output (B, H, L, Dv) over a state's keys and these, at a temperature, and the state after them."""
        tokens = rescale_query(None, query, scale), key, value, self.config, state
        if sinks is None:
            return merged_attention_with_state(*tokens, key_mask=key_mask, enable_gqa=True, soft_cap=soft_cap)
        rows, after = merged_partial_with_state(*tokens, key_mask=key_mask, enable_gqa=True, soft_cap=soft_cap)
        return Attended(rows.with_sink(sinks), after)

    def _kernel(self, call: InterfaceCall) -> Kernel:
        """Merged attention; refuse keys that were handed to another call, and modules that are no causal ones."""
        if self.handed is not call.key:
            raise RuntimeError(
                f"{self.module_name} attends twice to the keys that its cache returned once, which would take them in "
                "twice; leave the bounded cache out"
            )
        if not getattr(call.module, "is_causal", False):
            raise ValueError(
                f"{type(call.module).__name__} is not causal and was given the cache of {self.module_name}; for the "
                "self-attention of an encoder-decoder write EncoderDecoderStates(BoundedCache(model), DynamicCache())"
            )
        if hasattr(call.module, ATTRIBUTE):
            raise RuntimeError(
                f"{self.module_name} attends by a feature map since linearize_, and the cache bounds its softmax; "
                "call restore_ on the model, or leave the cache out"
            )
        return self._advance, self.config.window or 0, (SINKS, CAPS)
