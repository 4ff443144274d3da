"""Tables and sentences of single pages, from the same figures as those of write_tables.py, which calls this."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def _beside_error(audit: Row, line: Row) -> str:
    """The same as the end of a sentence."""
    words = time_words(line)
    return f"; the whole model takes {words} softmax's time at {audit['tokens']:,} tokens" if words else ""


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


def honest_table(audit: Row, memory: list[tuple[str, str, str]], lines: list[Row], claims: Row) -> str:
    """The README's figures: what is gained and what is not, each beside what it has to be compared with."""
    by_claim = {line["claim"]: line for line in lines}
    averaging, cache = audit["baselines"][1]["error"], cache_bytes(audit)
    rows = [
        (
            f"error of {method_label(line)}, {BYTES * line['state_numbers']:,} bytes a head",
            f"{line['error']:.2f}",
            f"averaging the values {averaging:.2f}; exact attention 0 at {cache:,} bytes{_beside_error(audit, line)}",
        )
        for line in audit["lines"]
        if (line["method"], line["features"]) in _HONEST_METHODS
    ]
    rows += memory
    for claim, words, beside in _HONEST_CLAIMS:
        row = by_claim[claim]
        rows.append((words, measured(row), beside(row)))
    holds = sum(one["status"] == "holds" for one in claims["decisions"])
    rows.append(("claims about linear attention that hold", f"{holds}", f"of {len(claims['decisions'])} measured"))
    return table(("what", "measured", "beside"), rows)


_HONEST_METHODS = {
    ("FavorPlus", 256),
    ("Expansion(num_centres=16)", None),
    ("Expansion(num_centres=16) + window 32", None),
    ("merged 128", None),
    ("window 32 + merged 96", None),
}
# The claim of a row, what the table calls it, and what to compare it with, of the row's own fields.
_HONEST_CLAIMS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    (
        "embedding cosine after conversion, MiniLM, Expansion(num_centres=64)",
        "embedding cosine after 15 minutes of conversion",
        lambda row: f"averaging {row['uniform']:.3f}; before training {row['unconverted']:.3f}",
    ),
    *(
        (
            f"softmax's time over that of merged 128, the whole of MiniLM with {length:,} positions",
            f"times faster than softmax, the whole encoder under `merged 128`, a text of {length:,} tokens",
            lambda row: f"cosine of the embedding {row['cosine']:.3f}",
        )
        for length in (512, 2048, 4096)
    ),
    (
        "crossover with exact attention, bidirectional, 256 features",
        "length from which `FavorPlus`, 256 features, is faster than exact attention",
        lambda row: "on shorter texts exact attention is faster",
    ),
    (
        "crossover with exact attention, causal, 256 features",
        "the same, causal",
        lambda row: "on shorter texts exact attention is faster",
    ),
    (
        "time with an exact window of 32 over that without, 16 centres order 1, bidirectional, 65,536 tokens",
        "time of an expansion with an exact window over that without",
        lambda row: verdict(row),
    ),
    (
        "times faster than the same Llama with softmax, a token after 65,536 tokens",
        "times faster than softmax, a token of a linearized Llama after 65,536 tokens",
        lambda row: (
            f"{row['seconds']['softmax 256']['median'] / row['seconds']['states 256']['median']:.2f} × after 256"
        ),
    ),
    *(
        (
            f"tokens a second at 32,768 tokens over the exact cache's, {texts}",
            f"throughput over the full KV cache's, Gemma 3 270M, budget 128 tokens a layer, context 32,768, {texts}",
            lambda row: verdict(row),
        )
        for texts in ("one text", "one text in bfloat16", "4 texts at once", "8 texts at once")
    ),
    (
        "times smaller than the same Llama's cache with softmax, after 65,536 tokens",
        "times smaller than softmax's, its cache after 65,536 tokens",
        lambda row: f"{row['bytes']['softmax 256'] / row['bytes']['states 256']:.2f} × after 256",
    ),
)
