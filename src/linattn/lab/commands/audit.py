"""The command `linattn audit` as the terminal shows it."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from linattn.hf import LoadedModel, load
from linattn.lab.audit.grid import AuditGrid, default_methods
from linattn.lab.audit.measuring import Audit
from linattn.lab.audit.planned import Planner, second_half
from linattn.lab.audit.records import AUDIT, Header
from linattn.lab.audit.text import Text, read_text
from linattn.lab.commands import _audit_options as options
from linattn.lab.commands._audit_files import Files, measure
from linattn.lab.commands.memory_audit import Asked, audit_memory
from linattn.lab.commands.same_options import check_same_options
from linattn.lab.commands.stages import stages
from linattn.lab.commands.terminal import console_of, ending, interrupts, of_option, print_table, whole_numbers
from linattn.lab.report import AuditSummary, Point, advise, overview, summarise_audit, write_report
from linattn.planning.methods import parse_method
from linattn.processes import launched

# From this many columns on the table has room for the spreads.
_WIDE = 104
_TOKENS = 512


def audit(
    call: typer.Context,
    model: options.Model = None,
    text: options.TextFile = None,
    maps: options.Maps = None,
    features: options.Features = "64,256",
    tokens: options.Tokens = None,
    draws: options.Draws = 3,
    seed: options.Seed = 0,
    out: options.Out = Path("report"),
    target: options.Target = None,
    even_if_slower: options.EvenIfSlower = False,
    again: options.Again = False,
    plan_out: options.PlanOut = None,
    calibration: options.Calibration = None,
    budget: options.Budget = None,
    passages: options.Passages = 1,
    contenders: options.Contenders = None,
) -> None:
    """Measure how wrong linear attention is on a model: every layer, head and method, and the whole model.

    Everything is measured next to exact attention and to averaging the values uniformly. Figures are kept as they are
    taken: after an interruption the same command goes on. Another audit's file is kept aside. Under torchrun layers and
    methods are dealt out to the processes; any number of them goes on.
    """
    with launched() as processes:
        console = console_of(processes)
        with ending("audit", console, str):
            check_same_options(processes, call)
        if budget is not None:
            asked = Asked(model, text, budget, tokens, passages, contenders, out, again, plan_out, calibration)
            others = {"--map": maps, "--target": target, "--even-if-slower": even_if_slower or None}
            audit_memory(asked, others, console, is_first=processes.is_first)
            return
        tokens = _TOKENS if tokens is None else tokens
        files = Files(out / "audit.jsonl", plan_out or out / "plan.json") if processes.is_first else None
        begun: list[Header] = []
        with ending("audit", console, lambda: _what_is_left(begun, out) if files else ""), interrupts() as pressed:
            if passages != 1 or contenders:
                raise ValueError("--passages and --contender belong to --budget; give that too, as in --budget 256,512")
            if target is None and (plan_out or calibration or even_if_slower):
                raise ValueError(
                    "--plan-out, --calibration and --even-if-slower belong to a plan; give --target too, as in "
                    "--target 0.1"
                )
            with of_option("--map"):
                methods = tuple(map(parse_method, maps)) if maps else default_methods()
            wanted = AuditGrid(methods, whole_numbers(features, "--features", "64,256"), draws, seed)
            with stages(console) as watch:
                watch.begin(f"Loading {model or 'the packaged encoder'}")
                loaded, content = load(model), read_text(text)
                asked_plan = None if target is None else (target, even_if_slower)
                planner = None if asked_plan is None else _planner(loaded, content, calibration, tokens, asked_plan)
                # What was asked for by name is measured, whatever it keeps.
                measured = Audit(
                    loaded, content, wanted, num_tokens=tokens, planned=planner, leave_out=not maps, watch=watch
                )
                begun.append(measured.header)
                _tell(measured.header, tokens, console)
                measure(measured, planner, files, again=again, watch=watch, pressed=pressed)
            if files is None:
                return
            summary, page = summarise_audit(files.records), write_report(out)
    _print(console, summary)
    written = [files.records, page] if planner is None else [files.records, files.plans, page]
    console.print(f"Written: {escape(' and '.join(map(str, written)))}", highlight=False)


def _planner(
    loaded: LoadedModel, text: Text, calibration: Path | None, tokens: int, wanted: tuple[float, bool]
) -> Planner:
    """Plans to be made on a text of which no token will be measured, for an error, and whether even if slower."""
    other = second_half(loaded, text, tokens) if calibration is None else read_text(calibration)
    return Planner(loaded, other, target_error=wanted[0], num_tokens=tokens, even_if_slower=wanted[1])


def _tell(header: Header, tokens: int, console: Console) -> None:
    """What will be read and measured, where it is not what was asked for."""
    if header.num_tokens < tokens:
        console.print(f"{escape(header.text)} gives only {header.num_tokens} tokens; all of them are read.")
    if header.windowed:
        numbers = ", ".join(map(str, header.layers))
        console.print(
            f"{len(header.windowed)} layers attend within a sliding window, in linear time as they are, and are left "
            f"alone; audited: layers {numbers}.",
            highlight=False,
        )
    for label, reason in header.left_out.items():
        text = f"Left out: {label}: {reason}. --map measures it all the same."
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _print(console: Console, summary: AuditSummary) -> None:
    """The report's words and its first table."""
    print_table(console, overview(summary, spreads=console.width >= _WIDE))
    advice = advise(summary)
    points = [*advice.targets, *advice.budgets, *advice.doubts]
    if summary.planned is not None:
        print_table(console, summary.planned.table())
        heading = f"A method for each head, for an error of {summary.planned.target}"
        points.insert(0, Point(heading, summary.planned.words()))
    for point in points:
        console.print(f"[bold]{escape(point.heading)}.[/bold] {escape(point.text)}", highlight=False)


def _what_is_left(begun: list[Header], out: Path) -> str:
    """What an interrupted run has kept; its page is written, unless that is interrupted too."""
    records = out / "audit.jsonl"
    found = AUDIT.unfinished(records) if begun else None
    if found is None or found[0] not in begun or not found[1]:
        return f"Nothing was measured yet, and nothing in {out} is changed but by what was said above."
    kept = f"All figures so far are in {records}; the same command goes on from there."
    try:
        summary, page = summarise_audit(records), write_report(out)
    except (KeyboardInterrupt, ValueError):
        return kept
    return f"{kept} {page} shows the {len(summary.lines)} methods and widths that are measured."
