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
    Path | None, typer.Option(help="Read this text file (UTF-8); English prose that comes with Python if left out.")
]
Maps = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="NAME",
        help='Measure this method, as in "Expansion(num_centres=16) + window 16" or "merged 128"; may be repeated.',
    ),
]
Full = Annotated[
    bool,
    typer.Option(
        "--full",
        help="Measure all methods, with 64 and 256 features and three draws of random maps, and the error of the best "
        "attention matrix of each rank: some minutes.",
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        metavar="R,R,…", help="Numbers of features, for maps that take any: 256 if left out, with --full 64,256."
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,…",
        help="Read N tokens of the text: 512 if left out, 4096 with --budget, which takes several numbers.",
    ),
]
Draws = Annotated[int | None, typer.Option(help="Draws of each random map: 1 if left out, with --full 3.")]
Seed = Annotated[int, typer.Option(help="Seed of all draws.")]
Out = Annotated[Path, typer.Option(help="Folder for audit.jsonl, or memory.jsonl with --budget, and index.html.")]
Again = Annotated[bool, typer.Option("--again", help="Measure everything again; the former file is renamed.")]
PlanOut = Annotated[
    Path | None,
    typer.Option(help="Plan per-layer budgets for each --budget, write them to this file and measure them."),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        help="Plan on this text file. If left out: on the second half of --text, or on a part of Python's texts that "
        "is not measured. Needs --plan-out."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,…",
        help="Audit the KV cache of a causal language model, bounded to N tokens: the bytes of N exact keys and values "
        "in the model's dtype, per layer and key/value head.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="Dtype of the model and its keys: float32 (the default) or bfloat16. Needs --budget.")
]
TextKinds = Annotated[
    list[str] | None,
    typer.Option(
        "--text-kind",
        metavar="NAME",
        help="Read only this text that comes with Python: prose, code or mixed; may be repeated. Needs --budget.",
    ),
]
Passages = Annotated[int, typer.Option(help="Measure N passages of each text. Needs --budget.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help='Measure this method, by its name ("bounded cache, far") or written form ("sinks 4 + window 64 + merged '
        '512 in 4 bits"); may be repeated. Needs --budget.',
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        metavar="NAME",
        help="Measure this retrieval task: facts (needles, the default), or one of RULER's: niah_single, "
        "niah_multikey, vt, cwe, fwe; may be repeated. Needs --budget.",
    ),
]
Samples = Annotated[int, typer.Option(help="Read N texts of each retrieval task. Needs --budget.")]
