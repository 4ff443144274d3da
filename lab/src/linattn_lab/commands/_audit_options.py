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
Full = Annotated[
    bool,
    typer.Option(
        "--full",
        help="All methods, feature counts 64 and 256, three draws of random maps, and the limit of every rank: about "
        "six times as long.",
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        metavar="R,R,…", help="Feature counts, for maps whose width is free: 256 if left out, with --full 64,256."
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,…",
        help="Tokens of the text to read: 512 if left out; 4096 with --budget, where several may be given.",
    ),
]
Draws = Annotated[int | None, typer.Option(help="Draws per random map: 1 if left out, with --full 3.")]
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
        help="Of a causal language model: bound the KV cache to the bytes of N keys in the model's dtype, by every "
        "method, and measure KL, retrieval, memory and time beside the full cache.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="float32, the default, or bfloat16: of the model and its keys. Needs --budget.")
]
TextKinds = Annotated[
    list[str] | None,
    typer.Option(
        "--text-kind",
        metavar="NAME",
        help="A text that comes with Python: prose, code or mixed; may be repeated. Needs --budget.",
    ),
]
Passages = Annotated[int, typer.Option(help="Passages of each text to measure. Needs --budget.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help='A method by its name in the table, or a written form as in "window 64 + merged 512 in 4 bits"; may be '
        "repeated. Needs --budget.",
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        metavar="NAME",
        help="A retrieval task: facts, the default, or one of RULER's, niah_single, niah_multikey, vt, cwe, fwe; may "
        "be repeated. Needs --budget.",
    ),
]
Samples = Annotated[int, typer.Option(help="Texts of each retrieval task. Needs --budget.")]
