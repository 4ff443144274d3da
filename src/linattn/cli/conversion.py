"""The work of `linattn convert`, as the terminal shows it."""

from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from linattn.cli.new_folder import finish, shared_folder
from linattn.cli.terminal import print_table
from linattn.cli.training_progress import training_progress
from linattn.convert import Conversion, ConvertConfig, convert_
from linattn.convert.card import kept_in_words, kept_layers, layer_table, model_card, speed_in_words, stage_table
from linattn.hf import LoadedModel, load, save_pretrained
from linattn.hf.loading import is_sentence_transformer
from linattn.records.json_files import to_json, write_json
from linattn.training import launched


def conversion(call: typer.Context, model: str, out: Path, config: ConvertConfig) -> None:
    """Convert a model into a new folder, and print both tables."""
    with launched() as processes, shared_folder("converting a model", processes, out, call) as (console, work):
        loaded = load(model, with_head=True)
        if is_sentence_transformer(loaded.source) and find_spec("sentence_transformers") is None:
            raise ImportError(f"{model} needs what is not installed here: pip install sentence-transformers")
        with training_progress(console, "Measuring and calibrating", lambda now: f"loss {now.best:.4f}") as shown:
            converted = convert_(
                loaded.model, loaded.tokenizer, config, work=work, notify=shown.notify, measured=shown.measured
            )
        if work is not None:
            finish(work, out, "conversion", lambda draft: _write(loaded, converted, draft))
    _print(console, converted)
    console.print(f"Written: {escape(str(out))}", highlight=False)


def _write(loaded: LoadedModel, conversion: Conversion, draft: Path) -> None:
    """The model and its report."""
    if is_sentence_transformer(loaded.source):
        from linattn.hf import sentence_transformers

        sentence_transformers.save_pretrained(sentence_transformers.with_model(loaded.source, loaded.model), draft)
    else:
        save_pretrained(loaded.model, draft, tokenizer=loaded.tokenizer)
    write_json(draft / "conversion.json", to_json(conversion, finite=False))
    (draft / "README.md").write_text(model_card(conversion, loaded.name), encoding="utf-8")


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
    if conversion.stopped:
        console.print("Training was interrupted; the best weights until then were kept.", highlight=False)
    for line in kept_layers(conversion):
        console.print(f"Softmax stays in {line}.", markup=False, highlight=False)
