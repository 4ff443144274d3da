"""The tables of what a bounded cache costs a language model, from docs/memory.json.

`docs/write_tables.py --take-memory REPORT …` takes it from the memory.jsonl of folders, each of a `linattn audit MODEL
--budget …` of one model in one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from linattn.records.fields import Reading, to_json
from linattn.records.json_files import read_record, write_json
from linattn_lab.kv_audit.names import BOUNDED, FULL
from linattn_lab.report.memory.summary import MemoryLine, MemorySummary, summarise_memory
from linattn_lab.report.memory.words import nats, setting_words, table_at
from site_tables import table

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


def readme_table() -> str:
    """Each method at the longest text and the largest budget of the first audit, with what it costs in a column."""
    audit = audits_of(MEMORY)[0]
    header, (length, budget) = audit.header, max(audit.settings)
    baselines = audit.without_budget(length)
    full = next(line for line in baselines if line.method == FULL)
    words = (
        f"{header.model} in {header.dtype}, {length:,} tokens, budget {budget:,} tokens a layer; passages of each of "
        f"{', '.join(header.texts)}: {header.num_passages}; threads of one {header.processor}: {header.num_threads}. "
        f"KL divergence in nats from the full cache. Needles: facts told once, retrieved at a depth of "
        f"{', '.join(full.facts)} of the text. Unmerged: tokens that the cache holds one by one."
    )
    head = ("method", "KV cache, MB", "unmerged", "KL", "needles", "prefill time ÷ full", "tokens/s ÷ full")
    rows = [_row(line, full) for line in (*baselines, *audit.at(length, budget))]
    return f"{words}\n\n{table(head, rows)}"


def _row(line: MemoryLine, full: MemoryLine) -> tuple[str, ...]:
    """One method, its times over the full cache's."""
    return (
        f"**{line.method}**" if line.method == BOUNDED else line.method,
        f"{line.num_bytes / 1e6:.2f}",
        f"{line.unmerged:.0%}",
        nats(line.kl),
        ", ".join(f"{share:.0%}" for share in line.facts.values()) or "–",
        f"{line.prefill_seconds.median / full.prefill_seconds.median:.2f}",
        f"{line.tokens_per_second.median / full.tokens_per_second.median:.2f}",
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
