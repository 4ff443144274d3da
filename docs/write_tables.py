"""Write the README's figures from report/audit.jsonl (make demo) and benchmarks/results.jsonl (make bench)."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from linattn.lab.report import summarise_audit

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


def _figure(figure: float | dict[str, float], unit: str) -> str:
    """A number, or a median with its spread, with its unit."""
    if isinstance(figure, float):
        return f"{figure:.3g} {unit}".strip()
    return f"{figure['median']:.3g} {unit} ({figure['min']:.3g} to {figure['max']:.3g})"


def main() -> None:
    """Replace what stands between the markers."""
    path = ROOT / "README.md"
    text = path.read_text()
    for name, table in (("audit", audit_table()), ("plan", plan_words()), ("benchmarks", benchmark_table())):
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            sys.exit(f"README.md has no place for the table {name!r}")
        text = pattern.sub(lambda match, table=table: match[1] + table + match[2], text)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    main()
