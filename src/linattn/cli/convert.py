"""The command `linattn convert`: its options; `linattn.cli.conversion` does the work, imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(help='A Hugging Face name, a folder, or "all-MiniLM-L6-v2", which comes as a package.')
]
Out = Annotated[Path, typer.Argument(help="A new folder for the converted model and its report.")]
TextFiles = Annotated[
    list[Path] | None,
    typer.Option(
        help="Train on this text file (UTF-8), may be repeated; English prose that comes with Python if left out. Give "
        "16 documents or more, each from a quarter of --tokens to --tokens long; an empty line ends a document."
    ),
]
Map = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="NAME",
        help='The feature map, as in "LearnedExponential" or "Expansion + window 16".',
        show_default="Expansion(num_centres=16) + window 32",
    ),
]
Features = Annotated[
    int | None, typer.Option("--features", metavar="R", min=1, help="Features of a map that takes any number.")
]
Minutes = Annotated[float, typer.Option(min=0, help="Minutes of training; 0 calibrates only.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="The longest text to train on, in tokens.")]
Distil = Annotated[bool, typer.Option("--distil/--no-distil", help="Train all weights of the model, or only the maps.")]
Adapters = Annotated[
    int | None,
    typer.Option(
        "--adapters",
        metavar="RANK",
        min=1,
        help="Train low-rank adapters (LoRA) of this rank, where gradients of all weights do not fit in memory.",
    ),
]
BatchSize = Annotated[int, typer.Option("--batch", min=1, help="Texts per step.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all draws.")]


def convert(
    call: typer.Context,
    model: Model,
    out: Out,
    text: TextFiles = None,
    feature_map: Map = None,
    num_features: Features = None,
    minutes: Minutes = 15.0,
    num_tokens: Tokens = 512,
    distil: Distil = True,
    adapter_rank: Adapters = None,
    batch_size: BatchSize = 2,
    seed: Seed = 0,
) -> None:
    """Convert a model's softmax attention to linear attention, and measure the error before and after.

    Errors are measured on texts held out from all fitting and training; the stage with the least error is kept. Ctrl-C
    ends the training and keeps the best weights. After a kill, run the same command again to resume, with any number of
    processes: under torchrun they share layers and texts. Example: linattn convert all-MiniLM-L6-v2 OUT --minutes 15
    """
    # Help is not to wait for torch; the first import says of all packages which are missing.
    from linattn.convert import ConvertConfig
    from linattn.records.texts import read_text

    config = ConvertConfig(
        feature_map,
        num_features=num_features,
        minutes=minutes,
        num_tokens=num_tokens,
        distil=distil,
        adapter_rank=adapter_rank,
        batch_size=batch_size,
        seed=seed,
        texts=tuple(read_text(file) for file in (text or (None,))),
    )
    from linattn.cli.conversion import conversion

    # Of "." or a link the name is elsewhere.
    conversion(call, model, out.resolve(), config)
