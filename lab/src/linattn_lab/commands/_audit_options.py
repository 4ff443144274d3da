"""The options of `linattn audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None,
    typer.Argument(
        help="A Hugging Face name, a folder or a GGUF file; the packaged MiniLM sentence encoder if left out."
    ),
]
TextFile = Annotated[
    Path | None, typer.Option(help="A text file in UTF-8; English prose that comes with Python if left out.")
]
Maps = Annotated[
    list[str] | None,
    typer.Option(
        "--map", metavar="NAME", help='A method, as in "Expansion(num_centres=16) + window 16"; may be repeated.'
    ),
]
Features = Annotated[str, typer.Option(metavar="R,R,…", help="Feature counts, for maps whose width is free.")]
Tokens = Annotated[int | None, typer.Option(help="Tokens of the text to read: 512 if left out, 4096 with --budget.")]
Draws = Annotated[int, typer.Option(help="Draws per random map.")]
Seed = Annotated[int, typer.Option(help="Seed of all draws.")]
Out = Annotated[Path, typer.Option(help="Folder for audit.jsonl, or memory.jsonl with --budget, and index.html.")]
Again = Annotated[bool, typer.Option("--again", help="Measure everything again; the former file is renamed.")]
PlanOut = Annotated[
    Path | None,
    typer.Option(
        help="Also plan for each budget what every layer keeps, write that here and measure it. Needs --budget."
    ),
]
Calibration = Annotated[
    Path | None, typer.Option(help="The text to plan on; the second half of the text if left out. Needs --plan-out.")
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,…",
        help="Of a causal language model: bound what its global layers keep to the bytes of N keys, by every rule, "
        "and measure KL, perplexity and recall.",
    ),
]
Passages = Annotated[int, typer.Option(help="Passages of the text to measure. Needs --budget.")]
Contenders = Annotated[
    list[str] | None,
    typer.Option(
        "--contender", metavar="NAME", help="A rule by its name in the table; may be repeated. Needs --budget."
    ),
]
