"""The work of `linattn train`, as the terminal shows it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markup import escape

from linattn.cli.new_folder import finish, shared_folder
from linattn.cli.terminal import print_table
from linattn.cli.training_progress import training_progress
from linattn.hf import LinearLMConfig, LinearLMForCausalLM
from linattn.records.files import atomic_folder
from linattn.records.json_files import to_json, write_json
from linattn.training import Progress, WorkFolder, launched
from linattn_lab.pretraining import (
    Corpus,
    Pretraining,
    TrainConfig,
    from_documents,
    pretrain,
    python_documents,
    read_documents,
)
from linattn_lab.pretraining.card import model_card, position_table, score_table, training_in_words
from linattn_lab.pretraining.pretraining import identity

_PARTS = 20
# The name of a training, and of folders: with the last checkpoint in OUT, and with checkpoints in either.
_NAME, _RESUME, _CHECKPOINTS = "training", "resume", "checkpoints"


class Asked(NamedTuple):
    """What was asked for on the command line."""

    text: tuple[Path, ...]  # files and folders; Python's own sources if there are none
    model: LinearLMConfig  # of the model
    config: TrainConfig  # of the training
    parts: int  # of each text, for as many processes
    shard: bool  # whether each process has a part of the weights
    resume: bool  # whether a finished training is continued


def training(call: typer.Context, out: Path, asked: Asked) -> None:
    """Train a model into a new folder, or one that holds a finished training, and print the figures."""
    config, resume = asked.config, asked.resume
    with (
        launched() as processes,
        shared_folder("training a model", processes, out, call, is_continued=resume) as (console, work),
    ):
        model = _model(asked.model)
        corpus = _corpus(asked, out, console)
        if resume and work is not None and not (work / _CHECKPOINTS).exists():
            _take_up(out, work, config, identity(model, corpus, config))
        pace = partial(_pace, config.context * config.batch_size)
        with training_progress(console, "Reading and measuring", pace, parts=_PARTS) as shown:
            trained = pretrain(
                model, corpus, config, work=work, notify=shown.notify, num_parts=asked.parts, shard=asked.shard
            )
        if work is not None:
            finish(work, out, _NAME, partial(_write, model, trained, work), is_continued=resume)
        _print(console, trained, out)


def _corpus(asked: Asked, out: Path, console: Console) -> Corpus:
    """The text, after a line on what is left out of it, as what this training writes, and on how it is split."""
    if not asked.text:
        return from_documents(python_documents(), context=asked.config.context)
    documents, left_out = read_documents(asked.text, (out, out.with_name(f"{out.name}.unfinished")))
    corpus = from_documents(documents, context=asked.config.context)
    split = "by file" if corpus.is_split_by_file else "by position: the last two sixteenths of each are not trained on"
    without = "; ".join(f"{number:,} left out: {reason}" for reason, number in left_out.items())
    words = f"{len(documents):,} files are read, split {split}{'; ' * bool(without)}{without}."
    console.print(words, markup=False, highlight=False)
    return corpus


def _take_up(out: Path, work: Path, config: TrainConfig, settings: Mapping[str, Any]) -> None:
    """Begin with the last checkpoint of a finished training, if its settings are these and more is wanted."""
    former = out / _RESUME
    last = WorkFolder(former, settings, kind=_NAME).last(_NAME)
    if last is None:
        raise FileNotFoundError(f"{former} holds no checkpoint to continue from; train into a new folder")
    progress = last[1]
    if config.budget.share(progress) >= 1:
        raise ValueError(
            f"{out} has {progress.step:,} steps in {progress.seconds / 60:.1f} minutes already; give more --steps or "
            "--minutes"
        )
    if (out / "logs").is_dir():
        shutil.copytree(out / "logs", work / "logs", dirs_exist_ok=True)
    for record in former.glob("*.json"):
        shutil.copy(record, work)
    # Last: where it is, all is.
    with atomic_folder(work / _CHECKPOINTS) as draft:
        shutil.copytree(former / _CHECKPOINTS, draft, dirs_exist_ok=True)


def gate_of(gate: str | None, gated: str, pattern: str) -> str | None:
    """The gate that was asked for; if none was said, a forget gate where there is a block to have it."""
    if gate is None:
        return "ForgetGate" if set(gated) & set(pattern) else None
    return None if gate == "none" else gate


def _model(config: LinearLMConfig) -> LinearLMForCausalLM:
    """A new model; torch's own random numbers are left as they are."""
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"--width must be a multiple of --heads, got {config.hidden_size} and {config.num_attention_heads}"
        )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        return LinearLMForCausalLM(config)


def _pace(bytes_per_step: int, progress: Progress) -> str:
    """How far a training has come."""
    pace = progress.step * bytes_per_step / max(progress.seconds, 1e-9)
    now = progress.first if progress.training_loss is None else progress.training_loss
    return f"{now:.3f} bits per byte, best on validation texts {progress.best:.3f}, {pace:,.0f} bytes/s"


def _write(model: LinearLMForCausalLM, trained: Pretraining, work: Path, draft: Path) -> None:
    """The model, its report, and what a longer training begins with."""
    model.save_pretrained(draft)
    write_json(draft / "training.json", to_json(trained, finite=False))
    (draft / "README.md").write_text(model_card(trained, _attention(model.config)), encoding="utf-8")
    last = max((work / _CHECKPOINTS / _NAME).glob("step-*"), default=None)
    if last is not None:
        shutil.copytree(last, draft / _RESUME / _CHECKPOINTS / _NAME / last.name)
        for record in work.glob("*.json"):
            shutil.copy(record, draft / _RESUME)


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
