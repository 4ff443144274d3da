"""Faults of language models of linattn's own, and of what their folders bring back."""

from __future__ import annotations

from faults.fault import Fault

AGAIN = "tests/hf/test_text_given_again.py"
REFUSALS = "tests/hf/test_bounded_cache_refusals.py"
THREADS = "tests/hf/test_threads.py"
WRAPPED = "tests/hf/test_wrapped_models.py"

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
        "ask no model for positions that its layers are not told",
        "hf/bounded_cache.py",
        "or not all(layer.is_numbered for layer in bounded)",
        "",
        AGAIN,
    ),
    Fault(
        "leave recurrent layers ahead of those that forget tokens",
        "hf/_cache_layers.py",
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
