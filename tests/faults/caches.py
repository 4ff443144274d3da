"""Faults of what a linearized model is held in, or reads: wrappers, caches, masks over tokens of a state."""

from __future__ import annotations

from faults.fault import Fault

CACHES = "tests/hf/test_any_cache.py"
COLUMNS = "tests/hf/test_mask_columns.py"
GRAPHS = "tests/hf/test_recorded_graphs.py"
BOUNDED = "tests/hf/test_bounded_cache.py"
MERGED = "tests/hf/test_merged_keys.py"
MODELS = "tests/hf/test_bounded_models.py"
REFUSALS = "tests/hf/test_bounded_cache_refusals.py"
WRAPPED = "tests/hf/test_wrapped_models.py"

FAULTS = (
    Fault(
        "merge the keys of a decoder in the model",
        "hf/_choosing.py",
        "    if part.is_causal and config is not None:\n",
        "    if False:\n",
        MERGED,
    ),
    Fault(
        "look at a decoder before it is refused",
        "hf/_choosing.py",
        "len(causal) == len(named) or",
        "False or",
        MERGED,
    ),
    Fault(
        "read a decoder of merged keys",
        "hf/saving.py",
        "        refuse_old_decoder(model, part, attention.merged, path)\n",
        "",
        MERGED,
    ),
    Fault(
        "merge the keys of a decoder beside its encoder's",
        "hf/_choosing.py",
        '    if part.is_causal and merged is not None:\n        return "it is causal',
        '    if False:\n        return "it is causal',
        MERGED,
    ),
    Fault(
        "read a mask's last columns",
        "hf/_calls.py",
        "padding[:, :num_keys]",
        "padding[:, -num_keys:]",
        COLUMNS,
    ),
    Fault(
        "look at a mask that others follow",
        "hf/_calls.py",
        "return not is_tracing(key_mask) and bool(key_mask.all())",
        "return bool(key_mask.all())",
        GRAPHS,
    ),
    Fault(
        "take a mask for that of before",
        "hf/_cache_layers.py",
        "torch.equal(*shown) if",
        "True if",
        CACHES,
    ),
    Fault(
        "let a mask be forgotten",
        "hf/_cache_layers.py",
        "else all(bool(x.all()) for x in shown)",
        "else True",
        CACHES,
    ),
    Fault(
        "leave rows the masks of others",
        "hf/_cache_layers.py",
        "self._live[beam_idx.to(self._live.device)]",
        "self._live",
        CACHES,
    ),
    Fault(
        "take back a call with its own tokens in the state",
        "hf/_cache_layers.py",
        "self.state = self._calls[-1].state()",
        "pass",
        CACHES,
    ),
    Fault(
        "attend as another implementation says",
        "hf/_dispatch.py",
        "    if implementation not in (NAME, INTERCEPTED):\n",
        "    if False:\n",
        CACHES,
    ),
    Fault(
        "leave a cache empty in training",
        "hf/_dispatch.py",
        "            if part.training and any",
        "            if False and any",
        CACHES,
    ),
    Fault(
        "linearize a wrapper and not the model within",
        "hf/_attention_modules.py",
        "return inner_model(model._orig_mod)",
        "return model",
        WRAPPED,
    ),
    Fault(
        "attend by tensors that are elsewhere",
        "hf/_dispatch.py",
        "        hook.pre_forward(part)\n",
        "        pass\n",
        WRAPPED,
    ),
    Fault(
        "save weights without a place",
        "hf/_folders.py",
        "    if differing := sorted(names ^ softmax_state(model).keys()):\n",
        "    if False:\n",
        WRAPPED,
    ),
    Fault(
        "let a decoder's queries choose among another text's keys together",
        "hf/linearization.py",
        "    if found.reads_another_text and (attention.window is not None or attention.merged is not None):\n",
        "    if False:\n",
        "tests/hf/test_linearization_refusals.py",
    ),
    Fault(
        "let a decoder's queries move the map's centres",
        "hf/linearization.py",
        "    is_ordered = found.is_causal or found.reads_another_text\n",
        "    is_ordered = found.is_causal\n",
        "tests/hf/test_linearization_refusals.py",
    ),
    Fault(
        "let another function read the keys that a bounded layer handed on",
        "hf/_bounded_layers.py",
        "        if function in _SHOWN:",
        "        if True:",
        REFUSALS,
    ),
    Fault(
        "take the same keys in twice",
        "hf/_bounded_layers.py",
        "        if self.handed is not call.key:",
        "        if False:",
        REFUSALS,
    ),
    Fault(
        "attend to new keys alone where a bounded cache was not filled",
        "hf/_dispatch.py",
        "        attention_mask.cache.refuse_plain_keys(module)",
        "        pass",
        REFUSALS,
    ),
    Fault(
        "let a static cache count on before its mask is built",
        "hf/_calls.py",
        "        q_offset = q_offset.clone()",
        "        pass",
        BOUNDED,
    ),
    Fault(
        "let a bounded cache take any mask",
        "hf/bounded_cache.py",
        "        self.check_mask(attention_mask)",
        "        pass",
        BOUNDED,
    ),
    Fault(
        "go on with a bounded cache between two tokens",
        "hf/bounded_cache.py",
        "        self.check_level()",
        "        pass",
        REFUSALS,
    ),
    Fault(
        "attend by SDPA whatever a model attended by before",
        "hf/_attention_modules.py",
        "    if isinstance(name, Implementation):\n        return name.former\n",
        "",
        BOUNDED,
    ),
    Fault(
        "bound layers by the budget of another dtype",
        "hf/_choosing.py",
        "call.key.element_size()",
        "4",
        BOUNDED,
    ),
    Fault(
        "share the states of recurrent layers among forks",
        "hf/_cache_layers.py",
        "(deepcopy if isinstance(x, LinearAttentionCacheLayerMixin) else copy)(x)",
        "copy(x)",
        MODELS,
    ),
    Fault(
        "let a window forget what leaves it short",
        "hf/_cache_layers.py",
        "if held - count < min(",
        "if held < min(",
        "tests/hf/test_sliding_windows.py",
    ),
    Fault(
        "take back calls that were recorded before others that were not",
        "hf/_cache_layers.py",
        "        self._calls = self._calls if self.record_past else ()\n",
        "",
        MODELS,
    ),
    Fault(
        "read no mask as that of the last queries",
        "hf/_calls.py",
        "if self.part is not None else ()\n            options",
        "if False else ()\n            options",
        MODELS,
    ),
    Fault(
        "keep a caller's own mask",
        "hf/_cache_layers.py",
        "attention_mask.clone()",
        "attention_mask",
        MODELS,
    ),
    Fault(
        "leave exponents where a row has none",
        "attention/backends/blocked/__init__.py",
        "not phi.amax().item() <= RISE",
        "phi.amax().item() > RISE",
        "tests/laws/test_independence.py",
    ),
)
