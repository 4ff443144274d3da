"""The tables of an audit, the same in the terminal and on the page."""

from __future__ import annotations

import math

from linattn.methods.costs import exact_state_numbers
from linattn.records.tables import Table
from linattn_lab.crossover import Crossover
from linattn_lab.report._text import number
from linattn_lab.report.audit.summary import AuditSummary, MeanAndSpread

_BASELINES = ("softmax, exact", "averaging the values")


def overview(summary: AuditSummary, *, spreads: bool = True) -> Table:
    """One row per method and width, baselines first: the heads' errors beside the whole model's cosine."""
    uniform = summary.baselines[1]
    show = with_spread if spreads else _mean_alone
    header = summary.header
    exact = exact_state_numbers(header.num_tokens, head_dim=header.head_dim, value_dim=header.value_dim)
    baselines = [
        (
            name,
            number(row.error),
            number(row.error / uniform.error),
            better,
            number(row.embedding_cosine, 3),
            *costs,
        )
        for row, name, better, costs in zip(
            summary.baselines, _BASELINES, ("100%", "0%"), (("1.00", "", f"{exact:,}"), ("", "", "")), strict=True
        )
    ]
    lines = [
        (
            line.words,
            show(line.error),
            number(line.ratio),
            f"{line.better_heads:.0%}",
            show(line.embedding_cosine, 3),
            _optional(line.time_ratio),
            _pays_from(line.crossover),
            f"{line.state_numbers:,}",
        )
        for line in summary.lines
    ]
    figures = ("error", "error / averaging", "heads better", "cosine", "time / softmax", "faster from", "numbers kept")
    return Table(("method", *figures), (*baselines, *lines), len(baselines))


def end_to_end(summary: AuditSummary) -> Table:
    """The whole model with every layer replaced: cosines to the exact model, baselines first."""
    baselines = [
        (
            name,
            "",
            "1.00" if name == _BASELINES[0] else "",
            number(row.embedding_cosine, 3),
            number(row.token_cosine, 3),
        )
        for row, name in zip(summary.baselines, _BASELINES, strict=True)
    ]
    lines = [
        (
            line.words,
            str(line.draws),
            _optional(line.time_ratio),
            with_spread(line.embedding_cosine, 3),
            with_spread(line.token_cosine, 3),
        )
        for line in summary.lines
    ]
    columns = ("every layer by", "draws", "time / softmax", "cosine of the embedding", "cosine per token")
    return Table(columns, (*baselines, *lines), len(baselines))


def heads(summary: AuditSummary) -> Table:
    """The heads' errors in full: median, divergence and what the norms predict beside the means."""
    uniform = summary.baselines[1]
    baselines = [
        (
            name,
            "",
            "",
            number(row.error),
            "",
            number(row.error / uniform.error),
            "",
            "",
            number(row.total_variation),
            _optional(row.kl),
            "",
        )
        for row, name in zip(summary.baselines, _BASELINES, strict=True)
    ]
    lines = [
        (
            line.words,
            f"{line.state_numbers:,}",
            f"{line.flops_per_token:,}",
            with_spread(line.error),
            number(line.median_error),
            number(line.ratio),
            _optional(line.predicted_ratio),
            f"{line.better_heads:.0%}",
            with_spread(line.total_variation),
            _optional(line.kl),
            line.verdict,
        )
        for line in summary.lines
    ]
    measures = (
        "error",
        "median error",
        "error / averaging",
        "predicted",
        "heads better",
        "total variation",
        "KL (nats)",
    )
    return Table(
        ("method", "numbers kept", "FLOPs per token", *measures, "verdict"),
        (*baselines, *lines),
        len(baselines),
    )


def head_cells(summary: AuditSummary) -> dict[str, list[list[float | None]]]:
    """Error over averaging's of [layer][head] for every method, by its words; None where not finite."""
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
