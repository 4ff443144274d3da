"""The tables of what a bounded cache costs a language model, from docs/memory.json.

`docs/write_tables.py --take-memory REPORT …` takes it from the memory.jsonl of folders, each of a `linattn audit MODEL
--budget …` of one model in one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from linattn.records.fields import Reading, to_json
from linattn.records.json_files import read_record, write_json
from linattn_lab.kv_audit.methods import BOUNDED, FULL, UNIFORM
from linattn_lab.report.memory.summary import MemoryLine, MemorySummary, summarise_memory
from linattn_lab.report.memory.words import nats, setting_words, table_at

MEMORY = Path(__file__).parent / "memory.json"
_KIND, _VERSION = "figures of bounded KV caches", 1
_REMEDY = "take it again with docs/write_tables.py --take-memory"


def take_memory(reports: Sequence[Path], file: Path) -> None:
    """Keep the figures of audits."""
    audits = [to_json(summarise_memory(report / "memory.jsonl")) for report in reports]
    write_json(file, {"kind": _KIND, "version": _VERSION, "audits": audits})


def audits_of(file: Path) -> list[MemorySummary]:
    """What was kept."""
    audits = read_record(file, _KIND, _VERSION, _REMEDY)["audits"]
    return [Reading(f"{file}, audit {n}", _REMEDY).record(MemorySummary, audit) for n, audit in enumerate(audits)]


def memory_rows() -> list[tuple[str, str, str]]:
    """What each budget costs a model's predictions by the default, beside the other methods and both baselines."""
    rows = []
    for audit in audits_of(MEMORY):
        for length, budget in audit.settings:
            lines = {line.method: line for line in (*audit.without_budget(length), *audit.at(length, budget))}
            if BOUNDED in lines:
                rows.append(_row(audit, lines, length, budget))
    return rows


def _row(audit: MemorySummary, lines: dict[str, MemoryLine], num_tokens: int, budget: int) -> tuple[str, str, str]:
    """One length and budget."""
    header, default = audit.header, lines[BOUNDED]
    others = "; ".join(
        f"{name} {nats(line.kl)}" for name, line in lines.items() if name not in (BOUNDED, FULL, UNIFORM)
    )
    facts = " / ".join(f"{share:.0%}" for share in default.facts.values())
    exact = " / ".join(f"{share:.0%}" for share in lines[FULL].facts.values())
    retrieved = (
        f". Facts told once at depths of {', '.join(default.facts)}: {facts}, full cache {exact}" if facts else ""
    )
    return (
        f"KL of {header.model}'s predictions after {num_tokens:,} tokens within the bytes of {budget:,} {header.dtype} "
        f"keys a layer, `{default.label}`; {default.unmerged:.0%} of the tokens fit unmerged",
        f"{nats(default.kl)} nats",
        f"{others}; uniform attention {nats(lines[UNIFORM].kl)}; full cache {nats(lines[FULL].kl)}{retrieved}",
    )


def memory_table(file: Path) -> str:
    """A table for each length and budget of each audit, a method a row."""
    parts = []
    for audit in audits_of(file):
        parts.append(setting_words(audit))
        for length, budget in audit.settings:
            parts += [
                f"**{length:,} tokens within the bytes of {budget:,} {audit.header.dtype} keys**",
                table_at(audit, length, budget).markdown(),
            ]
    return "\n\n".join(parts)
