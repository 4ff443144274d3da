"""The command `linattn train` as the terminal shows it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from linattn.cli.new_folder import finish, shared_folder
from linattn.cli.terminal import print_table
from linattn.cli.training_progress import training_progress
from linattn.hf import LinearLMConfig, LinearLMForCausalLM
from linattn.records.fields import to_json
from linattn.records.json_files import write_json
from linattn.training import Progress, launched
from linattn_lab.pretraining import (
    Pretraining,
    TrainConfig,
    from_documents,
    pretrain,
    python_documents,
    read_documents,
)
from linattn_lab.pretraining.card import model_card, position_table, score_table, training_in_words

_PARTS = 20
_Text = Annotated[
    list[Path] | None,
    typer.Option(help="A file or folder to learn from, may be repeated; Python's own sources if left out."),
]
_Pattern = Annotated[
    str, typer.Option(help='A letter per block, begun again at its end: "l" linear, "s" softmax, as in "llls".')
]
_Map = Annotated[
    str, typer.Option("--map", metavar="NAME", help='A map, as in "FavorPlus" or "LearnedExponential + window 64".')
]
_Positions = Annotated[str, typer.Option(help='Positions of linattn.positions, as "Rotary", or "none".')]
_Gate = Annotated[
    str | None,
    typer.Option(help='"ForgetGate", "Alibi", "RetNet" or "none".', show_default="ForgetGate where a block is gated"),
]

_Parts = Annotated[int, typer.Option(metavar="N", help="Under torchrun: cut each text for N processes.")]
_Shard = Annotated[
    bool, typer.Option("--shard", help="Under torchrun: keep a part of weights and moments on each process.")
]


def train(
    call: typer.Context,
    out: Annotated[Path, typer.Argument(help="A new folder for the model and its report.")],
    text: _Text = None,
    pattern: _Pattern = "l",
    map_: _Map = "LearnedExponential",
    features: Annotated[int, typer.Option(metavar="R", help="Features of a map whose width is free.")] = 64,
    positions: _Positions = "Rotary(require_relative=False)",
    gate: _Gate = None,
    gated: Annotated[str, typer.Option(help='Kinds of blocks that have the gate: "ls", "l" or "s".')] = "l",
    layers: Annotated[int, typer.Option(help="How many blocks.")] = 4,
    width: Annotated[int, typer.Option(help="E, the width of a token.")] = 128,
    heads: Annotated[int, typer.Option(help="Heads of each block.")] = 4,
    hidden: Annotated[int | None, typer.Option(help="Width inside the MLPs; 8/3 E if left out.")] = None,
    dropout: Annotated[float, typer.Option(help="Share of numbers that training drops.")] = 0.0,
    context: Annotated[int, typer.Option(help="Bytes that are read at once.")] = 4096,
    batch: Annotated[int, typer.Option(help="Texts per step.")] = 1,
    minutes: Annotated[float, typer.Option(help="Time for training.")] = 15.0,
    steps: Annotated[int | None, typer.Option(help="Steps in place of a time.")] = None,
    learning_rate: Annotated[float, typer.Option(help="At its largest.")] = 4e-3,
    redraw: Annotated[int | None, typer.Option(metavar="N", help="Redraw random maps every N steps.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, draws and the order of texts.")] = 0,
    parts: _Parts = 1,
    shard: _Shard = False,
) -> None:
    """Train a language model of bytes with linear or softmax attention, and say how many bits a byte costs.

    Documents are split by file; figures are of files that were not trained on. Ctrl-C ends the training and keeps the
    best so far; after anything worse the same command goes on where it was. Under torchrun the texts of a step are
    dealt out to the processes, or each text is cut into parts for some of them; any number of processes goes on.
    """
    out = out.resolve()
    with launched() as processes, shared_folder("train", "training a model", processes, out, call) as (console, work):
        config = TrainConfig(
            context=context,
            batch_size=batch,
            minutes=minutes,
            steps=steps,
            learning_rate=learning_rate,
            redraw_every=redraw,
            seed=seed,
        )
        model = _model(
            LinearLMConfig(
                hidden_size=width,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                intermediate_size=hidden,
                pattern=pattern,
                method=map_,
                num_features=features,
                positions=None if positions == "none" else positions,
                gate=_gate(gate, gated, pattern),
                gated=gated,
                dropout=dropout,
                seed=seed,
            ),
            seed,
        )
        corpus = from_documents(read_documents(text) if text else python_documents(), context=context)
        pace = partial(_pace, context * batch)
        with training_progress(console, "Reading and measuring", pace, parts=_PARTS) as shown:
            found = pretrain(model, corpus, config, work=work, notify=shown.notify, num_parts=parts, shard=shard)
        if work is not None:
            finish(work, out, lambda draft: _write(model, found, draft))
        _print(console, found, out)


def _gate(gate: str | None, gated: str, pattern: str) -> str | None:
    """The gate that was asked for; if none was said, a forget gate where there is a block to have it."""
    if gate is None:
        return "ForgetGate" if set(gated) & set(pattern) else None
    return None if gate == "none" else gate


def _model(config: LinearLMConfig, seed: int) -> LinearLMForCausalLM:
    """A new model; torch's own random numbers are left as they are."""
    if config.num_attention_heads > 0 and config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads, got {config.hidden_size} and "
            f"{config.num_attention_heads}"
        )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return LinearLMForCausalLM(config)


def _pace(bytes_per_step: int, progress: Progress) -> str:
    """How far a training has come."""
    pace = progress.step * bytes_per_step / max(progress.seconds, 1e-9)
    now = progress.first if progress.training_loss is None else progress.training_loss
    return f"{now:.3f} bits per byte, best on validation texts {progress.best:.3f}, {pace:,.0f} bytes/s"


def _write(model: LinearLMForCausalLM, found: Pretraining, draft: Path) -> None:
    """The model and its report."""
    model.save_pretrained(draft)
    write_json(draft / "training.json", to_json(found, finite=False))
    (draft / "README.md").write_text(model_card(found, _attention(model.config)), encoding="utf-8")


def _attention(config: LinearLMConfig) -> str:
    """The blocks' attention in words."""
    count = config.num_hidden_layers
    kinds = (config.pattern * count)[:count]
    linear = f"{config.method} with {config.num_features} features" if config.num_features else config.method
    words = [f"{kinds.count('l')} × `{linear}`"] * ("l" in kinds) + [f"{kinds.count('s')} × softmax"] * ("s" in kinds)
    return f"{count} blocks, {' and '.join(words)}; positions: {config.positions}, gate: {config.gate}"


def _print(console: Console, found: Pretraining, out: Path) -> None:
    """Both tables, what they are about, and where the model is."""
    print_table(console, score_table(found))
    print_table(console, position_table(found))
    console.print(f"{training_in_words(found)}.", markup=False, highlight=False)
    if found.trained.stopped:
        console.print("Training was interrupted; the best weights until then were kept.", highlight=False)
    console.print(f"Written: {escape(str(out))}", highlight=False)
