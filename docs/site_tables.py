"""Tables and sentences of single pages, from the same figures as those of write_tables.py, which calls this."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]

# States and caches are counted in float32.
BYTES = 4
# An error of at least so much of averaging's is no better than averaging: draws and texts differ by that.
_NO_BETTER = 0.9


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def method_label(line: Row) -> str:
    """A method, with its number of features where that is free."""
    return f"`{line['method']}`" + (f", {line['features']} features" if line["features"] else "")


def cache_bytes(audit: Row) -> int:
    """Bytes per head of exact attention's keys and values at the audit's length."""
    numbers: int = audit["tokens"] * (audit["head_dim"] + audit["value_dim"])
    return BYTES * numbers


def time_words(line: Row) -> str:
    """The whole model's time under a method over softmax's; nothing where an audit took no times."""
    time = line.get("time")
    return "" if time is None else f"{time:.2g} ×"


def picture_words(audit: Row) -> str:
    """What stands under the picture."""
    averaging = audit["baselines"][1]["error"]
    return (
        f"*Relative output error against bytes per head in float32, {audit['model']}, {audit['tokens']} tokens of "
        f"{audit['text']}, mean over {audit['heads']} heads. Averaging the values has {averaging:.2f}, exact attention "
        f"0 at {cache_bytes(audit):,} bytes. Centres are those of expansions; w is an exact window; merged keys "
        "have no map.*"
    )


def figure(row: Row) -> float:
    """A row's number, or the median of its repeats."""
    found: float = row["figure"] if isinstance(row["figure"], float) else row["figure"]["median"]
    return found


def measured(row: Row) -> str:
    """A row's number with its unit, for people."""
    number = figure(row)
    text = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{text} {row['unit']}".strip()


def machine_words(lines: list[Row]) -> str:
    """The machines of some rows."""
    kinds = dict.fromkeys(
        f"{at['threads']} thread{'' if at['threads'] == 1 else 's'} of one {at['processor']} ({at['vectors']}), torch "
        f"{at['torch']}"
        for at in (line["machine"] for line in lines)
    )
    return "; ".join(kinds)


def claims_table(lines: list[Row], benchmark: str) -> str:
    """The rows of one benchmark, and their machine."""
    found = [line for line in lines if line["benchmark"] == benchmark]
    rows = [(line["claim"], measured(line), verdict(line)) for line in found]
    return f"{table(('claim', 'measured', 'verdict'), rows)}\n\n{machine_words(found)}."


def crossover_table(lines: list[Row]) -> str:
    """From which length linear attention is faster than exact attention, and on which machine."""
    found = [line for line in lines if line["benchmark"] == "crossover_with_sdpa"]
    rows = [(*line["claim"].split(", ")[1:], measured(line)) for line in found]
    return f"{table(('direction', 'random features', 'faster from'), rows)}\n\n{machine_words(found)}."


def verdict(line: Row) -> str:
    """Whether a figure meets its mark."""
    bound = line["bound"].replace(">=", "≥").replace("<=", "≤")
    return f"wanted {bound}: {'holds' if line['holds'] else '**missed**'}"


def misses_table(lines: list[Row]) -> str:
    """Every figure that misses its mark."""
    found = [line for line in lines if not line["holds"]]
    rows = [(line["claim"], measured(line), line["bound"].replace(">=", "≥").replace("<=", "≤")) for line in found]
    return f"{len(found)} of {len(lines)}:\n\n{table(('claim', 'measured', 'wanted'), rows)}"


def no_better_table(audit: Row) -> str:
    """Methods whose error is about that of averaging the values."""
    found = [line for line in audit["lines"] if line["ratio"] >= _NO_BETTER]
    rows = [(method_label(line), f"{line['error']:.2f}", f"{line['ratio']:.2f}") for line in found]
    return table(("method", "relative output error", "over averaging's"), rows)


def encoder_table(audit: Row) -> str:
    """The README's encoder: methods beside exact attention and averaging the values."""
    rows = [
        (name, "–", f"{base['error']:.2f}", f"{base['cosine']:.3f}", time)
        for base, name, time in zip(
            audit["baselines"], ("exact attention", "averaging the values"), ("1", "–"), strict=True
        )
    ]
    rows[0] = (rows[0][0], f"{cache_bytes(audit):,}", *rows[0][2:])
    rows += [
        (
            method_label(line),
            f"{BYTES * line['state_numbers']:,}",
            f"{line['error']:.2f}",
            f"{line['cosine']:.3f}",
            time_words(line).removesuffix(" ×") or "–",
        )
        for line in audit["lines"]
        if (line["method"], line["features"]) in _SHOWN_METHODS
    ]
    words = f"{audit['model']}, {audit['tokens']} tokens of {audit['text']}, mean over {audit['heads']} heads."
    head = ("method", "bytes a head", "relative output error", "embedding cosine", "model's time ÷ softmax's")
    return f"{words}\n\n{table(head, rows)}"


_SHOWN_METHODS = {
    ("FavorPlus", 256),
    ("merged 128", None),
    ("window 32 + merged 96", None),
}
