"""`linattn audit` as the terminal shows it: how far linear attention is from a model's heads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from linattn.cli.terminal import ending, of_option, print_table
from linattn.hf import load
from linattn.methods.method import parse_method
from linattn.processes import interrupts
from linattn_lab.audit.grid import FULL_METHODS, SHORT_METHODS, AuditGrid
from linattn_lab.audit.measuring import Audit
from linattn_lab.audit.records import AUDIT, Header
from linattn_lab.commands._audit_files import measure
from linattn_lab.commands._terminal import to_resume, whole_numbers
from linattn_lab.commands.stages import stages
from linattn_lab.report import AuditSummary, write_report
from linattn_lab.report._text import counted
from linattn_lab.report.answers import answers
from linattn_lab.report.audit.advice import advise
from linattn_lab.report.audit.summary import summarise_audit
from linattn_lab.report.audit.tables import overview
from linattn_lab.texts import Text

# From this many columns on the table has room for the spreads.
_WIDE = 104
_TOKENS = 512


class Asked(NamedTuple):
    """What was asked for on the command line."""

    model: str | None  # name, folder or file; None for the packaged encoder
    text: Path | None  # a file, or None for the built-in text
    maps: list[str] | None  # written forms of methods; None for a grid
    full: bool  # whether the grid is that of all methods
    features: str | None  # widths, as they were written
    tokens: str | None  # to read, as it was written
    draws: int | None  # of random maps
    seed: int  # of all draws
    out: Path  # folder of the files
    again: bool  # whether to measure anew what was measured
    are_mixed: bool  # whether options of the audit of a KV cache were given too


def audit_heads(asked: Asked, console: Console, *, is_first: bool) -> None:
    """Measure, write audit.jsonl and the page, and print the figures."""
    records = asked.out / "audit.jsonl" if is_first else None
    begun: list[Header] = []
    left = partial(_what_is_left, begun, records, again=asked.again) if records else str
    with ending(console, left), interrupts() as pressed:
        if asked.are_mixed:
            raise ValueError(
                "--dtype, --text-kind, --passages, --method, --task, --samples, --plan-out and --calibration "
                "belong to --budget; give that too, as in --budget 256,512"
            )
        num_tokens, wanted = _number_of(asked.tokens), _grid(asked)
        with stages(console) as watch:
            # A text that cannot be read is refused before a model is loaded.
            content = Text.read(asked.text)
            watch.begin(f"Loading {asked.model or 'the packaged encoder'}")
            loaded = load(asked.model)
            # What was asked for by name is measured, whatever it keeps.
            measured = Audit(loaded, content, wanted, num_tokens=num_tokens, leave_out=not asked.maps, watch=watch)
            begun.append(measured.header)
            _tell(measured.header, num_tokens, console)
            if not (asked.full or asked.maps):
                watch.begin(f"{len(SHORT_METHODS)} of {len(FULL_METHODS)} methods are measured; --full measures all.")
            measure(measured, records, again=asked.again, watch=watch, pressed=pressed)
        if records is None:
            return
        summary, page = summarise_audit(records), write_report(asked.out)
    _print(console, summary)
    console.print(f"Written: {escape(f'{records} and {page}')}", highlight=False)


def _grid(asked: Asked) -> AuditGrid:
    """What to measure: the short grid, the methods named or the full grid, with the widths and draws asked for."""
    maps, is_full = asked.maps, asked.full
    if is_full and maps:
        raise ValueError("--full measures all methods and --map only those it names; leave one out")
    with of_option("--map"):
        methods = tuple(map(parse_method, maps or (FULL_METHODS if is_full else SHORT_METHODS)))
    features = asked.features
    if features is None:
        features = "64,256" if is_full else "256"
    widths = whole_numbers(features, "--features", "64,256")
    draws = (3 if is_full else 1) if asked.draws is None else asked.draws
    return AuditGrid(methods, widths, draws, asked.seed, are_ranked=is_full)


def _number_of(tokens: str | None) -> int:
    """Tokens to read, of which there is one number here."""
    if tokens is None:
        return _TOKENS
    numbers = whole_numbers(tokens, "--tokens", str(_TOKENS))
    if len(numbers) > 1:
        raise ValueError(f"several numbers of tokens are for --budget, got {tokens}; give one")
    return numbers[0]


def _tell(header: Header, tokens: int, console: Console) -> None:
    """What will be read and measured, where it is not what was asked for."""
    if header.num_tokens < tokens:
        console.print(f"{escape(header.text)} gives only {header.num_tokens} tokens; all of them are read.")
    if header.windowed:
        console.print(
            "Left alone, since they attend within a sliding window, in linear time already: "
            f"{counted(len(header.windowed), 'layer')}. Audited: {', '.join(map(str, header.layers))}.",
            highlight=False,
        )
    for label, reason in header.left_out.items():
        console.print(f"Left out: {label}: {reason}.", markup=False, highlight=False, soft_wrap=True)


def _print(console: Console, summary: AuditSummary) -> None:
    """The report's words and its first table."""
    for point in answers(summary, None, None)[:2]:
        console.print(f"[bold]{escape(point.heading)}[/bold] {escape(point.text)}", highlight=False)
    print_table(console, overview(summary, spreads=console.width >= _WIDE))
    advice = advise(summary)
    for point in (*advice.targets, *advice.budgets, *advice.doubts):
        console.print(f"[bold]{escape(point.heading)}.[/bold] {escape(point.text)}", highlight=False)


def _what_is_left(begun: list[Header], records: Path, *, again: bool) -> str:
    """What an interrupted run has kept; its page is written, unless that is interrupted too."""
    out = records.parent
    found = AUDIT.unfinished(records) if begun else None
    if found is None or found[0] not in begun or not found[1]:
        return f"Nothing was measured yet, and nothing in {out} is changed but by what was said above."
    kept = f"All figures so far are in {records}; {to_resume(again=again)}."
    try:
        summary, page = summarise_audit(records), write_report(out)
    except (KeyboardInterrupt, ValueError):
        return kept
    return f"{kept} {page} shows what is measured so far: {counted(len(summary.lines), 'method')}."
