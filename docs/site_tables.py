"""Tables and sentences of single pages, from the same figures as those of write_tables.py, which calls this."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]

# States and caches are counted in float32.
BYTES = 4
UNIFORM = "uniform attention (mean of the values)"
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


ARROWS = "↓: lower is better, ↑: higher is better."


def time_words(line: Row) -> str:
    """The whole model's time under a method over softmax's; nothing where an audit took no times."""
    time = line.get("time")
    return "" if time is None else f"{time:.2g} ×"


def picture_words(audit: Row) -> str:
    """What stands under the picture."""
    averaging = audit["baselines"][1]["error"]
    return (
        f"*Relative output error against bytes per head in float32, {audit['model']}, {audit['tokens']} tokens of "
        f"{audit['text']}, mean over {audit['heads']} heads. Lower and farther left is better. Uniform attention has "
        f"{averaging:.2f}, exact attention 0 at {cache_bytes(audit):,} bytes. Centres: of expansions; w: an exact "
        "window. Merged keys have no map.*"
    )


def no_better_table(audit: Row) -> str:
    """Methods whose error is about that of averaging the values."""
    found = [line for line in audit["lines"] if line["ratio"] >= _NO_BETTER]
    rows = [(method_label(line), f"{line['error']:.2f}", f"{line['ratio']:.2f}") for line in found]
    return table(("method", "relative output error ↓", "÷ uniform attention's error ↓"), rows)


def encoder_table(audit: Row) -> str:
    """The README's encoder: methods beside exact and uniform attention."""
    rows = [
        (name, "–", f"{base['error']:.2f}", f"{base['cosine']:.3f}", time)
        for base, name, time in zip(audit["baselines"], ("exact attention", UNIFORM), ("1", "–"), strict=True)
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
    words = (
        f"`linattn audit --full` on {audit['model']}, {audit['tokens']} tokens of {audit['text']}, mean over "
        f"{audit['heads']} heads. Bytes: keys and values, or the state, of one head in float32. Cosine: of the "
        f"embedding with softmax's. {ARROWS}"
    )
    head = ("method", "bytes ↓", "relative output error ↓", "cosine ↑", "model's time ÷ softmax's ↓")
    return f"{words}\n\n{table(head, rows)}"


_SHOWN_METHODS = {
    ("FavorPlus", 256),
    ("merged 128", None),
    ("window 32 + merged 96", None),
}
