"""The tables of an audit, the same in the terminal and on the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from linattn.records.texts import Table
from linattn_lab.crossover import Crossover
from linattn_lab.report._text import number
from linattn_lab.report.audit.summary import AuditSummary, MeanAndSpread, over

_BASELINES = ("softmax, exact", "uniform attention")


def overview(summary: AuditSummary, *, spreads: bool = True) -> Table:
    """One row per method and width, baselines first: the heads' errors beside the whole model's cosine."""
    uniform = summary.baselines[1]
    show = with_spread if spreads else _mean_alone
    of_softmax = {"time / softmax": "1.00", "numbers kept": f"{summary.exact_numbers:,}"}
    baselines = [
        {
            "method": name,
            "error": number(row.error),
            "error / uniform": number(over(row.error, uniform.error)),
            "heads better": better,
            "cosine": number(row.embedding_cosine, 3),
            **costs,
        }
        for row, name, better, costs in zip(
            summary.baselines, _BASELINES, ("100%", "0%"), (of_softmax, {}), strict=True
        )
    ]
    lines = [
        {
            "method": line.words,
            "error": show(line.error),
            "error / uniform": number(line.ratio),
            "heads better": f"{line.better_heads:.0%}",
            "cosine": show(line.embedding_cosine, 3),
            "time / softmax": _optional(line.time_ratio),
            "faster from": _pays_from(line.crossover),
            "numbers kept": f"{line.state_numbers:,}",
        }
        for line in summary.lines
    ]
    return _table(baselines, lines)


def end_to_end(summary: AuditSummary) -> Table:
    """The whole model with every layer replaced: cosines to the exact model, baselines first."""
    baselines = [
        {
            "every layer by": name,
            "time / softmax": "1.00" if name == _BASELINES[0] else "",
            "cosine of the embedding": number(row.embedding_cosine, 3),
            "cosine per token": number(row.token_cosine, 3),
        }
        for row, name in zip(summary.baselines, _BASELINES, strict=True)
    ]
    lines = [
        {
            "every layer by": line.words,
            "draws": str(line.draws),
            "time / softmax": _optional(line.time_ratio),
            "cosine of the embedding": with_spread(line.embedding_cosine, 3),
            "cosine per token": with_spread(line.token_cosine, 3),
        }
        for line in summary.lines
    ]
    return _table(baselines, lines)


def heads(summary: AuditSummary) -> Table:
    """The heads' errors in full: median, divergence and what the norms predict beside the means."""
    uniform = summary.baselines[1]
    baselines = [
        {
            "method": name,
            "error": number(row.error),
            "error / uniform": number(over(row.error, uniform.error)),
            "total variation": number(row.total_variation),
            "KL (nats)": _optional(row.kl),
        }
        for row, name in zip(summary.baselines, _BASELINES, strict=True)
    ]
    lines = [
        {
            "method": line.words,
            "numbers kept": f"{line.state_numbers:,}",
            "FLOPs per token": f"{line.flops_per_token:,}",
            "error": with_spread(line.error),
            "median error": number(line.median_error),
            "error / uniform": number(line.ratio),
            "predicted": _optional(line.predicted_ratio),
            "heads better": f"{line.better_heads:.0%}",
            "total variation": with_spread(line.total_variation),
            "KL (nats)": _optional(line.kl),
            "verdict": line.verdict,
        }
        for line in summary.lines
    ]
    return _table(baselines, lines)


def head_cells(summary: AuditSummary) -> dict[str, list[list[float | None]]]:
    """Error over uniform attention's of [layer][head] for every method, by its words; None where not finite."""
    return {
        line.words: [
            [round(ratio, 4) if math.isfinite(ratio) else None for ratio in layer] for layer in line.head_ratios
        ]
        for line in summary.lines
    }


def with_spread(figure: MeanAndSpread, digits: int = 2) -> str:
    """Mean ± standard deviation over draws, where there were several."""
    mean = number(figure.mean, digits)
    return mean if figure.spread is None else f"{mean} ± {number(figure.spread, digits)}"


def _table(baselines: Sequence[Mapping[str, str]], lines: Sequence[Mapping[str, str]]) -> Table:
    """Baselines, then lines, their cells by column; of baselines what has no meaning is left empty."""
    columns = tuple(dict.fromkeys(name for row in (*lines, *baselines) for name in row))
    rows = tuple(tuple(row.get(name, "") for name in columns) for row in (*baselines, *lines))
    return Table(columns, rows, len(baselines))


def _pays_from(crossover: Crossover | None) -> str:
    """The lengths between which attention alone becomes faster than softmax."""
    if crossover is None:
        return "–"
    if crossover.between is None:
        return "here" if crossover.always else f"> {crossover.last:,}"
    return "{:,}–{:,}".format(*crossover.between)


def _mean_alone(figure: MeanAndSpread, digits: int = 2) -> str:
    """The mean without its spread."""
    return number(figure.mean, digits)


def _optional(value: float | None) -> str:
    """A number, or a dash where there is none."""
    return "–" if value is None else number(value)
