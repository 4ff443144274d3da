"""The options of `linattn convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from linattn.convert import DEFAULT_MAP

Model = Annotated[
    str, typer.Argument(help='A Hugging Face name, a folder, or "all-MiniLM-L6-v2", which comes as a package.')
]
Out = Annotated[Path, typer.Argument(help="A new folder for the converted model and its report.")]
TextFiles = Annotated[
    list[Path] | None,
    typer.Option(
        help="A text file in UTF-8, may be repeated; English prose that comes with Python if left out. Wanted are 16 "
        "documents or more, each of a quarter to all of --tokens; paragraphs end at an empty line."
    ),
]
Map = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="NAME",
        help='The feature map, as in "LearnedExponential" or "Expansion + window 16".',
        show_default=DEFAULT_MAP,
    ),
]
Features = Annotated[int | None, typer.Option(metavar="R", help="Features of a map whose width is free.")]
Minutes = Annotated[float, typer.Option(help="Time for training; 0 to calibrate only.")]
Tokens = Annotated[int, typer.Option(help="The longest text to train on, in tokens.")]
Distil = Annotated[
    bool, typer.Option("--distil/--no-distil", help="Train the whole model's weights, or the maps alone.")
]
Adapters = Annotated[
    int | None,
    typer.Option(
        metavar="RANK", help="Train low-rank adapters of the projections, where gradients of all weights do not fit."
    ),
]
BatchSize = Annotated[int, typer.Option("--batch", help="Texts per step.")]
Seed = Annotated[int, typer.Option(help="Seed of all draws.")]
