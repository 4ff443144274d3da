"""Faults of language models of linattn's own, and of what their folders bring back."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
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
