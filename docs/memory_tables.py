"""The table of what a bounded cache costs a language model, from docs/memory.json.

`docs/write_tables.py --take-memory REPORT` takes that file from the memory.jsonl of `linattn audit MODEL --budget …`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from linattn.lab.report.memory.summary import MemoryLine, summarise_memory
from linattn.records.atomic import atomic_file
from site_tables import table

MEMORY = Path(__file__).parent / "memory.json"
_RECALL = ("repeated passages", "needles", "multi-query recall")


def take_memory(report: Path) -> None:
    """Keep one line per contender and budget, and the circumstances."""
    summary = summarise_memory(report / "memory.jsonl")
    header = summary.header
    circumstances = {
        name: getattr(header, name)
        for name in ("model", "layers", "head_dim", "number_bytes", "num_tokens", "num_measured", "text", "versions")
    }
    lines = [dataclasses.asdict(line) for line in summary.lines if line.passages]
    with atomic_file(MEMORY) as file:
        json.dump({"header": circumstances, "lines": lines}, file, indent=1, ensure_ascii=False)
        file.write("\n")


def memory_table() -> str:
    """Every contender at every budget, the least KL first, the baselines above."""
    found = json.loads(MEMORY.read_text(encoding="utf-8"))
    header, lines = found["header"], [MemoryLine(**line) for line in found["lines"]]
    passages = {line.passages for line in lines}
    number = str(*passages) if len(passages) == 1 else f"{min(passages)} to {max(passages)}"
    words = (
        f"{header['model']}, layers {', '.join(map(str, header['layers']))} of width {header['head_dim']}; {number} "
        f"passages of {header['num_tokens']:,} tokens of {header['text']}, KL in nats and perplexity of the last "
        f"{header['num_measured']}; recall on texts of half that length: passages that come again, numbers told once, "
        "and sixteen of them asked for one by one. Budgets are the bytes of so many exact keys and values in float32, "
        "per layer and key/value head, everything counted that a rule keeps."
    )
    rows = []
    for line in sorted(lines, key=lambda line: (line.budget, line.kl)):
        recall = (f"{line.recall[task]:.2f}" if task in line.recall else "" for task in _RECALL)
        budget = f"{line.budget:,}" if line.budget else "–"
        name = f"**{line.label}**" if line.contender.startswith("merged") else line.label
        rows.append((budget, name, f"{line.kl:.4f}", f"{line.perplexity:.2f}", f"{line.error:.3f}", *recall))
    head = ("budget", "rule", "KL", "perplexity", "error of heads", "passages again", "numbers", "one by one")
    return f"{words}\n\n{table(head, rows)}"
