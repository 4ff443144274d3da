"""Write the figures of README.md and of the site: tables between markers, docs/claims.md, docs/cli.md,
docs/report_json.md, docs/explorer_frame.html and drawings.

    python docs/write_tables.py [--take REPORT | --take-memory REPORT …]

A line <!-- NAME --> and one <!-- end --> in README.md or any page of docs/ enclose the table of that name.

From docs/figures.json, docs/explorer.json, benchmarks/results.jsonl (make bench) and benchmarks/language_models.jsonl
(benchmarks/language_models_at_equal_time.py). --take first takes docs/figures.json and docs/explorer.json from
audit.jsonl and claims.jsonl of a folder (`make readme` measures them), which are too large to be kept. --take-memory
takes docs/memory.json from memory.jsonl of folders, of `linattn audit MODEL --budget …`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmark_tables import benchmark_table, claims_table, crossover_table, misses_table
from benchmark_words import words_of
from claims_tables import claims_page, claims_words
from draw_figures import drawings, is_redrawn, kl_words
from explorer_figures import explorer_frame, take_explorer
from linattn.records.files import atomic_file
from linattn_lab.report.audit.summary import summarise_audit
from linattn_lab.report.claims.summary import summarise_claims
from memory_tables import MEMORY, memory_table, readme_table, room_table, take_memory
from models_table import models_table
from ranks_tables import ranks_bytes, ranks_scale, ranks_simulation
from site_tables import ARROWS, UNIFORM, encoder_table, no_better_table, picture_words, time_words
from write_cli import cli_page
from write_schema import schema_page

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures.json"
RESULTS = ROOT / "benchmarks" / "results.jsonl"
LANGUAGE_MODELS = ROOT / "benchmarks" / "language_models.jsonl"
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
    ("Expansion(num_centres=16) + window 32", None),
    ("merged 64", None),
    ("merged 128", None),
    ("window 32 + merged 32", None),
    ("window 32 + merged 96", None),
    ("window 32 + merged 128", None),
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


def take_figures(report: Path) -> dict[str, Any]:
    """What the tables show of an audit and of a run of reproduce."""
    summary, run = summarise_audit(report / "audit.jsonl"), summarise_claims(report / "claims.jsonl")
    header = summary.header
    lines = []
    for name, features in SHOWN:
        line = next((x for x in summary.lines if x.map == name and features in (None, x.features)), None)
        if line is None:
            sys.exit(f"{report}/audit.jsonl has no {name} with {features or 'its own'} features; run the audit again")
        lines.append(
            {
                "method": line.map,
                "features": features,
                "state_numbers": line.state_numbers,
                "flops_per_token": line.flops_per_token,
                "error": line.error.mean,
                "ratio": line.ratio,
                "cosine": line.embedding_cosine.mean,
                "time": line.time_ratio,
            }
        )
    return {
        "audit": {
            "model": header.model,
            "tokens": header.num_tokens,
            "text": header.text,
            "heads": header.num_layers * header.num_heads,
            "head_dim": header.head_dim,
            "value_dim": header.value_dim,
            "compiled": header.versions["linattn-compiled"],
            "baselines": [
                {"name": base.name, "error": base.error, "cosine": base.embedding_cosine} for base in summary.baselines
            ],
            "lines": lines,
        },
        "claims": {
            "setting": run.header.setting,
            "processor": run.header.processor,
            "threads": run.header.threads,
            "torch": run.header.versions["torch"],
            "decisions": [
                {
                    "name": claim.name,
                    "status": claim.status,
                    "sentence": claim.decision.sentence,
                    "source": claim.decision.source,
                    "figure": claim.decision.figure,
                }
                for claim in run.claims
            ],
        },
    }


def audit_table(audit: dict[str, Any]) -> str:
    """Each method's error and costs beside both baselines."""
    rows = [
        f"`linattn audit --full` on {audit['model']}, {audit['tokens']} tokens of {audit['text']}, mean over "
        f"{audit['heads']} heads, linattn-compiled {audit['compiled']}. Numbers: in the state of one head. FLOPs: of "
        f"one head, per token. Cosine: of the model's embedding with softmax's. {ARROWS}",
        "",
        "| method | numbers ↓ | FLOPs ↓ | model's time ÷ softmax's ↓ | relative output error ↓ | ÷ uniform attention's "
        "error ↓ | cosine ↑ |",
        "|---|---|---|---|---|---|---|",
    ]
    averaging = audit["baselines"][1]["error"]
    for base in audit["baselines"]:
        name = {"exact": "*exact softmax*", "uniform": f"*{UNIFORM}*"}[base["name"]]
        time = "1" if base["name"] == "exact" else ""
        figures = f"{base['error']:.2f} | {base['error'] / averaging:.2f} | {base['cosine']:.3f}"
        rows.append(f"| {name} | | | {time} | {figures} |")
    for line in audit["lines"]:
        width = f", {line['features']} features" if line["features"] else ""
        rows.append(
            f"| `{line['method']}`{width} | {line['state_numbers']:,} | {line['flops_per_token']:,} | "
            f"{time_words(line)} | {line['error']:.2f} | {line['ratio']:.2f} | {line['cosine']:.3f} |"
        )
    return "\n".join(rows)


def conversion_table(lines: list[dict[str, Any]]) -> str:
    """What fifteen minutes of conversion make of an encoder, beside its state before and both baselines."""
    found = [row for row in lines if "calibrated" in row]
    if not found:
        sys.exit("benchmarks/results.jsonl holds no conversion; run benchmarks/conversion_repairs_a_real_encoder.py")
    rows = [
        f"{found[0]['minutes']:.0f} minutes each, measured on {found[0]['texts']} held-out texts of "
        f"{found[0]['tokens']:,} tokens in all; exact attention has 1, and higher is better. "
        "As drawn: nothing is fitted. Calibrated: the map is fitted to texts. Distilled: the model is trained too. "
        "Before calibration an expansion takes its centres from each text; afterwards they are fixed.",
        "",
        "| figure, map | uniform attention | as drawn | calibrated | distilled |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        figures = (row["uniform"], row["unconverted"], row["calibrated"], row["figure"])
        words = words_of(row["claim"], row["bound"])
        rows.append(f"| {words.measure}, {words.setting} | {' | '.join(f'{figure:.3f}' for figure in figures)} |")
    return "\n".join(rows)


def language_model_table(lines: list[dict[str, Any]]) -> str:
    """How fast models train, and the bits per byte of those trained for the same time, beside both baselines."""
    rates = {(row["rate of"], row["context"]): row["tokens per second"] for row in lines if "rate of" in row}
    runs = [row for row in lines if "run of" in row]
    contexts, names = sorted({context for _, context in rates}), dict.fromkeys(name for name, _ in rates)
    machine = lines[0]["machine"]
    rows = [
        "Four blocks of width 128, about a million parameters, on Python's own sources. Bytes/s: what training reads "
        f"on {machine['threads']} idle cores of one {machine['processor']}, torch {machine['torch']}, by context "
        f"length in bytes.{_bits_in_words(runs, contexts[0])}",
        "",
        f"| attention | {' | '.join(f'bytes/s at {context:,} ↑' for context in contexts)} |"
        f"{' bits per byte ↓ |' if runs else ''}",
        f"|---|{'---|' * len(contexts)}{'---|' if runs else ''}",
    ]
    if runs:
        rows += [
            f"| *guessing among 256* |{' |' * len(contexts)} 8.000 |",
            f"| *frequencies of bytes* |{' |' * len(contexts)} {runs[0]['frequencies']:.3f} |",
        ]
    for name in names:
        speeds = " | ".join(f"{rates[name, context]:,.0f}" for context in contexts)
        bits = [row["bits per byte"] for row in runs if row["run of"] == name]
        rows.append(f"| {name} | {speeds} |{f' {_mean(bits)} |' if runs else ''}")
    return "\n".join(rows)


def _bits_in_words(runs: list[dict[str, Any]], context: int) -> str:
    """What the last column is, where there is one."""
    if not runs:
        return ""
    seeds = ", ".join(map(str, sorted({row["seed"] for row in runs})))
    return (
        f" Bits per byte: on files that were not trained on, after fifteen minutes' worth of steps of {context:,} "
        f"bytes at that speed; mean (least to most) of seeds {seeds}. {ARROWS}"
    )


def _mean(values: list[float]) -> str:
    """A mean with its spread; nothing of nothing."""
    if not values:
        return ""
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.3f}{spread}"


def tables() -> dict[str, str]:
    """What stands between the markers, by their names."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    audit, claims = figures["audit"], figures["claims"]
    lines, trained = (
        [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        for file in (RESULTS, LANGUAGE_MODELS)
    )
    return {
        "audit": audit_table(audit),
        "conversions": conversion_table(lines),
        "language_models": language_model_table(trained),
        "claims": claims_words(claims, REFUTED),
        "benchmarks": benchmark_table(lines),
        "picture": picture_words(audit),
        "kl_picture": kl_words(),
        "bounded": readme_table(),
        "room": room_table(),
        "encoder": encoder_table(audit),
        "crossover": crossover_table(lines),
        "generation": claims_table(lines, "generation_costs_the_same_at_any_length"),
        "decode": claims_table(lines, "generation_in_a_bounded_memory"),
        "encoder_speed": claims_table(lines, "merged_keys_speed_up_a_long_encoder"),
        "error_over_length": claims_table(lines, "error_over_length"),
        "ranks_bytes": ranks_bytes(lines),
        "ranks_scale": ranks_scale(lines),
        "ranks_simulation": ranks_simulation(lines),
        "misses": misses_table(lines),
        "memory": memory_table(MEMORY),
        "models": models_table(),
        "no_better_than_averaging": no_better_table(audit),
    }


def pages() -> list[Path]:
    """README.md and the pages of the site."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written() -> dict[Path, str]:
    """The files as they should be."""
    found, placed, contents = {}, set(), tables()
    pattern = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

    def fill(match: re.Match[str]) -> str:
        """A marker with its table."""
        if match[2] not in contents:
            sys.exit(f"there is no table {match[2]!r}; there are {', '.join(contents)}")
        placed.add(match[2])
        return f"{match[1]}\n{contents[match[2]]}\n\n{match[3]}"

    for page in pages():
        text = page.read_text(encoding="utf-8")
        if pattern.search(text):
            found[page] = pattern.sub(fill, text)
    if missing := contents.keys() - placed:
        sys.exit(f"no page has a place for {', '.join(sorted(missing))}; write <!-- NAME --> and <!-- end --> into one")
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    docs = ROOT / "docs"
    return {
        **found,
        docs / "claims.md": claims_page(figures["claims"]),
        docs / "cli.md": cli_page(),
        docs / "report_json.md": schema_page(),
        docs / "explorer_frame.html": explorer_frame(),
        **{docs / "images" / name: text for name, text in drawings(figures["audit"]).items()},
    }


def changed(contents: dict[Path, str]) -> dict[Path, str]:
    """Those of the files that do not have their contents yet."""
    return {path: content for path, content in contents.items() if not _is_up_to_date(path, content)}


def _is_up_to_date(path: Path, content: str) -> bool:
    """Whether a file has this content, a picture but for rounding."""
    if not path.exists():
        return False
    before = path.read_text(encoding="utf-8")
    return not is_redrawn(before, content) if path.suffix == ".svg" else before == content


def main() -> None:
    """Take figures where they are asked for, and write everything that is made of them."""
    match sys.argv[1:]:
        case []:
            pass
        case ["--take", report]:
            figures = take_figures(Path(report))
            take_explorer(Path(report))
            with atomic_file(FIGURES) as file:
                json.dump(figures, file, indent=1, ensure_ascii=False)
                file.write("\n")
        case ["--take-memory", _, *_]:
            take_memory([Path(report) for report in sys.argv[2:]], MEMORY)
        case others:
            sys.exit(f"write_tables.py knows --take REPORT and --take-memory REPORT …, got {' '.join(others)}")
    for path, content in changed(written()).items():
        with atomic_file(path) as file:
            file.write(content)


if __name__ == "__main__":
    main()
