"""An audit of a bounded KV cache in words and tables."""

from __future__ import annotations

from collections.abc import Sequence

from linattn.records.texts import Table
from linattn_lab.kv_audit.intervals import Ratio
from linattn_lab.kv_audit.names import BOUNDED, FULL, NO_BUDGET, UNIFORM, WINDOW
from linattn_lab.report._text import Point, counted, number
from linattn_lab.report.memory.summary import MemoryLine, MemorySummary, Spread

_COLUMNS = (
    *("method", "unmerged", "MB", "peak MB", "KL", "median", "99 %", "largest", "÷ bounded cache", "same token"),
    *("perplexity", "tokens alike", "prefill s", "tokens/s"),
)


def lost(summary: MemorySummary) -> Point:
    """The verdict at the longest text and its smallest budget: what fewer bytes cost, and the best window beside it."""
    heading = "What does a bounded KV cache lose?"
    length, budget = summary.hardest
    lines = summary.at(length, budget)
    baselines = {line.method: line for line in summary.without_budget(length)}
    full, uniform = baselines.get(FULL), baselines.get(UNIFORM)
    if full is None or not lines:
        return Point(heading, "Nothing is bounded yet: the audit is not finished.")
    ours = next((line for line in lines if line.method == BOUNDED), lines[0])
    of_full = f" of {_needles(full):.0%}" if full.facts and ours.facts else ""
    text = (
        f"At {length:,} tokens of {summary.header.model} the {ours.method} takes {ours.num_bytes / full.num_bytes:.1%} "
        f"of the full cache's bytes, {ours.unmerged:.0%} of the tokens unmerged: {_quality(ours)}{of_full}; "
        f"prefill takes {ours.prefill_seconds.median / full.prefill_seconds.median:.2f} ×, decode "
        f"{full.tokens_per_second.median / ours.tokens_per_second.median:.2f} × as long."
    )
    window = next((line for line in lines if line.method.startswith(WINDOW) and line is not ours), None)
    if window is not None and budget != NO_BUDGET:
        text += f" In the same bytes, {window.method}: {_quality(window)}."
    if uniform is not None:
        text += f" Uniform attention: {_quality(uniform)}."
    return Point(heading, text)


def place_words(num_tokens: int, budget: int) -> str:
    """A length, and the budget where there is one.

    Example:
        >>> place_words(4096, 512), place_words(4096, 0)
        ('4,096 tokens within the bytes of 512 keys', '4,096 tokens')
    """
    return f"{num_tokens:,} tokens" + (f" within the bytes of {budget:,} keys" if budget != NO_BUDGET else "")


def glance(summary: MemorySummary, num_tokens: int, budget: int) -> Table:
    """What decides, a method a row, the least KL first: bytes, KL, needles by depth, prefill and decode."""
    baselines, within = summary.without_budget(num_tokens), summary.at(num_tokens, budget)
    depths = list(dict.fromkeys(depth for line in within for depth in line.facts))
    needles = (f"needles {_together(depths)}",) if depths else ()
    rows = tuple(
        (
            line.method,
            f"{line.num_bytes / 1e6:.2f}",
            f"{line.unmerged:.0%}",
            nats(line.kl),
            *(_together([_share(line.facts, depth) for depth in depths]) if line.facts else "–" for _ in needles),
            f"{line.prefill_seconds.median:.3g}",
            f"{line.tokens_per_second.median:.3g}",
        )
        for line in (*baselines, *within)
    )
    return Table(("method", "MB", "unmerged", "KL", *needles, "prefill s", "tokens/s"), rows, baselines=len(baselines))


def table_at(summary: MemorySummary, num_tokens: int, budget: int) -> Table:
    """A method a row, the baselines first and then the least KL."""
    baselines = summary.without_budget(num_tokens)
    within = summary.at(num_tokens, budget)
    lines = [*baselines, *within]
    # What the full cache alone has is not scored.
    depths = list(dict.fromkeys(depth for line in within for depth in line.facts))
    tasks = list(dict.fromkeys(name for line in within for name in line.tasks))
    columns = (*_COLUMNS, *(f"needles at {depth}" for depth in depths), *tasks)
    return Table(columns, tuple(_row(line, depths, tasks) for line in lines), baselines=len(baselines))


def setting_words(summary: MemorySummary) -> str:
    """What the columns of the tables say, in a few sentences."""
    header = summary.header
    last = " or ".join(dict.fromkeys(f"{min(header.num_measured, length // 2)}" for length in header.lengths))
    words = (
        f"{header.model} in {header.dtype}, layers {', '.join(map(str, header.layers))} of width {header.head_dim}, "
        f"{counted(header.num_threads, 'thread')} of {header.processor}; "
        f"{counted(header.num_passages, 'passage')} each of "
        f"{', '.join(f'{kind} ({source})' for kind, source in header.texts.items())}, read in chunks of "
        f"{header.chunk} tokens. A budget of N tokens is the bytes of N exact keys and values, per layer and key/value "
        "head, everything counted. Unmerged: share of the text's tokens that fit before any are merged or evicted. MB: "
        "bytes of the bounded layers; peak MB: with the most that one more chunk allocates. KL: divergence of the last "
        f"{last} predictions from the full cache's, in nats: mean, median, 99th percentile, largest. "
        "The full cache is read again in chunks of another length as a control. ÷ bounded cache: KL ÷ the default's, "
        "geometric mean over passages with Student's 95 % interval. Same token: how often the likeliest token is "
        f"the full cache's. Tokens alike: of {header.num_written} greedy tokens, those before the first that differs. "
        "Times: medians over passages, and their range."
    )
    read, asked = summary.num_passages
    if not summary.is_finished:
        words += f" Unfinished: the figures are of {read} of {counted(asked, 'passage')}, and tasks may be missing."
    for place, score in summary.unanswered.items():
        words += f" {place} tokens is not scored: the full cache itself has {score:.0%}."
    return words


def nats(kl: float) -> str:
    """Four decimals, or where these are next to nothing two digits."""
    return f"{kl:.4f}" if kl == 0 or kl >= 1e-3 else f"{kl:.2g}"


def ratio_words(ratio: Ratio) -> str:
    """A ratio with its interval, where it has one.

    Example:
        >>> ratio_words(Ratio(2.0, 1.5, 2.5))
        '2.00 × (1.50 to 2.50)'
    """
    return f"{ratio.mean:.2f} ×" + ("" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})")


def _row(line: MemoryLine, depths: list[str], tasks: list[str]) -> tuple[str, ...]:
    """One line's figures."""
    return (
        line.method if line.label == line.method else f"{line.method}: {line.label}",
        f"{line.unmerged:.0%}",
        f"{line.num_bytes / 1e6:.2f}",
        f"{line.peak_bytes / 1e6:.1f}",
        *map(nats, (line.kl, line.kl_median, line.kl_high, line.kl_largest)),
        "–" if line.kl_ratio is None or line.method == BOUNDED else ratio_words(line.kl_ratio),
        f"{line.same:.1%}",
        number(line.perplexity),
        f"{line.parted:.0f}",
        _spread(line.prefill_seconds),
        _spread(line.tokens_per_second),
        *(_share(line.facts, depth) for depth in depths),
        *(_share(line.tasks, name) for name in tasks),
    )


def _together(shares: Sequence[str]) -> str:
    """Several shares in one cell.

    Example:
        >>> _together(["10%", "50%", "90%"])
        '10/50/90%'
    """
    return "/".join(share.removesuffix("%") for share in shares) + "%"


def _quality(line: MemoryLine) -> str:
    """KL, and the needles that are retrieved, mean over depths."""
    needles = f", needles {_needles(line):.0%}" if line.facts else ""
    return f"KL {nats(line.kl)}{needles}"


def _needles(line: MemoryLine) -> float:
    """Retrieved facts, mean over depths."""
    return sum(line.facts.values()) / len(line.facts)


def _spread(spread: Spread) -> str:
    """A median and, of several, the range."""
    several = "" if spread.low == spread.high else f" ({spread.low:.3g} to {spread.high:.3g})"
    return f"{spread.median:.3g}{several}"


def _share(shares: dict[str, float], name: str) -> str:
    """Per cent; a dash for what is not measured."""
    return f"{shares[name]:.0%}" if name in shares else "–"
