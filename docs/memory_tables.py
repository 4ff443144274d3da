"""The tables of what a bounded cache costs a language model, from docs/memory.json and docs/memory_long.json.

`docs/write_tables.py --take-memory REPORT …` takes the first from the memory.jsonl of `linattn audit MODEL --budget …`,
and of audits that differ in budgets and contenders alone; `--add-memory` adds such audits' lines to what there is, and
`--take-long-memory` takes the second, of longer passages.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linattn.records.atomic import atomic_file
from linattn_lab.constant_memory.records import PLANNED
from linattn_lab.report.memory.summary import MemoryLine, summarise_memory
from site_tables import table

MEMORY, LONG = (Path(__file__).parent / name for name in ("memory.json", "memory_long.json"))
# Budgets that the README has a row of each.
_SHOWN = (512, 1024, 2048)
_NEEDLES = "needles"
_RECALL = ("repeated passages", _NEEDLES, "multi-query recall")
# How contenders begin that streams of linattn keep, and among them those that are not quantized.
_MERGED, _UNQUANTIZED = "merged keys", "merged keys, "


def take_memory(reports: Sequence[Path], file: Path, *, beside: bool = False) -> None:
    """Keep one line per contender and budget, of the first report that has it, and the circumstances.

    With `beside` the lines that the file has come first.
    """
    summaries = [summarise_memory(report / "memory.jsonl") for report in reports]
    header, *others = (summary.header for summary in summaries)
    if not all(header.measures_as(other) for other in others):
        sys.exit("these reports are of audits that differ in more than budgets and contenders; take one of them")
    circumstances = {
        name: getattr(header, name)
        for name in ("model", "layers", "head_dim", "number_bytes", "num_tokens", "num_measured", "text", "versions")
    }
    former, earlier = _taken(file) if beside else (circumstances, [])
    if former != json.loads(json.dumps(circumstances)):
        sys.exit(f"{file.name} is of {former}, and these reports are of {circumstances}; take all of them again")
    lines: dict[tuple[int, str], MemoryLine] = {}
    for line in (*earlier, *(line for summary in summaries for line in summary.lines if line.passages)):
        lines.setdefault((line.budget, line.contender), line)
    kept = [dataclasses.asdict(line) for line in sorted(lines.values(), key=lambda line: line.budget)]
    with atomic_file(file) as target:
        json.dump({"header": circumstances, "lines": kept}, target, indent=1, ensure_ascii=False)
        target.write("\n")


def memory_rows() -> list[tuple[str, str, str]]:
    """What each budget costs a model's predictions by merged keys, beside sinks and window and both baselines."""
    header, lines = _taken(MEMORY)
    names = {line.contender: line for line in lines if not line.budget}
    exact, uniform, rows = names["exact"], names["uniform"], []
    for budget in dict.fromkeys(line.budget for line in lines if line.budget in _SHOWN):
        policies = {line.contender: line for line in lines if line.budget == budget}
        merged, unquantized = (
            min((line for name, line in policies.items() if name.startswith(kind)), key=lambda line: line.kl)
            for kind in (_MERGED, _UNQUANTIZED)
        )
        planned = policies.get(PLANNED)
        per_layer = "" if planned is None else f"with per-layer budgets {_nats(planned.kl)}; "
        rows.append(
            (
                f"KL divergence of {header['model']}'s predictions, context length {header['num_tokens']:,}, budget "
                f"{budget:,} tokens a layer: `{merged.label}`, the best tried",
                f"{_nats(merged.kl)} nats",
                f"{per_layer}not quantized, `{unquantized.label}`, {_nats(unquantized.kl)}; sinks and sliding window "
                f"{_nats(policies['sinks + window'].kl)}; uniform attention {uniform.kl:.2f}; full attention 0. Needle "
                f"retrieval, {header['num_tokens'] // 2:,} tokens: accuracy {merged.recall[_NEEDLES]:.0%}, full "
                f"attention {exact.recall[_NEEDLES]:.0%}",
            )
        )
    return rows


def _nats(kl: float) -> str:
    """Four decimals, or where these are next to nothing two digits."""
    return f"{kl:.4f}" if kl == 0 or kl >= 1e-3 else f"{kl:.2g}"


def _taken(file: Path) -> tuple[dict[str, Any], list[MemoryLine]]:
    """The circumstances and the lines."""
    found = json.loads(file.read_text(encoding="utf-8"))
    return found["header"], [MemoryLine(**line) for line in found["lines"]]


def memory_table(file: Path) -> str:
    """Every policy at every budget, the least KL first, the baselines above."""
    header, lines = _taken(file)
    passages = {line.passages for line in lines}
    number = str(*passages) if len(passages) == 1 else f"{min(passages)} to {max(passages)}"
    words = (
        f"{header['model']}, layers {', '.join(map(str, header['layers']))} of width {header['head_dim']}; {number} "
        f"passages of {header['num_tokens']:,} tokens of {header['text']}. KL divergence in nats and perplexity: of "
        f"the last {header['num_measured']} tokens. Copying, needle retrieval, multi-query recall: accuracy on texts "
        "of half that length. A budget of N is the bytes of N exact keys and values in float32, per layer and "
        "key/value head; everything that a policy keeps counts."
    )
    rows = []
    for line in sorted(lines, key=lambda line: (line.budget, line.kl)):
        recall = (f"{line.recall[task]:.2f}" if task in line.recall else "" for task in _RECALL)
        budget = f"{line.budget:,}" if line.budget else "–"
        name = f"per-layer budgets: {line.label}" if line.contender == PLANNED else line.label
        name = f"**{name}**" if line.contender.startswith((PLANNED, "merged")) else name
        rows.append((budget, name, _nats(line.kl), f"{line.perplexity:.2f}", f"{line.error:.3f}", *recall))
    head = ("budget", "policy", "KL", "perplexity", "relative error of heads", "copying", "needles", "multi-query")
    return f"{words}\n\n{table(head, rows)}"
