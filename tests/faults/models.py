"""Faults of linearized models."""

from __future__ import annotations

from faults.fault import Fault

FAULTS = (
    Fault(
        "give every layer the first columns of the mask",
        "hf/_mask.py",
        "mask.allowed[..., -num_keys:]",
        "mask.allowed[..., :num_keys]",
        "tests/hf/test_state_cache.py",
    ),
    Fault(
        "let a module attend without the state that took its keys",
        "hf/state_cache.py",
        "self._is_expected = False\n        if self._is_pending:",
        "self._is_expected = False\n        if False:",
        "tests/hf/test_state_cache.py",
    ),
    Fault(
        "leave the kernels' tensors in the softmax model's file",
        "hf/_softmax_folders.py",
        "if not name.startswith(kernels)}",
        "if True}",
        "tests/hf/test_saving.py",
    ),
    Fault(
        "forget what a plain folder does not bring back",
        "hf/saving.py",
        "= not_brought_back(model)",
        "= {}",
        "tests/hf/test_saving.py",
    ),
    Fault(
        "leave weights where a file maps them",
        "hf/_softmax_folders.py",
        "        if x.data_ptr() % _ALIGNMENT:",
        "        if False:",
        "tests/hf/test_saving.py",
    ),
    Fault(
        "copy saved tensors into the dtypes of the constructor",
        "hf/saving.py",
        ", assign=True)",
        ")",
        "tests/hf/test_saving.py",
    ),
    Fault(
        "read another window than was saved",
        "hf/_kernel_records.py",
        'window=checked["window"]',
        "window=None",
        "tests/hf/test_saving.py",
    ),
    Fault(
        "take a weight that is missing as transformers draws it anew",
        "hf/_softmax_folders.py",
        """sorted(info["missing_keys"])""",
        "()",
        "tests/hf/test_saving_refusals.py",
    ),
    Fault(
        "take tensors of another shape than the record's",
        "hf/_model_records.py",
        "if got[name] != wanted[name]",
        "if False",
        "tests/hf/test_saving_refusals.py",
    ),
    Fault(
        "write a folder in its place",
        "planning/files.py",
        "        yield temporary\n        for path",
        "        temporary.rename(folder)\n        yield folder\n        folder.rename(temporary)\n        for path",
        "tests/planning/test_files.py tests/hf/test_saving_refusals.py",
    ),
    Fault(
        "load sentence encoders by transformers alone",
        "hf/sentence_transformers.py",
        """from_pretrained(Path(model_name_or_path) / (options.get("subfolder") or ""))""",
        "super()._load_model(model_name_or_path, transformer_task, config, backend, is_peft_model, **options)",
        "tests/hf/test_sentence_transformers.py",
    ),
    Fault(
        "rebuild every map at the default scale",
        "planning/map_records.py",
        "if value is not None and not isinstance(value, Tensor)",
        "if value is not None and not isinstance(value, Tensor) and name != 'scale'",
        "tests/planning/test_map_records.py",
    ),
    Fault(
        "ask only the call, not the configuration, whether weights are wanted",
        "hf/_calls.py",
        "if part.config.output_attentions if asked is None else asked:",
        "if asked:",
        "tests/hf/test_returned_weights.py",
    ),
    Fault(
        "forget that assisted generation crops its cache",
        "hf/_generation.py",
        "if is_given or is_named or is_cropped:",
        "if is_given or is_named:",
        "tests/hf/test_generation_options.py",
    ),
    Fault(
        "take the empty slots of a static cache for keys",
        "hf/_mask.py",
        "if int(kv_offset + kv_length) != int(q_offset + q_length) and",
        "if False and",
        "tests/hf/test_state_cache.py",
    ),
    Fault(
        "go on with a cache that an error left between two layers",
        "hf/state_cache.py",
        "if any(count != counts[0] for count in counts):",
        "if False:",
        "tests/hf/test_state_cache.py",
    ),
    Fault(
        "let a call begin without a look at its cache",
        "hf/linearization.py",
        "        hooks += check_caches(model)",
        "        pass",
        "tests/hf/test_state_cache.py",
    ),
)
