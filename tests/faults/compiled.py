"""Faults of what compiled code is given."""

from __future__ import annotations

from faults.fault import Fault

COMPILED, LAWS = "attention/backends/compiled.py", "tests/laws/test_compiled.py"
CODE = "softmax/extensions.py"
MERGING, MERGING_LAWS = "kv_cache/compiled.py", "tests/kv_cache/test_compiled_streams.py"
CAUSAL, CODED_LAWS = "kv_cache/stream.py", "tests/kv_cache/test_compiled_coded_streams.py"
CODES, CODES_LAWS = "kv_cache/coded_tokens.py", "tests/kv_cache/test_compiled_codes.py"
CODING, CODING_LAWS = "kv_cache/codes.py", "tests/kv_cache/test_compiled_coding.py"
EVERYWHERE_LAWS = "tests/kv_cache/test_compiled_bidirectional.py"

FAULTS = (
    Fault("share the first head's W", COMPILED, "x.shape[0] == 1 else x.stride(0)", "True else x.stride(0)", LAWS),
    Fault("share the first head's biases", COMPILED, "1 if bias is None else bias.shape[1]", "1", LAWS),
    Fault("read sums that lie apart as if they did not", COMPILED, "(x.contiguous() for x in before)", "before", LAWS),
    Fault("write over the state", COMPILED, "Sums(*(torch.empty_like(x) for x in (S, z, m)))", "Sums(S, z, m)", LAWS),
    Fault("cut the gradient of a state", COMPILED, ", *(before or ())", "", LAWS),
    Fault("cut the gradient of a token", COMPILED, "is_followed(*tokens, call.bias,", "is_followed(call.bias,", LAWS),
    Fault("read no window in compiled code", COMPILED, "if window is not None:", "if False:", LAWS),
    Fault("step in one thread through large states", COMPILED, "< _MANY or", "< 2 * _MANY or", LAWS),
    Fault("round rows to 32 bits", COMPILED, "rows._replace(out=out.to(call.query.dtype))", "rows", LAWS),
    Fault(
        "run with code that means something else",
        "softmax/extensions.py",
        "if installed != interface",
        "if False",
        "tests/laws/test_extensions.py",
    ),
    Fault("run where operations are counted", CODE, "if _is_watched() or", "if", LAWS),
    Fault(
        "cut the gradient of a merged key",
        MERGING,
        "is_followed(query, *tokens, *others)",
        "is_followed(query, *tokens)",
        MERGING_LAWS,
    ),
    Fault("keep sinks among merged keys", MERGING, "config.num_sinks and not has_codes", "False", MERGING_LAWS),
    Fault("keep codes as numbers", CAUSAL, "in_compiled_code and not is_coded(config)", "in_compiled_code", CODED_LAWS),
    Fault(
        "leave codes to plain torch",
        CAUSAL,
        "Tier(held, None, in_compiled_code)",
        "Tier(held, None, False)",
        CODED_LAWS,
    ),
    Fault("sum in another order than compiled code", CODING, "dtype=worth.dtype", "dtype=product.dtype", CODING_LAWS),
    Fault(
        "write rows that lie apart as if they did not",
        CODING,
        "x, bits, factors = x.contiguous(), ",
        "bits, factors = ",
        CODING_LAWS,
    ),
    Fault(
        "decode codes that lie apart as if they did not",
        CODING,
        "code, scale, bits, x = code.contiguous(),",
        "code, scale, bits, x = code,",
        CODING_LAWS,
    ),
    Fault(
        "give values the keys' codes",
        CODES,
        "(*value, *frames.value), strict",
        "(*key, *frames.value), strict",
        CODES_LAWS,
    ),
    Fault("forget the rows beside", CODES, "*(True, ", "*(False, ", CODES_LAWS),
    Fault("weigh keys without their biases", CODES, "(query, *pairs, bias))", "(query, *pairs, 0 * bias))", CODES_LAWS),
    Fault(
        "leave runs without a query to plain torch",
        MERGING,
        'backend == "torch" or (backend',
        'backend == "torch" or query.shape[3] == 0 or (backend',
        MERGING_LAWS,
    ),
    Fault(
        "give values of no width to compiled code",
        MERGING,
        "if tokens.value.shape[-1] == 0:",
        "if False:",
        MERGING_LAWS,
    ),
    Fault("take every token alone", MERGING, "query.shape[3] >= _FEWEST and", "", MERGING_LAWS),
    Fault("take few heads from many threads", MERGING, "shape[:2].numel() >= threads", "ndim >= 0", MERGING_LAWS),
    Fault(
        "let go of what threads write to",
        MERGING,
        "_over_heads(lambda first, stop: merge_stream(*_addresses(*memory)",
        "at = _addresses(*memory)\n    _over_heads(lambda first, stop: merge_stream(*at",
        "tests/kv_cache/test_interrupts.py",
    ),
    Fault("leave the last heads out", MERGING, "number * i // threads", "number // threads * i", MERGING_LAWS),
    Fault(
        "count what leaves the window twice",
        MERGING,
        "count += gone.stop - gone.start",
        "count += 2 * (gone.stop - gone.start)",
        MERGING_LAWS,
    ),
    Fault("tell rows of 16 bits apart in 32", MERGING, "rows.out.to(stream.query.dtype)", "rows.out", MERGING_LAWS),
    Fault(
        "hand on other factors than the metric's",
        MERGING,
        "*sample, *metric, *axes",
        "*sample, metric.mean, 0 * metric.factor + 1, *axes",
        EVERYWHERE_LAWS,
    ),
    Fault(
        "read kept keys that lie apart as if they did not",
        MERGING,
        "[x.contiguous() for x in (*held.merged, *held.sample)]",
        "[*held.merged, *held.sample]",
        MERGING_LAWS,
    ),
)
