"""Faults of the audit of a constant memory."""

from __future__ import annotations

from faults.fault import Fault

CONTENDERS, MEMORY, REPORT = "lab/contenders/", "lab/constant_memory/", "lab/report/memory/"
DEFINITIONS, ALL = "tests/lab/contenders/test_definitions.py", "tests/lab/contenders/test_contenders.py"
MEASURING, RECALL = "tests/lab/constant_memory/test_measuring.py", "tests/lab/constant_memory/test_recall.py"

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
    Fault("forget the sinks", CONTENDERS + "windows.py", "(seen < self.num_sinks) | ", "", DEFINITIONS),
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
        CONTENDERS + "merged.py",
        "return sample + (1 + frames) * sizes.statistic_bytes",
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
        MEMORY + "measures.py",
        "(p.exp() * (p - other))",
        "(other.exp() * (other - p))",
        MEASURING,
    ),
    Fault(
        "predict the token that was just read",
        MEMORY + "measuring.py",
        "self._following = tokens[0, self.positions + 1]",
        "self._following = tokens[0, self.positions]",
        MEASURING,
    ),
    Fault(
        "replay what a contender changed",
        MEMORY + "answering.py",
        "list(every.children())[: int(path[places[0]])]",
        "list(every.children())[: int(path[places[0]]) + 1]",
        MEASURING,
    ),
    Fault(
        "expect an answer one token late",
        MEMORY + "recall.py",
        "torch.arange(one.start - 1, one.stop - 1)",
        "torch.arange(one.start, one.stop)",
        RECALL,
    ),
    Fault(
        "depart from the plain window for next to nothing",
        MEMORY + "planning.py",
        "chosen = best if best.kl <= MARGIN * plain.kl else plain",
        "chosen = best",
        "tests/lab/constant_memory/test_planning.py",
    ),
    Fault(
        "call any far part worth its bytes",
        REPORT + "words.py",
        "merged < min(plain, off)",
        "merged < max(plain, off)",
        "tests/lab/report/test_memory.py",
    ),
    Fault(
        "convert to a budget that no text exceeds",
        "lab/constant_memory/converting.py",
        "if num_tokens <= budget:",
        "if False:",
        "tests/lab/constant_memory/test_converting.py",
    ),
    Fault(
        "convert where a plain window is better",
        "lab/constant_memory/converting.py",
        "if self.plan.choices[0] == PLAIN:",
        "if False:",
        "tests/lab/constant_memory/test_converting.py",
    ),
    Fault(
        "leave the model bounded after recall before training",
        "lab/constant_memory/converting.py",
        "restore_(loaded.model)",
        "pass",
        "tests/lab/constant_memory/test_converting.py",
    ),
    Fault(
        "plan layer by layer where all are to be alike",
        "lab/constant_memory/measuring.py",
        "if is_common else 1",
        "if False else 1",
        "tests/lab/constant_memory/test_converting.py",
    ),
)
