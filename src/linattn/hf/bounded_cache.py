"""A transformers cache that bounds what layers keep to a budget of bytes; letters as in hf/__init__.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from linattn.hf._attention_modules import attention_modules, parts_of, put_before, unwrapped
from linattn.hf._bounded_layers import BoundedLayer
from linattn.hf._calls import CachedTokens
from linattn.hf._choosing import CachedLayer, cached_layers, refuse_intercepted
from linattn.hf._dispatch import NAME
from linattn.hf._text_caches import TextCache
from linattn.hf.interception import SWITCHING
from linattn.hf.language_model import LinearLMForCausalLM
from linattn.hf.layer_attention import attention_of
from linattn.hf.state_cache import watch
from linattn.kv_cache import MergedKV
from linattn.kv_cache.budget import BITS_BY_DEFAULT, RECALLS, Recall, Sizes, check_budget, kept_bytes, within_budget
from linattn.kv_cache.config import Bits
from linattn.kv_cache.layer_plans import PLAIN, read_memory_plans

_BUDGET = 512
_PREFIXED = (
    "the model is tuned by a prefix of keys, in a cache of its own that takes the place of the one that it is given; "
    "make the cache of model.get_base_model() and generate with that, or leave the BoundedCache out"
)
# Tokens of a text as long as any.
_ANY_LENGTH = 2**62


@dataclass(frozen=True)
class BoundedLayerReport:
    """Report of one layer of a `BoundedCache`: its bound, or why its keys and values stay exact.

    Attributes:
        layer: number of its attention module, from 0, in the order of the model's modules.
        module_name: its qualified name.
        config: the window and the merged keys; None where keys and values stay exact.
        reason: why they stay exact; None where they are bounded.
        num_key_heads: key/value heads of the layer.
        sizes: of their keys and values; None of a layer that passes of a few tokens have not reached.
    """

    layer: int
    module_name: str
    config: MergedKV | None
    reason: str | None
    num_key_heads: int
    sizes: Sizes | None

    def exact_bytes(self, num_tokens: int) -> int:
        """Bytes of all keys and values of a text, which exact attention keeps."""
        return 0 if self.sizes is None else self.num_key_heads * self.sizes.key_bytes * num_tokens

    def kept_bytes(self, num_tokens: int) -> int:
        """The most bytes that are kept after so many tokens, fewer once a tier is quantized; all of an exact layer."""
        if self.sizes is None or self.config is None:
            return self.exact_bytes(num_tokens)
        return self.num_key_heads * kept_bytes(self.config, self.sizes, num_tokens)

    def __str__(self) -> str:
        """One line."""
        return f"{self.layer:3} {self.module_name}: {self.config.label if self.config else f'exact ({self.reason})'}"


class BoundedCache(TextCache):
    """A KV cache of constant size for a pretrained language model: a window of exact keys, merged ones before.

        bytes per layer and key/value head ≤ budget · (D + Dv) · bytes of a number, for a text of any length

    A budget of N is the bytes of N exact keys and values in the model's dtype; biases, codes and the sampled queries
    are paid from it. `linattn.MergedKV` says how keys are merged. Not quantized, attention to at most as many tokens as
    there are exact and merged keys is softmax; it is an approximation beyond, and as soon as tokens are quantized.

    The model's weights and modules are not changed, but for a forward pre-hook that refuses a text given again. Its
    attention implementation becomes "linattn", which attends as the former one did, to the bit, in every call without
    such a cache; a model may also be loaded with it. Layers with a sliding window, recurrent layers, and layers that
    attend in a way that merged keys cannot express (keys shared with other layers) keep transformers' own cache layers;
    `report` says which. Soft caps on logits and learned attention sinks are those of the model. Where every layer has a
    sliding window, those wider than the budget are bounded, for texts up to the window.

    To continue a text, give the same cache again; to try several continuations, continue from `fork`. A call that ends
    by an error leaves new tokens in some layers, which the next call refuses, or in all: go on from a fork made before.
    `crop` needs `activate_past_recording`, which assisted generation and prompt lookup call by themselves; a layer then
    holds two states, and queries, keys and values of up to 512 of the last tokens, or of two wider windows, besides. An
    encoder-decoder takes it for its own text, `EncoderDecoderStates(BoundedCache(model), DynamicCache())`.

    Cost: five passes of a few tokens for the first cache of a model. A step takes O(window + num_merged) per head.

    Args:
        model: a causal transformers model whose layers use AttentionInterface, or a compiled or PEFT one around it.
        budget: in exact keys and values, per layer and key/value head, of the dtype that the model has now: a model
            that is cast to one of more bytes refuses the cache.
        bits: of merged keys and values, 2 to 8 in halves, or two of these, of keys and of values; of the tokens that
            are not merged yet the newest have 2 more, 8 at most, and the next as many. None for 32 and no tiers.
        recall: "near" for the least median KL divergence; "middle" for more tokens one by one, in 4 bits; "far" for
            the most, in 3 bits. Leave bits out beside these two.
        config: window and merged keys of every bounded layer, `MergedKV(window=64, num_merged=512, bits=4)`; leave
            budget, bits and recall out then.
        plan: file that `linattn audit --budget --plan-out` wrote: each layer's own window and merged keys at the
            budget; leave bits and recall out then.

    Raises:
        TypeError: if `model` is no transformers model, or `config` no `linattn.MergedKV`.
        ValueError: if no layer can be bounded; the budget is out of range or too small, or the plan has none of it or
            is of another model; options do not go together; the model is linearized, or asked for attention weights.

    Example:
        >>> import linattn, torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)).eval()
        >>> cache = BoundedCache(model, config=linattn.MergedKV(4, 8, bits=None, num_sinks=0))
        >>> print(cache.report[0])
          0 transformer.h.0.attn: window 4 + merged 8
        >>> prompt, options = torch.tensor([[1, 2, 3]]), {"max_new_tokens": 40, "eos_token_id": None}
        >>> text = model.generate(prompt, past_key_values=cache, **options)
        >>> text.shape, cache.get_seq_length(), cache.layers[0].state.keys.merged.key.shape[2]
        (torch.Size([1, 43]), 42, 8)

    Source: transformers' documentation, "Caching"; `linattn.MergedKV` for merged keys.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        budget: int = _BUDGET,
        *,
        bits: Bits | None = BITS_BY_DEFAULT,
        recall: Recall = RECALLS[0],
        config: MergedKV | None = None,
        plan: str | Path | None = None,
    ) -> None:
        wrapper, model = model, unwrapped(model)
        _check_options(budget, bits, recall, config, plan)
        _check_model(model, wrapper)
        cached = cached_layers(model)
        reasons = _reasons(model, cached, budget, config)
        bounded = [layer for layer in cached if reasons[layer.number] is None]
        if config is not None:
            configs = {layer.number: config for layer in bounded}
        elif plan is not None:
            configs = _planned(model, bounded, Path(plan), budget)
        else:
            configs = {x.number: within_budget(budget, x.sizes, bits, recall=recall) for x in bounded if x.sizes}
        super().__init__(model, {x.place: BoundedLayer(x.name, configs[x.number], x.sizes) for x in bounded})
        self.report = tuple(
            BoundedLayerReport(x.number, x.name, configs.get(x.number), reasons[x.number], x.num_key_heads, x.sizes)
            for x in cached
        )
        self._bounded_places = frozenset(layer.place for layer in bounded)
        with SWITCHING:
            refuse_intercepted(model)
            put_before(model, NAME)
            for part in parts_of(model):
                watch(part)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """From a file."""
        vars(self).update(state, is_from_file=True)

    def _mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Of a layer, said so that the mask knows its cache."""
        if self.is_from_file:
            raise ValueError(
                "the cache is from a file: call BoundedCache(model, …) once before, with the options of the cache, and "
                "the model looks for text given again"
            )
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        # All masks of a call tell of it; that of full attention, where there is any, is enough.
        is_local = [getattr(layer, "is_sliding", False) for layer in self.layers]
        if not all(is_local) and any(is_local[layer_idx : layer_idx + 1]):
            return length, offset
        tokens = CachedTokens(offset)
        tokens.number, tokens.cache = offset, self
        return length, tokens

    # Outside graphs: their symbols for numbers become none of a class of ours.
    get_mask_sizes = torch.compiler.disable(_mask_sizes)

    @property
    def max_cache_len(self) -> int:
        """Absent: PEFT's `generate` asks for it where it puts a cache with a prefix in this one's place."""
        raise AttributeError(_PREFIXED)

    def refuse_plain_keys(self, module: torch.nn.Module) -> None:
        """Refuse to attend to new keys alone where a bounded layer should have had them."""
        if getattr(module, "layer_idx", None) in self._bounded_places:
            raise RuntimeError(
                f"{type(module).__name__} was given a bounded cache and has not used it, as in training with gradient "
                "checkpointing; call model.eval(), or leave the cache out (use_cache=False)"
            )


def _check_options(budget: int, bits: Bits | None, recall: Recall, config: object, plan: object) -> None:
    """Refuse options that do not go together."""
    check_budget(budget)
    if config is not None and not isinstance(config, MergedKV):
        raise TypeError(
            f"config must be a linattn.MergedKV or None, got {config!r}; write MergedKV(window=64, num_merged=512)"
        )
    if isinstance(config, MergedKV) and config.window is None:
        raise ValueError(f"config must have a window, got {config!r}; give MergedKV(window=64, num_merged=512)")
    if config is not None and ((budget, bits, recall, plan) != (_BUDGET, BITS_BY_DEFAULT, RECALLS[0], None)):
        raise ValueError(
            f"config={config!r} says what every layer keeps, got budget={budget}, bits={bits}, recall={recall!r}, "
            f"plan={plan!r} too; leave those out"
        )
    if plan is not None and (bits, recall) != (BITS_BY_DEFAULT, RECALLS[0]):
        raise ValueError(f"a plan says what each layer keeps, got {bits=}, {recall=}; leave them out")


def _check_model(model: PreTrainedModel, wrapper: object) -> None:
    """Refuse models that a bounded cache does not serve, and adapters around them."""
    kind = type(model).__name__
    # Of PEFT, which puts a cache of its own in the place of one that is passed.
    if getattr(getattr(wrapper, "active_peft_config", None), "peft_type", None) in ("PREFIX_TUNING", "CARTRIDGE"):
        raise ValueError(_PREFIXED)
    if any(part.cache_place is not None and attention_of(part.module) for part in attention_modules(model)):
        raise ValueError(f"{kind} is linearized, and keeps states in a StateCache; leave the budget out")
    if isinstance(model, LinearLMForCausalLM):
        raise ValueError(f"{kind} keeps a StreamCache, whose streams are as large as its blocks make them; use that")
    if model.config.output_attentions:
        raise ValueError(
            f"{kind} is asked for the attention weights, which merged keys lack; set config.output_attentions to False"
        )


def _reasons(
    model: PreTrainedModel, cached: tuple[CachedLayer, ...], budget: int, config: MergedKV | None
) -> dict[int, str | None]:
    """Why layers stay exact, by their numbers; None for those that are bounded."""
    kind, reasons = type(model).__name__, {layer.number: layer.reason for layer in cached}
    if not cached:
        raise ValueError(
            f"no layer of {kind} keeps keys and values of a causal text (a prefix may "
            "see later tokens), so that there is no cache to bound; linearize_ makes an encoder cheaper"
        )
    # Softmax within a window is what those layers are; where all have one, the wider ones take more than the budget.
    is_mixed = any(layer.window is None for layer in cached)
    windowed = [layer for layer in cached if layer.reason is None and layer.window is not None]
    local = [layer for layer in windowed if is_mixed or _has_narrow_window(layer, budget, config)]
    reasons |= {layer.number: f"a sliding window of {layer.window} tokens" for layer in local}
    if None not in reasons.values() and len(local) < len(cached):
        words = "; ".join(dict.fromkeys(words for words in reasons.values() if words is not None))
        raise ValueError(f"no layer of {kind} can be bounded: {words}; generate without a BoundedCache")
    return reasons


def _has_narrow_window(layer: CachedLayer, budget: int, config: MergedKV | None) -> bool:
    """True if a layer's sliding window keeps no more bytes than a bounded layer would."""
    if layer.window is None:
        return False
    if config is None or layer.sizes is None:
        return layer.window <= budget
    return layer.window * layer.sizes.key_bytes <= kept_bytes(config, layer.sizes, _ANY_LENGTH)


def _planned(model: PreTrainedModel, bounded: list[CachedLayer], file: Path, budget: int) -> dict[int, MergedKV]:
    """Merged keys of each layer by the plan of a budget; refuse one of other layers, of no method, or of more bytes."""
    plans, numbers = {plan.budget: plan for plan in read_memory_plans(file)}, [layer.number for layer in bounded]
    if budget not in plans:
        raise ValueError(
            f"{file} has plans of {', '.join(map(str, plans))} keys, got a budget of {budget}; give one of these"
        )
    plan = plans[budget]
    if plan.layers != numbers:
        raise ValueError(
            f"the plan is of {plan.model}, whose global layers are {plan.layers}, and {type(model).__name__} has "
            f"{numbers}; give the plan of this model"
        )
    if PLAIN in plan.choices:
        raise ValueError(
            f"at the bytes of {plan.budget:,} keys the plan found nothing better by a margin than {plan.label}, which "
            "is no method of a model; give a larger budget, or no plan"
        )
    configs = dict(zip(numbers, map(MergedKV.parse, plan.labels), strict=True))
    for x, few in zip(bounded, plan.budgets, strict=True):
        config, dtype = configs[x.number], str(model.dtype).removeprefix("torch.")
        if x.sizes and kept_bytes(config, x.sizes, _ANY_LENGTH) > few * x.sizes.key_bytes:
            words = f"{config.label} takes more bytes in layer {x.number} than {few} keys in {dtype}"
            raise ValueError(f"{words}: the plan is of another dtype; give one of linattn audit --dtype {dtype}")
    return configs
