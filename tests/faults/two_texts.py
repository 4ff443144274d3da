"""Faults of models that read another text than their own, or hold the part that generates."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
    Fault(
        "answer a text from the keys of another source",
        "hf/state_cache.py",
        "surely_all(difference > _ROUNDING * before.abs().amax())",
        "False",
        "tests/hf/test_two_texts.py",
    ),
    Fault(
        "hold rows in another order against the source in the old one",
        "hf/state_cache.py",
        "self._source = None if self._source is None else self._source[beam_idx.to(self._source.device)]",
        "pass",
        "tests/hf/test_two_texts.py",
    ),
    Fault(
        "let a fork forget its source",
        "hf/state_cache.py",
        "        fork._source = self._source\n",
        "",
        "tests/hf/test_two_texts.py",
    ),
    Fault(
        "hold chosen rows against those before",
        "hf/state_cache.py",
        "        super().batch_select_indices(indices)\n        self._source = None\n",
        "        super().batch_select_indices(indices)\n",
        "tests/hf/test_two_texts.py",
    ),
    Fault(
        "offer states to layers that are given their cache by its name alone",
        "hf/_dispatch.py",
        "    arguments = {**dict(zip(names, args, strict=False)), **options}\n    cache = ",
        "    arguments = {**options}\n    cache = ",
        "tests/hf/test_two_texts.py",
    ),
    Fault(
        "keep states from a model within another",
        "hf/_dispatch.py",
        "(x for x in parts_of(model) if hasattr(type(x), _PREPARE))",
        "(x for x in [model] if hasattr(type(x), _PREPARE))",
        "tests/hf/test_two_texts.py",
    ),
    Fault(
        "leave a model within another its way to make caches",
        "hf/_dispatch.py",
        "    for each in parts_of(model):\n        vars(each).pop(_PREPARE, None)\n",
        "    vars(model).pop(_PREPARE, None)\n",
        "tests/hf/test_two_texts.py",
    ),
    Fault(
        "give a decoder that reads a source states of its own text alone",
        "hf/_dispatch.py",
        ' or {"encoder_hidden_states", "encoder_outputs"} & model_kwargs.keys()',
        "",
        "tests/hf/test_two_texts.py",
    ),
    Fault(
        "let Whisper take states apart",
        "hf/_dispatch.py",
        "not (is_chosen or is_taken_apart)",
        "not is_chosen",
        "tests/hf/test_two_texts.py",
    ),
    Fault(
        "say of a model that takes no cache that its keys are made of others",
        "hf/_choosing.py",
        'if parts and "past_key_values" not in inspect.signature(model.forward).parameters:',
        "if False:",
        "tests/hf/test_two_texts.py",
    ),
)
