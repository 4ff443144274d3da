"""The tables of what a bounded cache costs a language model, from docs/memory.json.

`docs/write_tables.py --take-memory REPORT …` takes it from the memory.jsonl of folders, each of a `linattn audit MODEL
--budget …` of one model in one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from linattn import MergedKV
from linattn.kv_cache.budget import RECALLS
from linattn.records.json_files import Reading, read_record, to_json, write_json
from linattn.records.texts import Table
from linattn_lab.kv_audit.methods import num_unmerged
from linattn_lab.kv_audit.names import BOUNDED, FULL, WINDOW
from linattn_lab.report._text import counted
from linattn_lab.report.memory.summary import MemoryLine, MemorySummary, summarise_memory
from linattn_lab.report.memory.words import nats, setting_words, table_at
from site_tables import ARROWS, table

MEMORY = Path(__file__).parent / "memory.json"
# Columns of the table of all methods in which lower is better; in the others higher is.
_LOWER = {"MB", "peak MB", "KL", "median", "99 %", "largest", "÷ bounded cache", "perplexity", "prefill s"}
# The budget and the head width of the table of what fits.
_ROOM, _WIDTH = 512, 128
# What packaged models were made of.
_WEIGHTS = {"gemma-3-270m": " (weights of 4 bits, Q4_K_M, dequantized)"}
# As they are called in Python.
_NAMES = {BOUNDED: f"**{BOUNDED}**"} | {f"{BOUNDED}, {name}": f'{BOUNDED}, `recall="{name}"`' for name in RECALLS[1:]}
# A setting without tiers: on the page of all methods.
_NOT_IN_README = "merged keys"
_QUANTIZED = f"{WINDOW} in "
_KIND, _VERSION = "figures of bounded KV caches", 1
_REMEDY = "take it again with docs/write_tables.py --take-memory"


def take_memory(reports: Sequence[Path], file: Path) -> None:
    """Keep the figures of audits that are finished."""
    audits = [summarise_memory(report / "memory.jsonl") for report in reports]
    for report, audit in zip(reports, audits, strict=True):
        if not audit.is_finished:
            raise SystemExit(f"the audit in {report} is unfinished; run its command again")
    write_json(file, {"kind": _KIND, "version": _VERSION, "audits": [to_json(audit) for audit in audits]})


def audits_of(file: Path) -> list[MemorySummary]:
    """What was kept."""
    audits = read_record(file, _KIND, _VERSION, _REMEDY)["audits"]
    return [Reading(f"{file}, audit {n}", _REMEDY).record(MemorySummary, audit) for n, audit in enumerate(audits)]


def readme_table() -> str:
    """Methods at the longest text and the largest budget of the first audit, with what they cost in a column."""
    audit = audits_of(MEMORY)[0]
    header, (length, budget) = audit.header, max(audit.settings)
    baselines = audit.without_budget(length)
    full = next(line for line in baselines if line.method == FULL)
    threads = f"{header.num_threads} thread{'' if header.num_threads == 1 else 's'} of one {header.processor}"
    passages = "one passage" if header.num_passages == 1 else f"{header.num_passages} passages"
    words = (
        f"{header.model}{_WEIGHTS.get(header.model, '')} in {header.dtype}, {passages} of {length:,} tokens of each of "
        f"{', '.join(header.texts)}, budget {budget:,} tokens per layer and key/value head, {threads}, by "
        f"`linattn audit {header.model} --budget {budget} --method …`. {ARROWS} "
        f"KV cache: the {len(header.layers)} layers that are bounded; the {header.num_exact} others hold as much in "
        "every row, and take as long: where every layer is bounded, times differ more. Fit unmerged: share of the "
        "tokens read before the first merge or eviction; after it the default "
        "keeps half as many unmerged. "
        f"KL: KL divergence of the last {header.num_measured} predictions from the full cache's, in nats; mean and "
        "median of a passage, averaged over passages. A few predictions make up most of the bounded cache's mean. "
        f"Needles: share of the digits predicted of {counted(header.num_facts, 'number')}, stated once, at each of "
        f"{', '.join(full.facts)} of {'one text' if header.num_samples == 1 else f'{header.num_samples} texts'}. "
        f"÷ full: divided by the full cache's.{_few_bits(header.kinds)}"
    )
    head = (
        *("method", "KV cache, MB ↓", "fit unmerged ↑", "KL, mean ↓", "KL, median ↓", "needles ↑"),
        *("prefill time ÷ full ↓", "decode tokens/s ÷ full ↑"),
    )
    lines = (line for line in (*baselines, *audit.at(length, budget)) if line.method != _NOT_IN_README)
    rows = [_row(line, full) for line in lines]
    return f"{words}\n\n{table(head, rows)}"


def _few_bits(kinds: Sequence[str]) -> str:
    """What a window in few bits is, and which of those measured are shown; nothing where none was measured."""
    bits = [kind.removeprefix(_QUANTIZED).removesuffix(" bits") for kind in kinds if kind.startswith(_QUANTIZED)]
    if not bits:
        return ""
    return (
        " In few bits: a quantized window, which evicts the oldest tokens; "
        f"the best of {', '.join(bits)} bits by KL and by needles."
    )


def _row(line: MemoryLine, full: MemoryLine) -> tuple[str, ...]:
    """One method, its times over the full cache's."""
    name = _NAMES.get(line.method, line.method)
    return (
        f"{name}; nothing merged or evicted" if line.budget and line.unmerged == 1 else name,
        f"{line.num_bytes / 1e6:.2f}",
        f"{line.unmerged:.0%}",
        nats(line.kl),
        nats(line.kl_median),
        ", ".join(f"{share:.0%}" for share in line.facts.values()) or "–",
        f"{line.prefill_seconds.median / full.prefill_seconds.median:.2f}",
        f"{line.tokens_per_second.median / full.tokens_per_second.median:.2f}",
    )


def room_table() -> str:
    """How many tokens a budget holds before it merges any, by dtype and option."""
    dtypes = (torch.float32, torch.bfloat16)
    options: dict[str, dict[str, Any]] = {
        "`bits=4`": {"bits": 4},
        '`recall="middle"`': {"recall": "middle"},
        '`recall="far"`': {"recall": "far"},
        "`bits=8`": {"bits": 8},
        "`bits=None`": {"bits": None},
    }
    rows = []
    for words, option in options.items():
        configs = (MergedKV.within(_ROOM, head_dim=_WIDTH, dtype=dtype, **option) for dtype in dtypes)
        rows.append((words, *(f"{num_unmerged(config):,}" for config in configs)))
    head = ("option", *(f"tokens, {str(dtype).removeprefix('torch.')}" for dtype in dtypes))
    return f"Budget {_ROOM}, head width {_WIDTH}:\n\n{table(head, rows)}"


def _directed(figures: Table) -> Table:
    """A table whose columns say whether lower or higher is better."""
    columns = (f"{name} {'↓' if name in _LOWER else '↑'}" for name in figures.columns[1:])
    return replace(figures, columns=(figures.columns[0], *columns))


def memory_table(file: Path) -> str:
    """A table for each length and budget of each audit, a method a row."""
    parts = []
    for audit in audits_of(file):
        parts.append(f"{setting_words(audit)} {ARROWS}")
        for length, budget in audit.settings:
            parts += [
                f"**{length:,} tokens within the bytes of {budget:,} {audit.header.dtype} keys**",
                _directed(table_at(audit, length, budget)).markdown(),
            ]
    return "\n\n".join(parts)
