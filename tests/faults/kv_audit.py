"""Faults of the audit of a bounded KV cache."""

from __future__ import annotations

from faults.fault import Fault

PLANS, REPORT = "lab/tests/kv_audit/test_plans.py", "lab/report/memory/"
MEASURING, FIGURES = "lab/tests/kv_audit/test_measuring.py", "lab/tests/kv_audit/test_figures.py"
RETRIEVAL, SHOWN = "lab/tests/kv_audit/test_tasks.py", "lab/tests/report/test_memory.py"

FAULTS = (
    Fault(
        "hide the sample's bytes",
        "kv_cache/budget.py",
        "return sample_size(sizes.num_groups) * (sizes.head_dim * sizes.statistic_bytes + 1)",
        "return 0",
        "tests/kv_cache/test_budget.py",
    ),
    Fault(
        "keep the figures of a model's former weights",
        "lab/kv_audit/records.py",
        '"left_out", "calibration")',
        '"left_out", "calibration", "weights_sha256")',
        "lab/tests/commands/test_memory_audit.py",
    ),
    Fault(
        "keep the plan of a model's former weights",
        "lab/kv_audit/planning.py",
        "wanted = header.weights_sha256,",
        "wanted = plan.weights_sha256,",
        "lab/tests/commands/test_memory_audit.py",
    ),
    Fault(
        "measure the divergence the other way round",
        "lab/kv_audit/divergence.py",
        "(p.exp() * (p - other))",
        "(other.exp() * (other - p))",
        FIGURES,
    ),
    Fault(
        "take the 99 % quantile for the 90 %",
        "lab/kv_audit/divergence.py",
        "[0.5, 0.99]",
        "[0.5, 0.9]",
        FIGURES,
    ),
    Fault(
        "compare passages that are not the same",
        "lab/kv_audit/intervals.py",
        "math.log(a / b) for a, b in zip(first, second, strict=True)",
        "math.log(a / b) for a, b in zip(first, second[1:] + second[:1], strict=True)",
        FIGURES,
    ),
    Fault(
        "count what was freed as if it were there",
        "lab/kv_audit/peak.py",
        "total += change",
        "total += max(change, 0)",
        FIGURES,
    ),
    Fault(
        "predict the token that was just read",
        "lab/kv_audit/passage_figures.py",
        "self._tokens[0, 1 - last :]",
        "self._tokens[0, -last:-1]",
        MEASURING,
    ),
    Fault(
        "keep the predictions of a chunk's first tokens",
        "lab/kv_audit/reading.py",
        "count = stop - max(start, length - last)",
        "count = min(stop - start, last)",
        MEASURING + " -k in_chunks",
    ),
    Fault(
        "read a text without the cache's chunks before",
        "lab/kv_audit/reading.py",
        "model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=count)",
        "model(input_ids=tokens, use_cache=False, logits_to_keep=count)",
        MEASURING,
    ),
    Fault(
        "call tokens alike again after a text has parted",
        "lab/kv_audit/reading.py",
        "(first == second).long().cumprod(0).sum()",
        "(first == second).long().sum()",
        FIGURES,
    ),
    Fault(
        "count keys of a model in bfloat16 as float32's",
        "lab/kv_audit/methods.py",
        "config = KINDS[kind](budget, sizes)",
        "config = KINDS[kind](2 * budget, sizes)",
        MEASURING,
    ),
    Fault(
        "score tasks that the full cache fails",
        "lab/kv_audit/measuring.py",
        ">= ENOUGH",
        ">= 0",
        MEASURING,
    ),
    Fault(
        "expect an answer one token late",
        "lab/kv_audit/facts.py",
        "first = self.questions[0].start - 1",
        "first = self.questions[0].start",
        RETRIEVAL,
    ),
    Fault(
        "tell all facts at the beginning",
        "lab/kv_audit/facts.py",
        "cut = int(depth * len(filler))",
        "cut = 0",
        RETRIEVAL,
    ),
    Fault(
        "show windows in all bits",
        REPORT + "summary.py",
        "earlier = [other for other in kept if is_few_bits(other) and is_few_bits(line)]",
        "earlier: list[MemoryLine] = []",
        SHOWN,
    ),
    Fault(
        "lose the word at which a continuation parts",
        REPORT + "continuation.py",
        "words[same:]",
        "words[same + 1 :]",
        SHOWN,
    ),
    Fault(
        "tell the prefill of another method in the verdict",
        REPORT + "words.py",
        "ours.prefill_seconds.median / full.prefill_seconds.median",
        "full.prefill_seconds.median / ours.prefill_seconds.median",
        SHOWN,
    ),
    Fault(
        "depart from the plain window for next to nothing",
        "lab/kv_audit/plans.py",
        "chosen = best if best.kl <= MARGIN * plain.kl else plain",
        "chosen = best",
        PLANS,
    ),
    Fault(
        "plan layer by layer where all are to be alike",
        "lab/kv_audit/plans.py",
        "and not is_common",
        "",
        PLANS,
    ),
    Fault(
        "share bytes out by the divergence itself, not by its root",
        "lab/kv_audit/plans.py",
        "max(kl, 0.0) ** 0.5",
        "max(kl, 0.0)",
        PLANS,
    ),
    Fault(
        "leave a layer with hardly any bytes",
        "lab/kv_audit/plans.py",
        "max(budget // 4, 1)",
        "1",
        PLANS,
    ),
    Fault(
        "give every layer of a plan the bytes of all alike",
        "lab/kv_audit/planning.py",
        "CANDIDATES[choice.name](choice.num_keys, sizes)",
        "CANDIDATES[choice.name](50, sizes)",
        "lab/tests/kv_audit/test_planning.py",
    ),
    Fault(
        "take a plan of other layers",
        "hf/bounded_cache.py",
        "if plan.layers != numbers:",
        "if False:",
        "tests/cli/test_generate.py",
    ),
    Fault(
        "linearize every layer by the first written form",
        "hf/linearization.py",
        "[_as_method(each) for each in several]",
        "[_as_method(several[0]) for _ in several]",
        "tests/hf/test_merged_keys.py",
    ),
    Fault(
        "convert every layer by the first method",
        "convert/course.py",
        "build_maps(methods, self._layers",
        "build_maps(methods := methods[:1] * len(methods), self._layers",
        "tests/hf/test_merged_keys.py",
    ),
)
