"""Faults of language models that are converted from their softmax twins, and of what their folders bring back."""

from __future__ import annotations

from faults.fault import Fault

TWIN = "tests/hf/test_linear_twin.py"
CONVERT = "tests/cli/test_convert_language_model.py"

FAULTS = (
    Fault(
        "attend by softmax in the stream of a linearized LinearLM",
        "hf/_interface_attention.py",
        "if attention is None or heads.gates is not None:",
        "if True:",
        TWIN,
    ),
    Fault(
        "let the calls of a LinearLM pass by whoever intercepts them",
        "hf/_interface_attention.py",
        "if name not in (LINEARIZED, INTERCEPTED):",
        "if name != LINEARIZED:",
        TWIN,
    ),
    Fault(
        "let placeholders pass for statistics",
        "hf/language_model_config.py",
        "if not _LOADING.get():",
        "if False:",
        TWIN,
    ),
    Fault(
        "write no word of what maps were fitted with",
        "hf/language_model.py",
        "self.config.fitted = fitted_outlines(self)",
        "self.config.fitted = None",
        TWIN,
    ),
    Fault(
        "give the last states without the norm",
        "hf/language_model.py",
        "(*states, self.model.norm(x))",
        "(*states, x)",
        TWIN,
    ),
    Fault(
        "draw from the caller's generator while a model is saved",
        "hf/linear_twin.py",
        "fork_rng(devices=[])",
        "fork_rng(devices=[], enabled=False)",
        TWIN,
    ),
    Fault(
        "share the draws of several heads",
        "hf/linear_twin.py",
        "    return bool(head_counts)",
        "    return False",
        TWIN,
    ),
    Fault(
        "forget the options of rotary positions",
        "hf/language_model_config.py",
        "[*options, relaxed]",
        "[relaxed]",
        TWIN,
    ),
    Fault(
        "leave out options of a map's written form",
        "methods/map_records.py",
        'MapSpec(record["name"], tuple(options.items()), tuple(wrappers))',
        'MapSpec(record["name"], (), tuple(wrappers))',
        "tests/methods/test_map_records.py",
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
    Fault(
        "begin the conversion of a LinearLM that cannot be saved",
        "convert/conversion.py",
        "        check_twin(model, methods)",
        "        pass",
        f"{CONVERT}::test_refusals_leave_nothing",
    ),
    Fault(
        "say of a plain folder that it is a linearized model's",
        "convert/card.py",
        "{_LOADING[is_plain]}",
        "{_LOADING[False]}",
        CONVERT,
    ),
)
