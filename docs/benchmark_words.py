"""What the rows of benchmarks/results.jsonl are called on the site: a measure, its setting, and which way is better.

A claim without words here is split at its first comma, and the sign of its bound says which way is better.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

LOWER, HIGHER = "lower", "higher"


class Words(NamedTuple):
    """A row in words."""

    measure: str  # the quantity, a ratio as "a ÷ b"
    setting: str  # method, direction, length; empty where the measure says all
    better: str  # "lower" or "higher"


HEADINGS = {
    "crossover_with_sdpa": "Crossover with exact attention",
    "decoding_is_flat": "Time of a decode step",
    "memory_stays_small": "Peak memory of a call",
    "time_grows_linearly": "Growth of time with the context length",
    "near_the_matmul_ceiling": "Time beside matrix products alone",
    "backward_is_twice_the_forward": "Time of the backward pass",
    "bfloat16_costs_less": "Time in bfloat16",
    "faster_than_materialised_features": "Speed beside stored features",
    "faster_than_performer_pytorch": "Speed beside performer-pytorch",
    "faster_than_linear_attention_transformer": "Speed beside linear-attention-transformer",
    "windows_cost_little": "Cost of a window beside a map",
    "large_tokens_cost_little": "Cost of large tokens and of gates",
    "expansions_run_near_the_ceiling": "Speed and memory of expansions",
    "expansions_survive_a_real_encoder": "Error of expansions in an encoder",
    "error_over_length": "Error by context length",
    "conversion_repairs_a_real_encoder": "Converted encoder",
    "relative_bias_stays_near_linear": "Relative position biases",
    "generation_costs_the_same_at_any_length": "Generation by a linearized Llama",
    "generation_without_end": "Generation of 100,000 bytes",
    "language_models_at_equal_time": "Training throughput",
    "ranks_send_states_of_constant_size": "Bytes sent between ranks",
    "sequences_split_over_ranks_scale": "Speed on two ranks",
    "merged_keys_survive_a_real_encoder": "Error of merged keys in an encoder",
    "merged_keys_speed_up_a_long_encoder": "Speed of an encoder with merged keys",
    "merged_keys_beat_a_window": "Error of merged keys in a language model",
    "merged_keys_beat_sdpa": "Speed and memory of merged keys",
    "generation_in_a_bounded_memory": "Decode with a bounded KV cache",
    "compiled_steps_save_half": "Compiled decode steps",
    "importing_costs_little": "Import time",
}
"""Headings of the benchmarks' page, in its order, by file of benchmarks/."""

_ENCODER = "MiniLM on six texts of 512 tokens, nothing trained; medians over the texts."

SETTINGS = {
    "faster_than_linear_attention_transformer": "64 features here and there, 8 heads, D = 64, float32. The other "
    "library's `Exponential` normalises otherwise, so that time alone is compared.",
    "expansions_survive_a_real_encoder": _ENCODER,
    "error_over_length": "MiniLM's queries, keys and values of 16 texts of 512 tokens, joined per head; error of 256 "
    "queries' outputs, mean over heads.",
    "conversion_repairs_a_real_encoder": "MiniLM, 15 minutes of `linattn convert` for each map, on held-out texts of "
    "128 to 512 tokens.",
    "relative_bias_stays_near_linear": "2 heads, D = 16, 8 features, float32.",
    "generation_costs_the_same_at_any_length": "A Llama with random weights: 4 layers of width 256, 8 heads on 2 "
    "key/value heads, 256 features, float32.",
    "generation_without_end": "A `LinearLM` of about a million parameters with random weights: four blocks of a "
    "learned map with a forget gate, float32, one text.",
    "language_models_at_equal_time": "Four blocks of width 128, about a million parameters, on Python's own sources.",
    "ranks_send_states_of_constant_size": "4 heads, D = 64, 64 features, float32, causal, forward and backward; bytes "
    "of the rank that sends most.",
    "sequences_split_over_ranks_scale": "2 heads, D = 64, 256 features, float32, 65,536 tokens per rank, forward and "
    "backward, one thread per rank.",
    "merged_keys_survive_a_real_encoder": _ENCODER,
    "merged_keys_speed_up_a_long_encoder": "All layers of MiniLM replaced, nothing trained, beside the same model with "
    "torch's SDPA; one text, float32. Its table of 512 learned positions is interpolated to longer texts.",
    "merged_keys_beat_a_window": "The 3 global layers of Gemma 3 270M: 4 query heads on one key/value head, D = 256, "
    "3,840 tokens, the last 256 queries' outputs. The bytes of N keys: of N exact keys and values in float32.",
    "generation_in_a_bounded_memory": "Gemma 3 270M with a budget of 128 tokens, or of 512 where a row says 512 keys, "
    "float32 unless a row says otherwise, beside the full cache. Bounded layers: the 3 global ones of 18, filled with "
    "random queries, keys and values.",
    "importing_costs_little": "Each import in a process of its own.",
}
"""What is measured where it is other than the usual heads, width and features of the page, by file of benchmarks/."""

_RULES = (
    (r"crossover with exact attention, (.*)", "length from which linear attention is faster", r"\1", LOWER),
    (
        r"a decoding step over one of exact attention with (.*) cached tokens",
        "time of a step ÷ that of exact attention",
        r"\1 cached tokens",
        LOWER,
    ),
    (
        r"a decoding step at token 100,000 over one at token 1",
        "time of a step at token 100,000 ÷ at token 1",
        "",
        LOWER,
    ),
    (r"peak extra memory of 128 merged keys at (.*? tokens), (.*)", "peak memory", r"128 merged keys, \2, \1", LOWER),
    (r"peak extra memory at (.*? tokens), (.*)", "peak memory", r"\2, \1", LOWER),
    (
        r"exponent of time in the length, (.*)",
        "exponent of time in the length (linear: 1, quadratic: 2)",
        r"\1 tokens",
        LOWER,
    ),
    (r"time over that of its own matrix products, (.*)", "time ÷ that of its matrix products", r"\1", LOWER),
    (r"share of the sgemm rate, (.*)", "FLOP rate ÷ that of one large matrix product", r"\1", HIGHER),
    (r"forward and backward over forward, (.*)", "time of both passes ÷ forward pass", r"\1", LOWER),
    (r"bfloat16 over float32, (.*)", "time in bfloat16 ÷ in float32", r"\1", LOWER),
    (
        r"times faster than the same Llama with softmax, a token (.*)",
        "tokens/s ÷ those of the softmax Llama",
        r"\1",
        HIGHER,
    ),
    (
        r"times faster than materialised features, (.*)",
        "speed ÷ that of the formula with stored features",
        r"\1",
        HIGHER,
    ),
    (r"times faster than (.*?), (.*)", r"speed ÷ that of \1", r"\2", HIGHER),
    (
        r"time (?:with an exact|beside a) window of (\d+) over that without, (.*)",
        r"time with a window of \1 tokens ÷ without",
        r"\2",
        LOWER,
    ),
    (
        r"a token beside a window of 1,024 over one beside 64, (.*) on (.*) of keys",
        "time of a decode step, window of 1,024 ÷ 64 tokens",
        r"\1, \2 of keys and values",
        LOWER,
    ),
    (
        r"tokens of (\d) standard deviations, (.*), over tokens of 1",
        "time with large queries and keys ÷ with those of one standard deviation",
        r"\1 standard deviations, \2",
        LOWER,
    ),
    (r"gates that take (.*) nats a token, over none", "time with gates ÷ without", r"\1 nats per token", LOWER),
    (
        r"10 tokens beside a window of 4,096 over 16",
        "time of a text of 10 tokens, window of 4,096 ÷ 16 tokens",
        "",
        LOWER,
    ),
    (
        r"error per head on MiniLM, (.*) \(averaging the values: (.*)\)",
        "relative output error, mean over heads",
        r"\1; uniform attention: \2",
        LOWER,
    ),
    (r"error per head on MiniLM, (.*)", "relative output error, mean over heads", r"\1 per head", LOWER),
    (r"cosine of the embedding on MiniLM, (.*)", "cosine of the embedding with softmax's", r"\1", HIGHER),
    (r"error at 8,192 tokens over that at 512, on .*?, (.*)", "error at 8,192 tokens ÷ at 512 tokens", r"\1", LOWER),
    (
        r"embedding cosine after conversion, MiniLM, (.*)",
        "cosine of the embedding with the original's",
        r"\1",
        HIGHER,
    ),
    (
        r"rank correlation of similarities after conversion, MiniLM, (.*)",
        "rank correlation of similarities with the original's",
        r"\1",
        HIGHER,
    ),
    (
        r"a token generated by a linearized Llama of width 256 after (.*), the dearest over the cheapest",
        "time of a token, slowest ÷ fastest length",
        r"after \1",
        LOWER,
    ),
    (
        r"bytes of the linearized Llama's cache after (.* tokens) over those after 256",
        "bytes of the states, after 65,536 ÷ 256 tokens",
        "",
        LOWER,
    ),
    (
        r"times smaller than the same Llama's cache with softmax, (.*)",
        "bytes of the softmax Llama's KV cache ÷ bytes of the states",
        r"\1",
        HIGHER,
    ),
    (
        r"logits of a stream of 100,000 bytes against one parallel pass, relative",
        "relative difference of the logits from those of one pass",
        "",
        LOWER,
    ),
    (
        r"memory in use after 100,000 generated bytes over that after 10,000",
        "memory in use after 100,000 bytes − after 10,000",
        "",
        LOWER,
    ),
    (
        r"time of a byte of 100,000 over that of a text just begun, in the dearest tenth",
        "time of a byte, slowest tenth of the text ÷ a new text",
        "",
        LOWER,
    ),
    (r"tokens per second in training, (.*), over softmax's", "tokens/s ÷ those of softmax", r"\1", HIGHER),
    (
        r"bytes sent by a rank, (.*), 65,536 tokens per rank over 8,192",
        "bytes sent by a rank, 65,536 ÷ 8,192 tokens per rank",
        r"\1",
        LOWER,
    ),
    (r"(\w+) attention on two ranks, speed over that of (.*)", r"speed ÷ that of \2", r"\1", HIGHER),
    (
        r"(\w+) attention on two ranks, work over that of (.*)",
        r"processor time of \2 ÷ that of the slower rank",
        r"\1",
        HIGHER,
    ),
    (
        r"error per head on Gemma 3 270M's global layers, (.*), (.*) keys' bytes",
        "relative output error, mean over heads",
        r"\1; the bytes of \2 keys",
        LOWER,
    ),
    (
        r"the same over sinks and window's on another passage, (.*), (.*) keys' bytes",
        "error ÷ that of sinks + window in as many bytes",
        r"\1; the bytes of \2 keys; another passage",
        LOWER,
    ),
    (r"exact attention over 128 merged keys, (.*)", "speed ÷ that of exact attention", r"128 merged keys, \1", HIGHER),
    (
        r"causal exact attention over window 128 \+ merged 128, (.*)",
        "speed ÷ that of exact attention",
        r"causal, window 128 + merged 128, \1",
        HIGHER,
    ),
    (
        r"merged keys with a window of 32 over those without, (.*)",
        "time with a window of 32 tokens ÷ without",
        r"128 merged keys, \1",
        LOWER,
    ),
    (r"share of the time that goes into merging, (.*)", "share of the time that merging takes", r"\1", LOWER),
    (
        r"merging in compiled code over that in plain torch, (.*)",
        "time of merging, compiled code ÷ plain torch",
        r"\1",
        LOWER,
    ),
    (r"time of `import linattn` over that of `import torch`", "time of `import linattn` ÷ `import torch`", "", LOWER),
    (
        r"softmax's time over that of (.*), the whole of MiniLM with (.*) positions",
        "speed ÷ that of softmax, the entire model",
        r"\1, \2 tokens",
        HIGHER,
    ),
    (
        r"length from which (.*) makes the whole of MiniLM faster",
        "length from which the entire model is faster",
        r"\1",
        LOWER,
    ),
    (
        r"bytes of the global layers at 32,768 tokens over 2,048",
        "bytes of the bounded layers, at 32,768 ÷ 2,048 tokens",
        "",
        LOWER,
    ),
    (
        r"bytes of the global layers at 32,768 tokens over those of exact attention",
        "bytes of the bounded layers ÷ the full cache's",
        "32,768 tokens",
        LOWER,
    ),
    (
        r"bytes of the whole cache at 32,768 tokens over the exact one's, sliding windows in both",
        "bytes of all layers ÷ the full cache's",
        "32,768 tokens, sliding-window layers counted in both",
        LOWER,
    ),
    (
        r"time of a token after 32,768 tokens over 2,048",
        "time of a token, after 32,768 ÷ 2,048 tokens",
        "",
        LOWER,
    ),
    (
        r"time of a token after (.* tokens) over the exact cache's, (.*)",
        "time of a token ÷ the full cache's",
        r"after \1, \2",
        LOWER,
    ),
    (
        r"time of 1,024 tokens of a prompt after (.* tokens) over a first one's, (.*)",
        "time of 1,024 tokens of a prompt ÷ of the first 1,024",
        r"after \1, \2",
        LOWER,
    ),
    (
        r"time of 1,024 tokens of a prompt after (.* tokens) over the exact cache's, (.*)",
        "time of 1,024 tokens of a prompt ÷ the full cache's",
        r"after \1, \2",
        LOWER,
    ),
    (
        r"tokens a second at 32,768 tokens over the exact cache's, one text in bfloat16 over float32",
        "tokens/s in bfloat16 ÷ the full cache's in float32",
        "32,768 tokens, one text",
        HIGHER,
    ),
    (
        r"tokens a second at 32,768 tokens over the exact cache's, (.*)",
        "tokens/s ÷ the full cache's",
        r"32,768 tokens, \1",
        HIGHER,
    ),
    (
        r"a compiled decoding step over one of plain torch, (.*) for each key head",
        "time of a step, compiled ÷ plain torch",
        r"\1 per key/value head",
        LOWER,
    ),
)


def words_of(claim: str, bound: str) -> Words:
    """A row's claim as a measure, its setting and its better direction."""
    for pattern, measure, setting, better in _RULES:
        match = re.fullmatch(pattern, claim)
        if match:
            named = re.sub(r"(\d+) centres order 1", r"Expansion(num_centres=\1)", match.expand(setting))
            return Words(match.expand(measure), named, better)
    measure, _, setting = claim.partition(", ")
    return Words(measure, setting, LOWER if bound.startswith("<=") else HIGHER)


def headings(benchmarks: Iterable[str]) -> dict[str, str]:
    """Headings by benchmark, in the page's order; last those of benchmarks without one, named for their file."""
    present = set(benchmarks)
    others = sorted(present - HEADINGS.keys())
    known = {name: heading for name, heading in HEADINGS.items() if name in present}
    return known | {name: name.replace("_", " ").capitalize() for name in others}
