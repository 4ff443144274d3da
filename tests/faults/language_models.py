"""Faults of language models of linattn's own, and of what their folders bring back."""

from __future__ import annotations

from faults.fault import Fault

AGAIN = "tests/hf/test_text_given_again.py"
REFUSALS = "tests/hf/test_bounded_cache_refusals.py"
THREADS = "tests/hf/test_threads.py"
WRAPPED = "tests/hf/test_wrapped_models.py"
ROTATIONS = "tests/hf/test_switched_rotations.py"
TOWERS = "tests/hf/test_towers.py"
SLIDING = "tests/hf/test_sliding_windows.py"

FAULTS = (
    Fault(
        "take a text in again that a cache holds whole",
        "hf/_cache_layers.py",
        "surely_all(positions[..., 0] <= self._last)",
        "self.num_tokens < count and surely_all(positions[..., 0] == 0)",
        AGAIN,
    ),
    Fault(
        "take padding that fills whole chunks for a text",
        "hf/_calls.py",
        "    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask[:, :num_held].any()):\n        raise",
        "    if True:\n        raise",
        AGAIN,
    ),
    Fault(
        "let a bounded cache's layers alone see that a text comes again",
        "hf/bounded_cache.py",
        "for part in parts_of(model):",
        "for part in []:",
        AGAIN,
    ),
    Fault(
        "take one token for a step wherever it stands",
        "hf/state_cache.py",
        "places.ndim == 2 and places.shape[1]:",
        "places.ndim == 2 and places.shape[1] > 1:",
        AGAIN,
    ),
    Fault(
        "count padding among the positions that a cache is past",
        "hf/state_cache.py",
        "(count if mask is None or not is_told else mask[:, :count].sum(-1))",
        "count",
        "tests/hf/test_left_padding.py tests/hf/test_text_given_again.py tests/hf/test_generation.py",
    ),
    Fault("take no token at all for a call", "hf/state_cache.py", " or (count and number == 0):", ":", AGAIN),
    Fault(
        "go on with recurrent layers that ran alone",
        "hf/_text_caches.py",
        "or self._started in counts)",
        ")",
        AGAIN,
    ),
    Fault(
        "go on with some of the recurrent layers ahead",
        "hf/_text_caches.py",
        "(self._ran != self._recurrent or self._started in counts)",
        "self._started in counts",
        AGAIN,
    ),
    Fault(
        "forget of which call a fork's recurrent layers are",
        "hf/_text_caches.py",
        "        super().reset()\n        self._ran = frozenset()\n",
        "        super().reset()\n",
        AGAIN,
    ),
    Fault(
        "let Phi 3 put a growing cache in the place of a bounded one",
        "hf/_text_caches.py",
        "return self._original is None",
        "return True",
        ROTATIONS,
    ),
    Fault(
        "read keys of short texts beside those of long ones",
        "hf/_text_caches.py",
        "if limit <= (num_held",
        "if False and limit <= (num_held",
        ROTATIONS,
    ),
    Fault(
        "refuse long texts of a model whose frequencies stay",
        "hf/_text_caches.py",
        "not self._is_switched or limit is None",
        "limit is None",
        ROTATIONS,
    ),
    Fault(
        "read a prompt in chunks of other frequencies",
        "hf/streaming.py",
        "prompt.shape[1] if is_switched(model) else _CHUNK",
        "_CHUNK",
        ROTATIONS,
    ),
    Fault(
        "rename the attention of a bounded model's towers",
        "hf/_attention_modules.py",
        "for config in (each for each in _configs(model) if id(each) not in idle):",
        "for config in _configs(model):",
        TOWERS,
    ),
    Fault(
        "rename the attention of a linearized model's towers",
        "hf/_dispatch.py",
        "    restore(tuple(each for each in former if id(each[0]) in idle))\n",
        "",
        TOWERS,
    ),
    Fault(
        "take a decoder's configuration for a tower's",
        "hf/_attention_modules.py",
        " - {id(part.config) for part in holds if holds[part]}",
        "",
        "tests/hf/test_bounded_cache.py",
    ),
    Fault(
        "record a sliding window without end",
        "hf/_text_caches.py",
        "first = -(layer.sliding_window - 1 + RECORDED)",
        "first = 0",
        SLIDING,
    ),
    Fault(
        "make a mask of all pairs for a window that holds the text",
        "hf/_calls.py",
        "if self.local_size is not None and num_keys < self.local_size:",
        "if torch.compiler.is_exporting() and self.local_size is not None and num_keys < self.local_size:",
        SLIDING,
    ),
    Fault(
        "choose no rows where every layer has a window of its own",
        "hf/_text_caches.py",
        "counts or held or [0]",
        "counts or [0]",
        SLIDING,
    ),
    Fault(
        "let a prefix take a bounded cache's place",
        "hf/bounded_cache.py",
        "        raise ValueError(_PREFIXED)\n\n    def refuse_plain",
        "        return -1\n\n    def refuse_plain",
        "tests/hf/test_bounded_models.py",
    ),
    Fault(
        "stream tokens before each of which an adapter puts others",
        "hf/streaming.py",
        "swallows or is_prompted or",
        "swallows or",
        "tests/hf/test_streaming.py",
    ),
    Fault(
        "leave recurrent layers ahead of those that forget tokens",
        "hf/_text_caches.py",
        "if tokens_to_remove and isinstance(layer, LinearAttentionCacheLayerMixin) and not layer.is_croppable:",
        "if False:",
        AGAIN,
    ),
    Fault(
        "take a bounded cache's function out of a model that is refused",
        "hf/_attention_modules.py",
        "        restore(former)\n        raise\n\n\ndef former_of",
        "        raise\n\n\ndef former_of",
        REFUSALS,
    ),
    Fault(
        "say that a class looks nothing up before its source is read",
        "hf/_attention_modules.py",
        "lookup = None  # stored",
        "_LOOKUPS[kind] = lookup = None  # stored",
        THREADS,
    ),
    Fault(
        "lose what hides a model's own keys",
        "hf/_dispatch.py",
        "(count := attention_mask.num_surplus(key.shape[-2])) > 0",
        "(count := 0) > 0",
        "tests/hf/test_probed_models.py",
    ),
    Fault("save a wrapper as a model", "hf/saving.py", "    model = unwrapped(model)\n", "", WRAPPED),
    Fault(
        "go on with a language model's text in other rows",
        "hf/state_cache.py",
        "        self.check_rows(num_rows)\n",
        "",
        "tests/hf/test_cache_refusals.py",
    ),
    Fault(
        "take labels of other tokens than a language model reads",
        "hf/language_model.py",
        "if labels is not None and (tuple(labels.shape) != shape or logits_to_keep):",
        "if False:",
        "tests/hf/test_cache_refusals.py",
    ),
    Fault(
        "give the last states without the norm",
        "hf/language_model.py",
        "(*states, self.model.norm(x))",
        "(*states, x)",
        "tests/hf/test_language_model.py",
    ),
    Fault(
        "take a text in again for each new token",
        "hf/language_model.py",
        "if cache is not None and generation_config.use_cache is False:",
        "if False:",
        "tests/hf/test_language_model.py",
    ),
    Fault(
        "name bytes as characters are",
        "hf/byte_tokenizer.py",
        '_NAMES = [f"<0x{number:02X}>"',
        "_NAMES = [chr(number)",
        "tests/hf/test_byte_tokenizer.py",
    ),
    Fault(
        "read bytes as Latin-1",
        "hf/byte_tokenizer.py",
        '.decode("utf-8", errors="replace")',
        '.decode("latin-1")',
        "tests/hf/test_byte_tokenizer.py",
    ),
    Fault(
        "read bytes for a model of other tokens",
        "hf/loading.py",
        "if vocab_size != NUM_BYTES and all(",
        "if False and all(",
        "tests/hf/test_byte_tokenizer.py",
    ),
)
