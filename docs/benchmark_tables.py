"""Tables of benchmarks/results.jsonl: all figures by benchmark, those of one benchmark, crossovers, and misses."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from benchmark_words import SETTINGS, headings, words_of
from site_tables import Row, table

_HEAD = ("figure", "setting", "measured", "range", "better", "expected", "verdict")


def benchmark_table(lines: list[Row]) -> str:
    """A heading for each benchmark, its command, and a row for each figure; the machine once, and where it differs."""
    machine = json.loads(Counter(json.dumps(line["machine"]) for line in lines).most_common(1)[0][0])
    parts = [
        f"{_machine(machine)}; 8 heads, D = 64, 256 features, float32, unless a heading or a row says otherwise. "
        "Measured: the median of interleaved repeats; range: least to greatest. Better: whether a lower or a higher "
        "figure is."
    ]
    for benchmark, heading in headings(line["benchmark"] for line in lines).items():
        rows = [_row(line, _difference(line["machine"], machine)) for line in lines if line["benchmark"] == benchmark]
        setting = f": {SETTINGS[benchmark]}" if benchmark in SETTINGS else ""
        parts += [f"### {heading}", f"`python benchmarks/{benchmark}.py`{setting}", table(_HEAD, rows)]
    return "\n\n".join(parts)


def claims_table(lines: list[Row], benchmark: str) -> str:
    """The rows of one benchmark, their setting and their machine."""
    shown = [line for line in lines if line["benchmark"] == benchmark]
    setting = f"{SETTINGS[benchmark]} " if benchmark in SETTINGS else ""
    return f"{table(_HEAD, [_row(line) for line in shown])}\n\n{setting}{_machines(shown)}."


def crossover_table(lines: list[Row]) -> str:
    """From which length linear attention is faster than exact attention, and on which machine."""
    shown = [line for line in lines if line["benchmark"] == "crossover_with_sdpa"]
    rows = [(*line["claim"].split(", ")[1:], _measured(line)) for line in shown]
    return f"{table(('direction', 'random features', 'faster from'), rows)}\n\n{_machines(shown)}."


def misses_table(lines: list[Row]) -> str:
    """How many figures of each benchmark miss their bounds, with the one that is farthest from its own."""
    rows = []
    for benchmark, heading in headings(line["benchmark"] for line in lines if not line["holds"]).items():
        shown = [line for line in lines if line["benchmark"] == benchmark]
        missed = [line for line in shown if not line["holds"]]
        worst = max(missed, key=_distance)
        words = words_of(worst["claim"], worst["bound"])
        figure = "; ".join(part for part in (words.measure, words.setting) if part)
        link = f"[{heading}](benchmarks.md#{re.sub(r'[^a-z0-9-]', '', heading.lower().replace(' ', '-'))})"
        rows.append((link, f"{len(missed)} of {len(shown)}", figure, _measured(worst), _bound(worst)))
    head = ("benchmark", "missed", "farthest from its bound", "measured", "expected")
    return (
        f"{sum(not line['holds'] for line in lines)} of {len(lines)} figures miss their bound:\n\n{table(head, rows)}"
    )


def _distance(line: Row) -> float:
    """How far a figure misses its bound: the larger of the two over the smaller."""
    sign, limit = line["bound"].split()
    value = line["figure"]
    ratio = (value if isinstance(value, float) else value["median"]) / float(limit)
    return ratio if sign == "<=" else 1 / ratio


def _row(line: Row, difference: str = "") -> tuple[str, ...]:
    """A figure, its setting with what differs in its machine, its range, and whether it meets its bound."""
    words = words_of(line["claim"], line["bound"])
    setting = "; ".join(part for part in (words.setting, difference) if part)
    value = line["figure"]
    is_one = isinstance(value, float) or value["min"] == value["max"]
    spread = "" if is_one else f"{_number(value['min'])} to {_number(value['max'])}"
    verdict = "holds" if line["holds"] else "**missed**"
    return words.measure, setting, _measured(line), spread, words.better, _bound(line), verdict


def _measured(line: Row) -> str:
    """A row's number, or the median of its repeats, with its unit; enough digits to tell a miss from its bound."""
    value = line["figure"]
    number = value if isinstance(value, float) else value["median"]
    limit = float(line["bound"].split()[1])
    digits = 3
    while not line["holds"] and float(_number(number, digits).replace(",", "")) == limit:
        digits += 1
    unit = {"of sgemm": "", "MB more": "MB"}.get(line["unit"], line["unit"])
    return f"{_number(number, digits)} {unit}".strip()


def _number(number: float, digits: int = 3) -> str:
    """A number to so many digits; a great one in full."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.{digits}g}"


def _bound(line: Row) -> str:
    """The bound that a row is to meet."""
    sign, limit = line["bound"].replace(">=", "≥").replace("<=", "≤").split()
    return f"{sign} {int(limit):,}" if re.fullmatch(r"\d{4,}", limit) else f"{sign} {limit}"


def _machines(lines: list[Row]) -> str:
    """The machines of some rows."""
    return "; ".join(dict.fromkeys(_machine(line["machine"]) for line in lines))


def _machine(machine: dict[str, Any]) -> str:
    """A machine in words."""
    return f"{_threads(machine)} of one {machine['processor']} ({machine['vectors']}), torch {machine['torch']}"


def _difference(machine: dict[str, Any], usual: dict[str, Any]) -> str:
    """How a row's machine differs from that of most."""
    names = [name for name in machine if machine[name] != usual.get(name)]
    return ", ".join(_threads(machine) if name == "threads" else f"{name} {machine[name]}" for name in names)


def _threads(machine: dict[str, Any]) -> str:
    """How many threads."""
    return f"{machine['threads']} thread{'' if machine['threads'] == 1 else 's'}"
