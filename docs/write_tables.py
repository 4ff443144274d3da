"""Write the figures of README.md and docs/claims.md.

From report/audit.jsonl and report/claims.jsonl (make demo) and benchmarks/results.jsonl (make bench).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from linattn.lab.report import SOURCES, ClaimsSummary, summarise_audit, summarise_claims
from linattn.records.atomic import atomic_file

ROOT = Path(__file__).parents[1]
SHOWN = (
    ("FavorPlus", 256),
    ("Hyperbolic(lengths='fixed')", 256),
    ("EluPlusOne", None),
    ("Centred(Balanced(Sderf))", 256),
    ("Centred(Taylor(order=2))", None),
    ("Expansion(num_centres=1)", None),
    ("Expansion(num_centres=4)", None),
    ("Expansion(num_centres=16)", None),
    ("Expansion(num_centres=64)", None),
    ("Centred(Balanced(FavorPlus)) + window 16 + heavy 32", 256),
    ("Expansion(num_centres=16) + window 32", None),
    ("Expansion(num_centres=16) + window 16 + heavy 32", None),
    ("Expansion(num_centres=64) + window 32 + heavy 64", None),
)

REFUTED = (
    "elementwise-exp-is-softmax",
    "only-exp-survives-reordering",
    "polynomial-product",
    "kl-of-the-polynomial-map",
    "product-is-free-of-n",
    "query-costs-r",
    "rank-of-causal-attention",
    "figure-4-beats-averaging",
    "positive-wins-where-the-kernel-is-small",
    "theorem-4",
    "raw-qr-is-haar",
    "global-key-maximum-is-causal",
)


def audit_table() -> str:
    """Each method's error and costs beside both baselines."""
    summary = summarise_audit(ROOT / "report" / "audit.jsonl")
    header = summary.header
    rows = [
        f"`linattn audit` on {header.model}, {header.num_tokens} tokens of {header.text}, mean over "
        f"{header.num_layers * header.num_heads} heads:",
        "",
        "| method | numbers per head | FLOPs per token | relative output error | error over averaging's | cosine |",
        "|---|---|---|---|---|---|",
    ]
    for base in summary.baselines:
        averaging = summary.baselines[1].error
        name = {"exact": "*exact softmax*", "uniform": "*averaging the values*"}[base.name]
        rows.append(f"| {name} | | | {base.error:.2f} | {base.error / averaging:.2f} | {base.embedding_cosine:.3f} |")
    for name, features in SHOWN:
        line = next(x for x in summary.lines if x.map == name and features in (None, x.features))
        width = f", {features} features" if features else ""
        rows.append(
            f"| `{line.map}`{width} | {line.state_numbers:,} | {line.flops_per_token:,} | {line.error.mean:.2f} | "
            f"{line.ratio:.2f} | {line.embedding_cosine.mean:.3f} |"
        )
    return "\n".join(rows)


def plan_words() -> str:
    """What a plan for each head reaches."""
    planned = summarise_audit(ROOT / "report" / "audit.jsonl").planned
    if planned is None:
        sys.exit("report/audit.jsonl holds no plan; write it with `linattn audit --target 0.1 --out report`")
    return f"For a target of {planned.target}: {planned.words()}"


def benchmark_table() -> str:
    """Every claim with its figure, its bound, and whether it holds on the machine the results are of."""
    lines = [json.loads(text) for text in (ROOT / "benchmarks" / "results.jsonl").read_text().splitlines()]
    machine = lines[0]["machine"]
    rows = [
        f"{machine['threads']} threads of one {machine['processor']} ({machine['vectors']}), torch {machine['torch']}; "
        "medians, with the spread of interleaved repeats; 8 heads, D = 64, 256 features and float32 unless said:",
        "",
        "| | measured | wanted | |",
        "|---|---|---|---|",
    ]
    for row in lines:
        verdict = "holds" if row["holds"] else "**missed**"
        bound = row["bound"].replace(">=", "≥").replace("<=", "≤")
        rows.append(f"| {row['claim']} | {_figure(row['figure'], row['unit'])} | {bound} | {verdict} |")
    return "\n".join(rows)


def conversion_table() -> str:
    """What fifteen minutes of conversion make of an encoder, beside its state before and both baselines."""
    lines = [json.loads(text) for text in (ROOT / "benchmarks" / "results.jsonl").read_text().splitlines()]
    found = [row for row in lines if "calibrated" in row]
    if not found:
        sys.exit("benchmarks/results.jsonl holds no conversion; run benchmarks/conversion_repairs_a_real_encoder.py")
    rows = [
        f"On {found[0]['texts']} held-out texts, {found[0]['tokens']:,} tokens, in {found[0]['minutes']:.0f} minutes "
        "each; exact attention is 1. As drawn, an expansion takes its centres from each text; calibrated, they are "
        "fixed:",
        "",
        "| | averaging | the map as drawn | calibrated | distilled |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        figures = (row["uniform"], row["unconverted"], row["calibrated"], row["figure"])
        rows.append(f"| {row['claim']} | {' | '.join(f'{figure:.3f}' for figure in figures)} |")
    return "\n".join(rows)


def claims_words(summary: ClaimsSummary) -> str:
    """How many claims there are and how they fare, and those of the founding texts and the paper that fail."""
    counts = {status: summary.count(status) for status in ("holds", "fails", "undecided")}
    rows = [
        f"Of {len(summary.claims)} claims {counts['holds']} hold and {counts['fails']} fail, {counts['undecided']} are "
        f"undecided; all of them, with their figures, are in [docs/claims.md](docs/claims.md). {SOURCES} Among those "
        "that fail:",
        "",
        "| claim | source | what was measured |",
        "|---|---|---|",
    ]
    refuted = (claim.decision for claim in summary.claims if claim.name in REFUTED)
    rows += [_row(one.sentence, one.source, one.figure) for one in refuted]
    return "\n".join(rows)


def claims_page(summary: ClaimsSummary) -> str:
    """Every claim with its verdict, and the command that measures it again."""
    header = summary.header
    rows = [
        "# What is said of linear attention, and what holds",
        "",
        f"Written by `make readme` from a run of `linattn reproduce --{header.setting}`; {header.processor}, "
        f"{header.threads} threads, torch {header.versions['torch']}. Every claim is one file in "
        "`src/linattn/lab/experiments/`, with its setting, its figures and how they decide; `linattn reproduce NAME "
        "--again` takes them again.",
        "",
        SOURCES,
        "",
        "| claim | verdict | the figure that decides | source | name |",
        "|---|---|---|---|---|",
    ]
    decisions = (claim.decision for claim in summary.claims)
    rows += [_row(one.sentence, f"**{one.status}**", one.figure, one.source, f"`{one.claim}`") for one in decisions]
    return "\n".join(rows) + "\n"


def _row(*cells: str) -> str:
    """One row of a table."""
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _figure(figure: float | dict[str, float], unit: str) -> str:
    """A number, or a median with its spread, with its unit."""
    if isinstance(figure, float):
        return f"{figure:.3g} {unit}".strip()
    return f"{figure['median']:.3g} {unit} ({figure['min']:.3g} to {figure['max']:.3g})"


def main() -> None:
    """Replace what stands between the README's markers, and the page of claims."""
    path = ROOT / "README.md"
    text = path.read_text()
    claims = summarise_claims(ROOT / "report" / "claims.jsonl")
    tables = {
        "audit": audit_table(),
        "plan": plan_words(),
        "conversions": conversion_table(),
        "claims": claims_words(claims),
        "benchmarks": benchmark_table(),
    }
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            sys.exit(f"README.md has no place for the table {name!r}")
        text = pattern.sub(lambda match, table=table: match[1] + table + "\n" + match[2], text)
    for file, content in ((path, text), (ROOT / "docs" / "claims.md", claims_page(claims))):
        with atomic_file(file) as written:
            written.write(content)


if __name__ == "__main__":
    main()
