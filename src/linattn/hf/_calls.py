"""One call of transformers' attention interface: read, answered by softmax, or refused by name.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq, Lk), D head width, Dv value width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from linattn.hf._mask import Mask, PlainMask, RefusedMask

# Keywords of transformers' attention functions that change the weights in a way φ(q)·φ(k) cannot express.
_INEXPRESSIBLE = {
    "position_bias": "a position bias added to the logits",
    "softcap": "soft-capped logits",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "indices": "a sparse choice of keys",
    "block_indices": "a sparse choice of keys",
}


@dataclass(frozen=True, eq=False)
class InterfaceCall:
    """What transformers passes to an attention function; the options are its keywords: scaling, dropout, is_causal…"""

    module: nn.Module
    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, Hkv, Lk, D)
    value: Tensor  # (B, Hkv, Lk, Dv)
    mask: Mask
    options: dict[str, Any]

    @property
    def scale(self) -> float:
        """The factor of q·k: as passed, else SDPA's own default, on which a model that passes none relies."""
        scaling = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else float(scaling)

    def refuse_options(self, name: str, num_keys: int) -> None:
        """Refuse what the call asks for beyond q, k, v, a padding mask and causality."""
        found = _inexpressible(self.options)
        window, dropout = self.options.get("sliding_window"), self.options.get("dropout")
        if window is not None and (not isinstance(window, int) or window < num_keys):
            found.append(f"a sliding window of {window} over {num_keys} keys")
        if dropout:
            found.append(
                f"dropout of {dropout} on the weights (call model.eval(), or load the model with attention dropout 0)"
            )
        if found:
            raise ValueError(_refusal(name, ", ".join(dict.fromkeys(found))))

    def read_mask(self, name: str) -> tuple[Tensor | None, bool]:
        """Key padding, (B, Lk) bool or None, and causality."""
        mask, is_causal = self.mask, self.options.get("is_causal")
        if isinstance(mask, RefusedMask):
            raise ValueError(_refusal(name, mask.reason))
        if isinstance(mask, PlainMask):
            return mask.key_mask, mask.is_causal
        if mask is not None and mask.ndim != 2:
            raise ValueError(f"{name} was given a {mask.ndim}-D mask; pass key padding only, as a (B, Lk) mask")
        if is_causal is None:
            is_causal = getattr(self.module, "is_causal", None)
        if is_causal is None:
            kind = type(self.module).__name__
            raise ValueError(f"{name} ({kind}) does not say whether it is causal; its attention cannot be replaced")
        return None if mask is None else mask.bool(), bool(is_causal)

    def by_softmax(self) -> Tensor:
        """(B, Lq, H, Dv) by transformers' SDPA function, which takes dropout, position biases and masks of pairs."""
        name = type(self.module).__name__
        found = _inexpressible({**self.options, "position_bias": None})
        if found:
            raise ValueError(
                f"{name} asks for {', '.join(found)}, which transformers' SDPA attention, by which the softmax layers "
                "of a linearized model attend, does not give; restore_(model) gives its own attention back"
            )
        pairs: Tensor | None
        if isinstance(self.mask, RefusedMask) and self.mask.allowed is not None:
            pairs, is_causal = self.mask.allowed, False
        elif isinstance(self.mask, Tensor) and self.mask.ndim == 4:
            pairs, is_causal = self.mask, False
        else:
            pairs, is_causal = self._pairs(*self.read_mask(name))
        passed = {"dropout": self.options.get("dropout", 0.0), "position_bias": self.options.get("position_bias")}
        tensors = self.query, self.key, self.value
        out, _ = sdpa_attention_forward(self.module, *tensors, pairs, scaling=self.scale, is_causal=is_causal, **passed)
        return out

    def _pairs(self, key_mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, bool]:
        """The mask as SDPA takes it, (B or 1, 1, Lq, Lk), and True if its own flag does instead."""
        num_queries, num_keys = self.query.shape[-2], self.key.shape[-2]
        if key_mask is None and (not is_causal or num_queries == num_keys):
            return None, is_causal
        # SDPA's flag is aligned top-left; a cache wants the last query level with the last key.
        pairs = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool, device=self.key.device)
        pairs = pairs.tril(num_keys - num_queries) if is_causal else pairs
        return (pairs if key_mask is None else pairs & key_mask[:, None, None, :]), False


def refuse_weights(part: Any, args: Any, options: dict[str, Any]) -> None:
    """Forward pre-hook of models: returned weights, which not every family tells its attention function of."""
    asked = options.get("output_attentions")
    if part.config.output_attentions if asked is None else asked:
        raise ValueError(
            f"{type(part).__name__} is asked for the weights themselves (output_attentions=True, in the call or in its "
            "config), and its attention returns none as long as linattn has replaced it; call it without them"
        )


def _inexpressible(options: dict[str, Any]) -> list[str]:
    """In words, the options that change the weights of single pairs."""
    return [words for option, words in _INEXPRESSIBLE.items() if options.get(option) is not None]


def _refusal(name: str, asked: str) -> str:
    """The error for what φ(q)·φ(k) cannot express."""
    return (
        f"{name} asks for {asked}, which a kernel φ(q)·φ(k) cannot express: call the model without it, or leave this "
        "layer its softmax"
    )
