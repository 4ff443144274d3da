"""Faults of the audit of a constant memory."""

from __future__ import annotations

from faults.fault import Fault

CONTENDERS, REPORT = "lab/contenders/", "lab/report/memory/"
DEFINITIONS, ALL = "lab/tests/contenders/test_definitions.py", "lab/tests/contenders/test_contenders.py"
MEASURING, RECALL = "lab/tests/constant_memory/test_measuring.py", "lab/tests/constant_memory/test_recall.py"

FAULTS = (
    Fault(
        "judge heavy hitters by the latest query",
        CONTENDERS + "h2o.py",
        "return held.mass",
        "return held.latest",
        DEFINITIONS,
    ),
    Fault(
        "keep the keys that are alike",
        CONTENDERS + "keydiff.py",
        "return -(direction * anchor)",
        "return (direction * anchor)",
        DEFINITIONS,
    ),
    Fault(
        "expect attention without the queries' spread",
        CONTENDERS + "expected_attention.py",
        "0.5 * ((key",
        "0.0 * ((key",
        DEFINITIONS,
    ),
    Fault(
        "leave the means' distance out of merged moments",
        CONTENDERS + "moment_kv.py",
        "share * inner + between",
        "share * inner",
        DEFINITIONS,
    ),
    Fault("forget the sinks", "lab/contenders/windows.py", "(seen < self.num_sinks) | ", "", DEFINITIONS),
    Fault(
        "take a sampled key for itself alone",
        CONTENDERS + "uniform_sample.py",
        "torch.where(between, shift.clamp(min=0), 0)",
        "torch.where(between, 0 * shift, 0)",
        DEFINITIONS,
    ),
    Fault(
        "leave compacted values as they were",
        CONTENDERS + "attention_matching.py",
        "value = kept.value + fitted.mT",
        "value = kept.value + 0 * fitted.mT",
        DEFINITIONS,
    ),
    Fault(
        "round keys token by token",
        CONTENDERS + "kivi.py",
        "self._rounded(key.mT).mT",
        "self._rounded(key)",
        DEFINITIONS,
    ),
    Fault(
        "hide the sample's bytes",
        "kv_cache/budget.py",
        "return sample + frames * sizes.statistic_bytes",
        "return 0",
        DEFINITIONS,
    ),
    Fault(
        "evict after the next block",
        CONTENDERS + "eviction.py",
        "room = self.num_keys - self.block",
        "room = self.num_keys",
        DEFINITIONS,
    ),
    Fault(
        "let a block see itself whole",
        CONTENDERS + "eviction.py",
        "visible = causal_mask(block.shape[3], held.key.shape[2], block.device)",
        "visible = torch.ones(block.shape[3], held.key.shape[2], dtype=torch.bool)",
        ALL,
    ),
    Fault(
        "measure the divergence the other way round",
        "lab/constant_memory/distance.py",
        "(p.exp() * (p - other))",
        "(other.exp() * (other - p))",
        MEASURING,
    ),
    Fault(
        "predict the token that was just read",
        "lab/constant_memory/read_passage.py",
        "= num_measured, tokens[0, self.positions + 1]",
        "= num_measured, tokens[0, self.positions]",
        MEASURING,
    ),
    Fault(
        "replay what a contender changed",
        "lab/constant_memory/answering.py",
        "list(every.children())[: int(path[places[0]])]",
        "list(every.children())[: int(path[places[0]]) + 1]",
        MEASURING,
    ),
    Fault(
        "expect an answer one token late",
        "lab/constant_memory/recall.py",
        "torch.arange(one.start - 1, one.stop - 1)",
        "torch.arange(one.start, one.stop)",
        RECALL,
    ),
    Fault(
        "depart from the plain window for next to nothing",
        "lab/constant_memory/plans.py",
        "chosen = best if best.kl <= MARGIN * plain.kl else plain",
        "chosen = best",
        "lab/tests/constant_memory/test_plans.py",
    ),
    Fault(
        "call any far part worth its bytes",
        REPORT + "words.py",
        "merged < min(plain, off)",
        "merged < max(plain, off)",
        "lab/tests/report/test_memory.py",
    ),
    Fault(
        "plan layer by layer where all are to be alike",
        "lab/constant_memory/plans.py",
        "and not is_common",
        "",
        "lab/tests/constant_memory/test_plans.py",
    ),
    Fault(
        "share bytes out by the divergence itself, not by its root",
        "lab/constant_memory/plans.py",
        "max(kl, 0.0) ** 0.5",
        "max(kl, 0.0)",
        "lab/tests/constant_memory/test_plans.py",
    ),
    Fault(
        "leave a layer with hardly any bytes",
        "lab/constant_memory/plans.py",
        "max(budget // 4, 1)",
        "1",
        "lab/tests/constant_memory/test_plans.py",
    ),
    Fault(
        "give every layer of a plan the bytes of all alike",
        "lab/constant_memory/planning.py",
        "filled(CANDIDATES[choice.name], choice.num_keys, sizes)",
        "filled(CANDIDATES[choice.name], 50, sizes)",
        "lab/tests/constant_memory/test_planning.py",
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
        "[as_method(each) for each in several]",
        "[as_method(several[0]) for _ in several]",
        "tests/hf/test_merged_keys.py",
    ),
    Fault(
        "convert every layer by the first method",
        "convert/course.py",
        "build_maps(methods, self._layers",
        "build_maps(methods := methods[:1] * len(methods), self._layers",
        "tests/convert/test_conversion.py",
    ),
)
