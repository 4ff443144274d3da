"""Faults of models as they come: sliding windows, GGUF files, text as it is generated."""

from __future__ import annotations

from faults.fault import Fault

WINDOWS = "tests/hf/test_sliding_windows.py"
PROBING = "tests/hf/test_probing.py"
WRAPPED = "tests/hf/test_wrapped_models.py"
TEXT = "tests/hf/test_text_streaming.py"
CAPS = "tests/hf/test_soft_caps.py"
SINKS, SINK_LAWS = "tests/hf/test_attention_sinks.py", "tests/laws/test_sinks.py"

FAULTS = (
    Fault("forget a stream's sinks", "hf/_cache_layers.py", " made.made(sinks=call.sinks)", " made.made()", SINKS),
    Fault(
        "give sinks to any map",
        "hf/layer_attention.py",
        "(SINKS,) if shares_normalizer(self.feature_map) else ()",
        "(SINKS,)",
        SINKS,
    ),
    Fault("forget a call's cap", "hf/_calls.py", "if cap is None else", "if True else", CAPS),
    Fault(
        "forget a cap as calls are taken back",
        "hf/_cache_layers.py",
        "**self.scoring,",
        "scale=self.scoring['scale'],",
        CAPS,
    ),
    Fault("give caps to any layer", "hf/_probing.py", "if CAPS not in takes and", "if False and", CAPS),
    Fault("give caps to any map", "hf/linearization.py", "sinks if merged is None else [CAPS]", "[*sinks, CAPS]", CAPS),
    Fault("give sinks to any layer", "hf/_probing.py", "if SINKS not in takes and", "if False and", SINKS),
    Fault("take sinks of any shape", "hf/_calls.py", " and value.ndim != 1", " and False", SINKS),
    Fault("give a key of value 0 the weight of no key", "softmax/partial.py", "log - least", "log + least", SINK_LAWS),
    Fault(
        "subtract the sinks that are none",
        "softmax/partial.py",
        ".clamp(min=torch.finfo(log.dtype).min)",
        "",
        SINK_LAWS,
    ),
    Fault("leave a factor out of normalisers", "attention/functional.py", "part.times(after.apart)", "part", SINK_LAWS),
    Fault(
        "let the masks of sliding windows grow with the text",
        "hf/_calls.py",
        '"kv_length": num_keys, **offsets}',
        '"kv_length": kv_offset + length, "q_offset": q_offset, "kv_offset": 0}',
        WINDOWS,
    ),
    Fault(
        "judge a structure over the new keys alone",
        "hf/_calls.py",
        "self._read_all(num_columns)",
        "self._read_all(self.sizes[2])",
        PROBING,
    ),
    Fault(
        "replace layers whose keys others attend to",
        "hf/_probing.py",
        "if is_cached and self._sharing(module):",
        "if False:",
        PROBING,
    ),
    Fault(
        "advance a state as often as a module attends",
        "hf/_probing.py",
        "if is_cached and len(calls) > self.num_passes:",
        "if False:",
        PROBING,
    ),
    Fault(
        "keep layers by SDPA, whatever they had",
        "hf/_calls.py",
        '"behind", self.module)), self.former)',
        '"behind", self.module)), "sdpa")',
        PROBING,
    ),
    Fault(
        "give models that count on it no contiguous output",
        "hf/_calls.py",
        "out.transpose(1, 2).contiguous()",
        "out.transpose(1, 2)",
        PROBING,
    ),
    Fault(
        "leave what a probe set in a module",
        "hf/_probing.py",
        "                table.clear()\n",
        "                pass\n",
        PROBING,
    ),
    Fault(
        "make a probe's inputs where offloaded weights hold no numbers",
        "hf/_probing.py",
        '"cpu" if model.device.type == "meta" else model.device',
        "model.device",
        WRAPPED,
    ),
    Fault(
        "take a window for hiding nothing",
        "hf/_calls.py",
        "(not isinstance(window, int) or window < num_keys)",
        "False",
        WINDOWS,
    ),
    Fault(
        "number recorded calls without those of windows",
        "hf/interception.py",
        "            self.num_windowed += 1\n",
        "            self.num_windowed += 1\n            self.num_calls -= 1\n",
        WINDOWS,
    ),
    Fault(
        "intercept a model without one call to answer",
        "hf/interception.py",
        "if self.num_windowed == self.num_calls:",
        "if False:",
        WINDOWS,
    ),
    Fault(
        "average every layer in the baseline of a conversion",
        "convert/stages.py",
        "return call.uniform() if call.module_name in layers else call.softmax()",
        "return call.uniform()",
        "tests/convert/test_conversion.py -k baseline",
    ),
    Fault(
        "answer for layers with a window that the text fits in",
        "lab/audit/whole_model.py",
        "return answer(call) if call.module_name in self._names else call.softmax()",
        "return answer(call) if call.module_name in self._names else call.uniform()",
        "lab/tests/audit/test_windowed.py",
    ),
    Fault(
        "leave the mark of quantised numbers in a model",
        "hf/loading.py",
        '    vars(model.config).pop("quantization_config", None)\n',
        "",
        "tests/hf/test_gguf.py",
    ),
    Fault(
        "show characters before they are whole",
        "hf/streaming.py",
        "if not new or new.endswith(_NO_CHARACTER):",
        "if not new:",
        TEXT,
    ),
    Fault(
        "decode new tokens without the ones before",
        "hf/streaming.py",
        "= self._tokens[self._num_shown :], stop - self._num_shown",
        "= [], 0",
        TEXT,
    ),
    Fault(
        "hold every token without a character",
        "hf/streaming.py",
        "if stop - self._num_shown < _CONTEXT or",
        "if True or",
        TEXT,
    ),
    Fault(
        "show a character before it is whole",
        "hf/streaming.py",
        "whole, stop = new, stop - _UNFINISHED",
        "whole, stop = new, stop",
        TEXT,
    ),
    Fault(
        "leave padded tokens out of outputs without tokens",
        "hf/interception.py",
        "if padding is not None and output.shape[: padding.ndim] == padding.shape:",
        "if padding is not None:",
        "tests/hf/test_capture.py",
    ),
    Fault(
        "stream a linearized model with keys for a cache",
        "hf/streaming.py",
        "        return StateCache(model) if linear else DynamicCache(config=model.config)\n",
        "        return DynamicCache(config=model.config)\n",
        "tests/cli/test_generate.py",
    ),
)
