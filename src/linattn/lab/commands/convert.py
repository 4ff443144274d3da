"""The command `linattn convert` as the terminal shows it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from linattn.convert import DEFAULT_MAP, Conversion, ConvertConfig, convert_
from linattn.convert.card import (
    kept_in_words,
    layer_table,
    method_in_words,
    method_table,
    model_card,
    speed_in_words,
    stage_table,
)
from linattn.hf import LinearLMForCausalLM, LoadedModel, is_sentence_transformer, load, save_pretrained
from linattn.lab.audit.text import read_text
from linattn.lab.commands.new_folder import finish, new_folder
from linattn.lab.commands.terminal import of_option, print_table
from linattn.lab.commands.training_progress import training_progress
from linattn.planning.methods import parse_method
from linattn.records.fields import to_json
from linattn.records.json_files import write_json
from linattn.training import Progress

_Text = Annotated[
    list[Path] | None,
    typer.Option(
        help="A text file in UTF-8, may be repeated; English prose that comes with Python if left out. Wanted are 16 "
        "documents or more, each of a quarter to all of --tokens; paragraphs end at an empty line."
    ),
]
_EvenIfSlower = Annotated[
    bool,
    typer.Option("--even-if-slower", help="Convert by the default method or a target's even where it saves nothing."),
]


def convert(
    model: Annotated[
        str, typer.Argument(help='A Hugging Face name, a folder, or "all-MiniLM-L6-v2", which comes as a package.')
    ],
    out: Annotated[Path, typer.Argument(help="A new folder for the converted model and its report.")],
    text: _Text = None,
    map_: Annotated[
        str | None,
        typer.Option(
            "--map",
            metavar="NAME",
            help='A method, as in "LearnedExponential" or "Expansion + window 16".',
            show_default=DEFAULT_MAP,
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            metavar="ERROR",
            help="In place of one method: the cheapest for each head expected to meet this relative error.",
        ),
    ] = None,
    features: Annotated[int | None, typer.Option(metavar="R", help="Features of a map whose width is free.")] = None,
    minutes: Annotated[float, typer.Option(help="Time for training; 0 to calibrate only.")] = 15.0,
    tokens: Annotated[int, typer.Option(help="The longest text to train on, in tokens.")] = 512,
    distil: Annotated[
        bool, typer.Option("--distil/--no-distil", help="Train the whole model's weights, or the maps alone.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    even_if_slower: _EvenIfSlower = False,
) -> None:
    """Turn a model's softmax attention into linear attention, and say how wrong it is before and after.

    Figures are of texts held out from all fitting and training; of the stages the best is kept. Ctrl-C during training
    ends it and keeps the best so far; after anything worse the same command goes on where it was.
    """
    console = Console()
    # Of "." or a link the name is elsewhere.
    out = out.resolve()
    with new_folder("convert", "converting a model", console, out) as work:
        with of_option("--map"):
            parse_method(map_ or DEFAULT_MAP)
        texts = tuple(read_text(file).content for file in (text or (None,)))
        loaded = load(model, with_head=True)
        config = ConvertConfig(
            map_,
            target,
            num_features=features,
            texts=texts,
            num_tokens=tokens,
            minutes=minutes,
            distil=distil,
            seed=seed,
            even_if_slower=even_if_slower,
        )
        with training_progress(console, "Measuring and calibrating", _loss) as notify:
            conversion = convert_(loaded.model, loaded.tokenizer, config, work=work, notify=notify)
        finish(work, out, lambda draft: _write(loaded, conversion, draft))
    _print(console, conversion)
    console.print(f"Written: {escape(str(out))}", highlight=False)


def _loss(progress: Progress) -> str:
    """How far a training has come."""
    return f"loss {progress.best:.4f}"


def _write(loaded: LoadedModel, conversion: Conversion, draft: Path) -> None:
    """The model and its report."""
    if is_sentence_transformer(loaded.source) and find_spec("sentence_transformers") is not None:
        from linattn.hf import sentence_transformers

        sentence_transformers.save_pretrained(sentence_transformers.with_model(loaded.source, loaded.model), draft)
    else:
        save_pretrained(loaded.model, draft, tokenizer=loaded.tokenizer)
    write_json(draft / "conversion.json", to_json(conversion, finite=False))
    card = model_card(conversion, loaded.name, is_plain=isinstance(loaded.model, LinearLMForCausalLM))
    (draft / "README.md").write_text(card, encoding="utf-8")


def _print(console: Console, conversion: Conversion) -> None:
    """Both tables, and what they are about."""
    print_table(console, stage_table(conversion))
    print_table(console, layer_table(conversion))
    console.print(
        f"{conversion.num_held_out} held-out texts, {conversion.num_held_out_tokens:,} tokens. Cosines and "
        "correlations are to the original model; errors are of a layer's attention, 0 is exact.",
        highlight=False,
    )
    console.print(f"{kept_in_words(conversion)}.", markup=False, highlight=False)
    console.print(speed_in_words(conversion), markup=False, highlight=False)
    if conversion.heads:
        print_table(console, method_table(conversion))
        console.print(f"The layers attend by {method_in_words(conversion)}.", markup=False, highlight=False)
    if conversion.stopped:
        console.print("Training was interrupted; the best weights until then were kept.", highlight=False)
    for layer in conversion.linearization.kept:
        console.print(f"{layer.module_name} keeps softmax: {layer.reason}", markup=False, highlight=False)
