"""The command `linattn convert` as the terminal shows it."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from linattn.convert import DEFAULT_MAP, Conversion, ConvertConfig, convert_
from linattn.convert.card import kept_in_words, layer_table, method_in_words, method_table, model_card, stage_table
from linattn.hf import LinearLMForCausalLM, LoadedModel, is_sentence_transformer, load, save_pretrained
from linattn.lab.audit.text import read_text
from linattn.lab.commands.terminal import ending, interrupts, print_table, share_bar
from linattn.records.atomic import full_disk_names
from linattn.records.fields import to_json
from linattn.records.json_files import write_json
from linattn.records.locks import LOCK, InUseError, locked

# Without a terminal the time left is printed from this share of a training on, then once in every such part of it.
_FIRST_SHARE, _PARTS = 0.01, 4


def convert(
    model: Annotated[
        str, typer.Argument(help='A Hugging Face name, a folder, or "all-MiniLM-L6-v2", which comes as a package.')
    ],
    out: Annotated[Path, typer.Argument(help="A new folder for the converted model and its report.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A text file in UTF-8, may be repeated; English prose that comes with Python if left out."),
    ] = None,
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
) -> None:
    """Turn a model's softmax attention into linear attention, and say how wrong it is before and after.

    Figures are of texts held out from all fitting and training; of the stages the best is kept. Ctrl-C during training
    ends it and keeps the best so far; after anything worse the same command goes on where it was.
    """
    console = Console()
    # Of "." or a link the name is elsewhere.
    out = out.resolve()
    work = out.with_name(f"{out.name}.unfinished")
    with ending("convert", console, lambda: _what_is_left(work)), _alone(work, out):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise FileExistsError(f"{out} exists and is not an empty folder; give a new folder, or remove it first")
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
        )
        with _shown(console) if console.is_terminal else _told(console) as notify:
            conversion = convert_(loaded.model, loaded.tokenizer, config, work=work, notify=notify)
        with full_disk_names(out):
            _write(loaded, conversion, work, out)
    _print(console, conversion)
    console.print(f"Written: {escape(str(out))}", highlight=False)


def _what_is_left(work: Path) -> str:
    """What an interrupt has left."""
    if not work.exists():
        return "Nothing was kept yet."
    return f"The work so far is in {work}; the same command goes on."


@contextmanager
def _alone(work: Path, out: Path) -> Iterator[None]:
    """From the first look at the folders to the end of the work no other process makes the same model."""
    try:
        with locked(work):
            yield
    except InUseError:
        raise InUseError(
            f"another process is converting a model into {out}; wait until it has ended, or give another folder for OUT"
        ) from None


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[str, float, float], None]]:
    """A bar over a conversion, and the function that moves it; an interrupt that was swallowed is raised there."""
    with interrupts() as pressed, share_bar(console) as progress:
        task = progress.add_task("Measuring and calibrating", total=None)

        def notify(name: str, share: float, loss: float) -> None:
            """Move the bar."""
            progress.update(task, description=escape(f"{name}, loss {loss:.4f}"), total=1.0, completed=share)
            if share == 1.0:
                progress.update(task, description="Measuring", total=None)
            if pressed:
                raise KeyboardInterrupt

        yield notify


@contextmanager
def _told(console: Console) -> Iterator[Callable[[str, float, float], None]]:
    """A line for every part of a conversion, where no terminal shows a bar; an interrupt is raised as there."""
    console.print("Measuring and calibrating")
    begun: dict[str, tuple[float, float]] = {}
    due: dict[str, float] = {}

    def tell(name: str, share: float, loss: float) -> None:
        """A line when a training has begun, at every part of it, and at its end."""
        now = time.perf_counter()
        start, first = begun.setdefault(name, (now, share))
        if share >= 1.0:
            console.print(f"{name}: done, loss {loss:.4f}; measuring", markup=False, highlight=False)
        elif share - first >= _FIRST_SHARE and share >= due.get(name, 0.0):
            # What a run before this one did was not done at this one's speed.
            left = (now - start) / (share - first) * (1.0 - share)
            words = f"{name}: {share:.0%} done, loss {loss:.4f}, about {left / 60:.1f} minutes left"
            console.print(words, markup=False, highlight=False)
            due[name] = (math.floor(share * _PARTS) + 1) / _PARTS

    with interrupts() as pressed:

        def notify(name: str, share: float, loss: float) -> None:
            """Print, and raise an interrupt that was noted."""
            tell(name, share, loss)
            if pressed:
                raise KeyboardInterrupt

        yield notify


def _write(loaded: LoadedModel, conversion: Conversion, work: Path, out: Path) -> None:
    """The model, its report and its curves; the folder appears whole, and the work is removed after that."""
    draft = work / "result"
    shutil.rmtree(draft, ignore_errors=True)
    if is_sentence_transformer(loaded.source) and find_spec("sentence_transformers") is not None:
        from linattn.hf import sentence_transformers

        sentence_transformers.save_pretrained(sentence_transformers.with_model(loaded.source, loaded.model), draft)
    else:
        save_pretrained(loaded.model, draft, tokenizer=loaded.tokenizer)
    write_json(draft / "conversion.json", to_json(conversion, finite=False))
    card = model_card(conversion, loaded.name, is_plain=isinstance(loaded.model, LinearLMForCausalLM))
    (draft / "README.md").write_text(card, encoding="utf-8")
    if (work / "logs").is_dir():
        shutil.copytree(work / "logs", draft / "logs")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft.rename(out)
    for path in work.iterdir():
        # The lock goes with the process that holds it.
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


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
    if conversion.heads:
        print_table(console, method_table(conversion))
        console.print(f"The layers attend by {method_in_words(conversion)}.", markup=False, highlight=False)
    if conversion.stopped:
        console.print("Training was interrupted; the best weights until then were kept.", highlight=False)
    for layer in conversion.linearization.kept:
        console.print(f"{layer.module_name} keeps softmax: {layer.reason}", markup=False, highlight=False)
