"""Caches of constant memory for linear attention: a model's states, or the streams of a `LinearLM`."""

import inspect
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from linattn.attention import State
from linattn.hf._attention_modules import attention_modules
from linattn.hf._cache_layers import Kernel, RecordingLayer, StatefulLayer
from linattn.hf._calls import InterfaceCall, refuse_again, surely_all
from linattn.hf._text_caches import ForkedCache, TextCache, cache_bytes, forked
from linattn.hf.layer_attention import attention_of
from linattn.nn import Stream

# Of an encoder's output, to tell it from another text's; and by how much its own may differ when it is computed again.
_COLUMNS, _ROUNDING = 8, 1e-2


class StreamLayer(StatefulLayer[Stream]):
    """One block's place in a `StreamCache`; its state is what the block keeps."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> NoReturn:
        """Refused: only a LinearLM's blocks know how to go on."""
        raise RuntimeError("a StreamCache serves a LinearLMForCausalLM; give another model a cache of its own")


class StreamCache(ForkedCache):
    """The cache of a `LinearLMForCausalLM`: each block's stream, of constant size where it is linear.

    `generate` makes one by itself; make one to hold on to it. Give it again to go on with a text, and a `fork` of it to
    try several continuations. A call that ends by an error leaves it as it was.

    Args:
        num_layers: how many blocks the model has.

    Example:
        >>> import torch
        >>> from linattn.hf import LinearLMConfig, LinearLMForCausalLM
        >>> model = LinearLMForCausalLM(LinearLMConfig(num_hidden_layers=2)).eval()
        >>> cache = StreamCache(2)
        >>> _ = model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> held, fork = cache.num_bytes, cache.fork()
        >>> _ = model(input_ids=torch.tensor([[4]]), past_key_values=fork)
        >>> cache.get_seq_length(), fork.get_seq_length(), fork.num_bytes == held
        (3, 4, True)
    """

    layers: Any  # of one kind, `StreamLayer`

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[StreamLayer() for _ in range(num_layers)])

    @property
    def streams(self) -> list[Stream] | None:
        """Each block's stream; None before the first token."""
        return [layer.state for layer in self.layers if layer.state is not None] or None

    def checked_mask(self, mask: Tensor | None, num_rows: int, length: int) -> Tensor | None:
        """The mask (B, L) of new tokens, from one of all tokens, held against earlier ones, or of these alone."""
        self.check_rows(num_rows)
        num_tokens = self.get_seq_length()
        if mask is not None and mask.shape[1] < num_tokens + length:
            earlier = mask.new_ones(len(mask), num_tokens) if self._live is None else self._live[:, :num_tokens]
            mask = torch.cat((earlier, mask[:, -length:]), 1)
        self.check_mask(mask)
        return None if mask is None else mask[:, num_tokens : num_tokens + length]

    def advance(self, streams: tuple[Stream, ...], num_tokens: int) -> None:
        """The streams after so many more tokens."""
        for layer, stream in zip(self.layers, streams, strict=True):
            layer.advance_to(stream, num_tokens)


class StateLayer(RecordingLayer[State]):
    """One layer of a `StateCache`: the state of all tokens so far.

    transformers' attention modules give a cache their new keys and values and attend to what `update` returns: the new
    ones alone, which the attention function then gives to `attend`, with the queries. A module that does not would
    attend to the new tokens only: `expect`, called before the module runs, and `settle`, after, make that an error.
    """

    _is_expected = False

    def expect(self) -> None:
        """The module is about to run, and its attention function will be told of this layer."""
        self._is_expected = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention module: the new keys and values, as they came, or an error if it may not call."""
        if self.handed is not None:
            raise RuntimeError(
                f"the cache's layer of {self.module_name} was left in the middle of a call, by an error; reset the "
                "cache or go on from a fork taken before"
            )
        if not self._is_expected:
            raise RuntimeError(
                f"the cache holds the state of {self.module_name} as linearize_ left it, and another model, or the "
                "same after restore_, called it; give that model a cache of its own"
            )
        return super().update(key_states, value_states)

    def _kernel(self, call: InterfaceCall) -> Kernel:
        """Return the attention that `linearize_` put into the module."""
        attention = attention_of(call.module)
        assert attention is not None
        return attention.advance, attention.window or 0, attention.takes

    def settle(self) -> None:
        """The module has run: an error if its keys never came back."""
        self._is_expected = False
        if self.handed is not None:
            raise RuntimeError(
                f"{self.module_name} gave its keys to a cache of states and attended without it, by another attention "
                "function than linearize_'s; call restore_ on the model, or set its attention implementation back"
            )

    def reset(self) -> None:
        """Forget every token, and a call that an error ended."""
        super().reset()
        self._is_expected = False


class StateCache(TextCache):
    """The cache of a linearized model: constant in the number of tokens where a feature map took the softmax's place.

        S = Σ φ(k)vᵀ,   z = Σ φ(k):   Hkv·R·(Dv + 1) numbers per row and layer, instead of Hkv·L·(D + Dv)

    Layers that kept their softmax have their keys and values in it. `generate` of a linearized model makes one by
    itself. To continue a text, give the same cache again; to try several continuations, continue from `fork`. A call
    that ends by an error leaves new tokens in some layers, which the next call refuses, or in all: go on from a fork.

    An encoder-decoder takes it for its self-attention: `EncoderDecoderStates(StateCache(model), DynamicCache())`. A
    pass that records gradients keeps the graph alive through the states.

    Args:
        model: a linearized model; the cache serves it and copies of it.

    Raises:
        ValueError: if no causal layer of the model attends by a feature map.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from linattn.hf import linearize_
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=2, n_head=2)).eval()
        >>> _ = linearize_(model, method="EluPlusOne", layers=[0])
        >>> cache = StateCache(model)
        >>> _ = model(input_ids=torch.tensor([[1, 2, 3]]), past_key_values=cache)
        >>> tuple(cache.layers[0].state.S.shape), tuple(cache.layers[1].keys.shape)
        ((1, 2, 2, 2), (1, 2, 3, 2))
        >>> cache.num_bytes == 4 * (8 + 4 + 2) + 4 * (12 + 12)  # float32: S, z and m; keys and values
        True
        >>> fork = cache.fork()
        >>> _ = model(input_ids=torch.tensor([[4]]), past_key_values=fork)
        >>> cache.get_seq_length(), fork.get_seq_length()
        (3, 4)

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4; transformers' documentation, "Caching".
    """

    def __init__(self, model: PreTrainedModel) -> None:
        linear = [part for part in attention_modules(model) if attention_of(part.module) is not None]
        names = {part.cache_place: part.name for part in linear if part.cache_place is not None}
        if not names:
            raise ValueError(
                f"no causal layer of {type(model).__name__} attends by a feature map; linearize_ it, or drop the cache"
            )
        super().__init__(model, {place: StateLayer(name) for place, name in names.items()})


class EncoderDecoderStates(EncoderDecoderCache):
    """The caches of an encoder-decoder: a `BoundedCache` or a `StateCache` of its own text, and one of the encoder's.

    transformers' `EncoderDecoderCache` takes tokens back and chooses rows only in a `DynamicCache`; this one does so in
    linattn's caches too, as assisted generation and prompt lookup need. Whisper's `generate` with
    return_dict_in_generate, which logprob_threshold sets, takes the keys of its cache apart, of which there are none
    here: pass it an ordinary cache.

    Example:
        >>> from transformers import BartConfig, BartForConditionalGeneration, DynamicCache
        >>> from linattn.hf import BoundedCache
        >>> sizes = dict(vocab_size=9, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8)
        >>> config = BartConfig(**sizes, decoder_ffn_dim=8, encoder_attention_heads=2, decoder_attention_heads=2)
        >>> model = BartForConditionalGeneration(config).eval()
        >>> EncoderDecoderStates(BoundedCache(model, 64), DynamicCache()).get_seq_length()
        0

    Source: transformers' documentation, "Caching".
    """

    _source: Tensor | None = None  # some columns of the encoder's output that the cross attention's keys are of

    @property
    def num_bytes(self) -> int:
        """Bytes that the layers of both caches hold."""
        return cache_bytes(self)

    def fork(self) -> Self:
        """A pair that goes on from here by itself, as `fork` of its caches; they share tensors with these."""
        fork = type(self)(forked(self.self_attention_cache), forked(self.cross_attention_cache))
        fork._source = self._source
        return fork

    def check_dynamic_cache(self, method: str) -> None:
        """Nothing: linattn's caches have these methods too."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the given rows of the batch, in that order."""
        super().reorder_cache(beam_idx)
        self._source = None if self._source is None else self._source[beam_idx.to(self._source.device)]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch; the next call says which source they are of."""
        super().batch_select_indices(indices)
        self._source = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        super().batch_repeat_interleave(repeats)
        self._source = None

    def check_source(self, name: str, source: Tensor) -> None:
        """Refuse what a decoder reads (B, L, E), made of another text than the keys that are held."""
        shown, before = source[..., :_COLUMNS].detach(), self._source
        if self.cross_attention_cache.get_seq_length() and before is not None and before.shape == shown.shape:
            difference = (shown.to(before.device) - before).abs().amax()
            if surely_all(difference > _ROUNDING * before.abs().amax()):
                refuse_source(name, source, "of another text")
        self._source = shown.clone()


def refuse_source(name: str, source: Tensor, held: str) -> NoReturn:
    """Say that the keys of another source are held."""
    raise ValueError(
        f"{name} was given an encoder's output of {tuple(source.shape[:2])} rows and tokens, and the cache holds the "
        f"keys of one {held}, to which its text has attended; give that of the earlier calls, or new caches (Whisper: "
        "for each segment of long audio)"
    )


def watch(part: PreTrainedModel) -> None:
    """Have a model's calls begin with `refuse_text_again`, from now on."""
    if all(getattr(hook, "func", None) is not refuse_text_again for hook in part._forward_pre_hooks.values()):
        names = list(inspect.signature(part.forward).parameters)
        part.register_forward_pre_hook(partial(refuse_text_again, names), with_kwargs=True)


def refuse_text_again(names: list[str], part: Any, args: Any, options: dict[str, Any]) -> None:
    """Forward pre-hook of a model, by its arguments' names, before any layer has run: no text again by a cache."""
    options = {**dict(zip(names, args, strict=False)), **options}
    caches: Any = options.get("past_key_values")
    cache: Any = getattr(caches, "self_attention_cache", caches)
    if not isinstance(cache, TextCache):
        return
    if cache.is_from_file:
        cache.is_from_file = False
    count, name = cache.get_seq_length(), type(part).__name__
    tokens = [options.get("input_ids"), options.get("inputs_embeds")] if cache is caches else []
    number = next((x.shape[1] for x in tokens if x is not None), 1)
    # A prompt that is shorter than what is held is cut to nothing, or to its last tokens.
    if (options.get("use_cache") is False and (count or cache is not caches)) or (count and number == 0):
        refuse_again(name, count)
    if count:
        cache.check_positions(name, number, options.get("position_ids"), options.get("attention_mask"))
    outputs = options.get("encoder_outputs")
    source = options.get("encoder_hidden_states") if outputs is None else outputs[0]
    first = [] if cache is caches else caches.cross_attention_cache.layers[:1]
    held = [x.keys.shape[::2] for x in first if type(x) is DynamicLayer and x.get_seq_length() and x.keys is not None]
    if source is not None and held not in ([], [source.shape[:2]]):
        refuse_source(name, source, f"of {tuple(held[0])}")
    # Only the decoder is looked at: the model around it may project the encoder's output first.
    is_read = "encoder_outputs" not in names and not part.training
    if source is not None and is_read and isinstance(caches, EncoderDecoderStates):
        caches.check_source(name, source)
