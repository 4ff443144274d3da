"""New tokens of a language model, for as long as somebody takes them, and their text; letters as in hf/__init__.py."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import AutoTokenizer, Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from linattn.hf._attention_modules import attention_modules, inner_model
from linattn.hf._model_records import RECORD
from linattn.hf._probing import on_device
from linattn.hf._text_caches import is_switched
from linattn.hf.language_model import LinearLMForCausalLM
from linattn.hf.layer_attention import attention_of
from linattn.hf.loading import LoadedModel, find_source, load
from linattn.hf.saving import from_pretrained
from linattn.hf.state_cache import EncoderDecoderStates, StateCache, StreamCache

# Tokens of a prompt that are read at once: memory does not grow with it.
_CHUNK = 1024
# Temperatures beyond are 0 or infinite where logits are divided by them.
_LEAST, _MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
# What a decoder puts in place of bytes that are no character, or not yet one.
_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# Tokens of the prompt that the first new ones are decoded with: none has a form that depends on more.
_CONTEXT = 16
# Bytes of a character that lacks one, at most.
_UNFINISHED = 3


def stream_tokens(
    model: PreTrainedModel,
    prompt: Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    cache: Cache | None = None,
    notify: Callable[[int], None] | None = None,
) -> Iterator[Tensor]:
    """Draw a text's next tokens without end, in constant memory where the model's cache is.

        p ∝ exp(logits / temperature) over the fewest tokens of probability ≥ top_p together

    transformers' `generate` keeps every token's number and returns at the end; this keeps the cache and one token.

    Cost: one step of the model per token; the prompt is read in chunks of 1,024 tokens, or in one call where the
    frequencies of rotary positions follow from its length (longrope, dynamic NTK).

    Args:
        model: a causal language model: a `LinearLMForCausalLM`, a linearized one, or one with softmax, whose cache
            grows. It is to be in evaluation mode.
        prompt: (B, L) int64, L ≥ 1, without padding.
        temperature: 0, which takes the likeliest token, or a normal number of float32.
        top_p: in (0, 1]; 1 draws from all tokens.
        generator: of the draws, on the model's device; torch's global one if None.
        cache: the text before the prompt, which goes on with it; `new_cache(model)` if None. It has read all tokens but
            the last one drawn: a prompt that goes on with the text begins with that.
        notify: called after each part of the prompt with the number of its tokens that are read.

    Returns:
        An endless iterator over (B, 1) int64: the next token of each row.

    Raises:
        ValueError: at the call: a model in training mode, that is no causal language model or takes no past_key_values,
            an empty prompt, numbers out of range.

    Example:
        >>> from itertools import islice
        >>> from linattn.hf import LinearLMConfig, LinearLMForCausalLM
        >>> model = LinearLMForCausalLM(LinearLMConfig(num_hidden_layers=1)).eval()
        >>> prompt = torch.tensor([list(b"linear")])
        >>> tokens = torch.cat(list(islice(stream_tokens(model, prompt, temperature=0), 4)), 1)
        >>> bool((tokens == model.generate(prompt, max_new_tokens=4, do_sample=False)[:, 6:]).all())
        True

    Source: Holtzman et al. 2020 (arXiv 1904.09751) for top_p.
    """
    _check(model, prompt, temperature, top_p)
    text = new_cache(model) if cache is None else cache
    warpers = [TemperatureLogitsWarper(float(temperature))] if temperature not in (0, 1) else []
    warp = LogitsProcessorList([*warpers, *([TopPLogitsWarper(top_p)] if top_p < 1 else [])])

    def tokens() -> Iterator[Tensor]:
        """The draws, none before the first is asked for."""
        logits, num_read = prompt.new_empty(0), 0
        size = prompt.shape[1] if is_switched(model) else _CHUNK
        for chunk in on_device({"input_ids": prompt}, model)["input_ids"].split(size, 1):
            logits = _step(model, chunk, text)
            num_read += chunk.shape[1]
            if notify is not None:
                notify(num_read)
        while True:
            token = logits.argmax(-1, keepdim=True) if temperature == 0 else _draw(logits, warp, generator)
            yield token
            logits = _step(model, token, text)

    return tokens()


@torch.no_grad()
def _step(model: PreTrainedModel, tokens: Tensor, cache: Cache) -> Tensor:
    """The next token's logits (B, V) after these tokens, which the cache takes in."""
    logits: Tensor = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].float()


def _draw(logits: Tensor, warp: LogitsProcessorList, generator: torch.Generator | None) -> Tensor:
    """A token for each row, (B, 1)."""
    # No warper here reads the text; transformers annotates tensors by classes that none of them has.
    unread = cast(torch.LongTensor, logits.new_empty(0, dtype=torch.long))
    # A small temperature would make the largest logits infinite; 0 stays 0.
    scores = cast(torch.FloatTensor, logits - logits.amax(-1, keepdim=True))
    return torch.multinomial(warp(unread, scores).softmax(-1), 1, generator=generator)


def _check(model: PreTrainedModel, prompt: Tensor, temperature: float, top_p: float) -> None:
    """Refuse what gives no text."""
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode; call model.eval() first")
    kind = type(inner_model(model))
    # PEFT puts learned tokens before those of each call.
    is_prompted = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    # A model may swallow keywords that it does not know, and read each token without those before.
    swallows = "past_key_values" not in inspect.signature(kind.forward).parameters
    if swallows or is_prompted or model.config.is_encoder_decoder or not model.can_generate():
        raise ValueError(
            f"{kind.__name__} does not go on with a text from its tokens alone; give a causal language model that "
            "takes past_key_values, or call generate of one that reads another text first or has another cache"
        )
    if prompt.ndim != 2 or not prompt.numel():
        raise ValueError(f"prompt must be (B, L) with at least one token, got {tuple(prompt.shape)}")
    if temperature != 0 and not _LEAST <= temperature <= _MOST:
        raise ValueError(
            f"temperature must be 0 or from {_LEAST:.3g} to {_MOST:.3g}, as float32 has them, got {temperature}; "
            "0 takes the likeliest token"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty cache of the kind that `generate` makes for a model by itself.

    Returns:
        A `StreamCache` for a `LinearLMForCausalLM`; a `StateCache` for a linearized model, in which layers with a
        sliding window keep the keys in it; transformers' `DynamicCache` for any other; `EncoderDecoderStates` of these
        for an encoder-decoder.

    Raises:
        ValueError: if the model is linearized, not causal and no encoder-decoder.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from linattn.hf import linearize_
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> type(new_cache(model)).__name__
        'DynamicCache'
        >>> _ = linearize_(model, method="EluPlusOne")
        >>> type(new_cache(model)).__name__
        'StateCache'

    Source: transformers' documentation, "Caching".
    """
    model = inner_model(model)
    if isinstance(model, LinearLMForCausalLM):
        return StreamCache(len(model.model.blocks))
    linear, is_pair = [x for x in attention_modules(model) if attention_of(x.module)], model.config.is_encoder_decoder
    has_states = any(x.cache_place is not None for x in linear) if is_pair else bool(linear)
    text_cache = StateCache(model) if has_states else DynamicCache(config=model.config)
    # Of the encoder's text all is attended to, whatever windows the decoder's own has.
    return EncoderDecoderStates(text_cache, DynamicCache()) if is_pair else text_cache


class IncrementalDecoder:
    """The text of tokens that come one by one, each character once it is whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)[-_CONTEXT:]
        self._num_shown = len(self._tokens)

    def decode(self, token: int) -> str:
        """The text that is whole with this token and was not before."""
        self._tokens.append(token)
        new, stop = self._unshown(), len(self._tokens)
        if not new or new.endswith(_NO_CHARACTER):
            # Of many without a character all are shown but those with which one may begin.
            whole, stop = new, stop - _UNFINISHED
            if stop - self._num_shown < _CONTEXT or not whole.startswith(new := self._unshown(stop)):
                return ""
        self._tokens, self._num_shown = self._tokens[self._num_shown :], stop - self._num_shown
        return new

    def finish(self) -> str:
        """Text that is left at the end, with characters that were never finished."""
        new = self._unshown()
        self._num_shown = len(self._tokens)
        return new

    def _unshown(self, stop: int | None = None) -> str:
        """The text of the tokens that are not shown yet, which may depend on the ones before them."""
        return self._text(self._tokens[:stop])[len(self._text(self._tokens[: self._num_shown])) :]

    def _text(self, tokens: list[int]) -> str:
        """Decode tokens without cosmetic changes of spaces, which would reach back into text that is shown."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def load_language_model(name_or_folder: str | os.PathLike[str]) -> LoadedModel:
    """A causal language model and its tokenizer, to generate with: anything that `load` finds, or a linearized folder.

    Args:
        name_or_folder: as in `load`; or a folder that `linattn.hf.save_pretrained` wrote, whose model is linearized.

    Raises:
        ValueError: if the model is no causal language model, or a linearized folder has no tokenizer; as `load`.

    Example:
        >>> import tempfile
        >>> from linattn.hf import LinearLMConfig, LinearLMForCausalLM
        >>> folder = tempfile.mkdtemp()
        >>> LinearLMForCausalLM(LinearLMConfig(num_hidden_layers=1)).save_pretrained(folder)
        >>> load_language_model(folder).tokenizer("a")["input_ids"]
        [97]

    Source: transformers' documentation, "Auto classes".
    """
    name = str(name_or_folder)
    source = find_source(name)
    if (source / RECORD).is_file():
        # Without files of one, transformers would make a tokenizer that knows no words.
        if not (source / "tokenizer_config.json").is_file():
            raise ValueError(
                f"{source} holds a linearized model and no tokenizer; save it with "
                "linattn.hf.save_pretrained(model, folder, tokenizer=tokenizer)"
            )
        model = from_pretrained(source)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
        except (OSError, ImportError, MemoryError):
            raise
        except Exception as error:
            words = " ".join(str(error).split())
            raise ValueError(f"the tokenizer in {source} cannot be read ({words}); save it there again") from error
        loaded = LoadedModel(name, str(source), model, tokenizer)
    else:
        loaded = load(name, with_head=True)
    if not loaded.model.can_generate():
        raise ValueError(
            f"{name} holds a {type(loaded.model).__name__}, which does not predict a next token; give a causal "
            "language model, saved with its head"
        )
    return loaded


def end_tokens(model: PreTrainedModel) -> set[int]:
    """The tokens by which a language model ends a text; none for models that go on without end."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
