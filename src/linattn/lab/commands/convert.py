"""The command `linattn convert` as the terminal shows it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from linattn.convert import DEFAULT_MAP, Conversion, ConvertConfig, convert_
from linattn.convert.card import (
    kept_in_words,
    kept_layers,
    layer_table,
    method_in_words,
    method_table,
    model_card,
    speed_in_words,
    stage_table,
)
from linattn.convert.samples import from_texts
from linattn.hf import (
    LinearLMForCausalLM,
    LoadedModel,
    is_sentence_transformer,
    load,
    load_language_model,
    save_pretrained,
)
from linattn.lab.audit.text import read_text
from linattn.lab.commands import _convert_options as options
from linattn.lab.commands.new_folder import finish, shared_folder
from linattn.lab.commands.stages import stages
from linattn.lab.commands.terminal import of_option, print_table
from linattn.lab.commands.training_progress import training_progress
from linattn.lab.constant_memory.converting import RECALL, BoundedConversion, BoundedMemory
from linattn.planning.methods import parse_method
from linattn.records.fields import to_json
from linattn.records.json_files import write_json
from linattn.training import Progress, launched


def convert(
    call: typer.Context,
    model: options.Model,
    out: options.Out,
    text: options.TextFiles = None,
    map_: options.Map = None,
    target: options.Target = None,
    budget: options.Budget = None,
    features: options.Features = None,
    minutes: options.Minutes = 15.0,
    tokens: options.Tokens = 512,
    distil: options.Distil = True,
    adapters: options.Adapters = None,
    batch: options.BatchSize = 2,
    seed: options.Seed = 0,
    even_if_slower: options.EvenIfSlower = False,
) -> None:
    """Turn a model's softmax attention into linear attention, and say how wrong it is before and after.

    Figures are of texts held out from all fitting and training; of the stages the best is kept. Ctrl-C during training
    ends it and keeps the best so far; after anything worse the same command goes on where it was. Under torchrun the
    texts of a step, layers and held-out texts are dealt out to the processes; any number of them goes on.
    """
    # Of "." or a link the name is elsewhere.
    out = out.resolve()
    with (
        launched() as processes,
        shared_folder("convert", "converting a model", processes, out, call) as (console, work),
    ):
        if budget is not None and not (map_ is None and target is None):
            raise ValueError("--budget chooses a method, and --map and --target do; give one of the three")
        if budget is not None and budget < 1:
            raise ValueError(f"budget must be at least 1, got {budget}")
        with of_option("--map"):
            parse_method(map_ or DEFAULT_MAP)
        texts = tuple(read_text(file).content for file in (text or (None,)))
        loaded = load(model, with_head=True) if budget is None else load_language_model(model)
        bounded = None if budget is None else _bounded(loaded, texts, budget, tokens, seed, console)
        config = ConvertConfig(
            map_ if bounded is None else tuple(bounded.plan.labels),
            target,
            num_features=features,
            texts=texts,
            num_tokens=tokens,
            min_tokens=None if budget is None else _shortest(budget, tokens),
            minutes=minutes,
            distil=distil,
            adapter_rank=adapters,
            batch_size=batch,
            seed=seed,
            even_if_slower=even_if_slower,
        )
        with training_progress(console, "Measuring and calibrating", _loss) as shown:
            conversion = convert_(
                loaded.model, loaded.tokenizer, config, work=work, notify=shown.notify, measured=shown.measured
            )
        memory = None if bounded is None else bounded.finished()
        if work is not None:
            finish(work, out, lambda draft: _write(loaded, conversion, memory, draft))
    _print(console, conversion)
    if memory is not None:
        print_table(console, memory.table())
        console.print(memory.sentence(), markup=False, highlight=False)
    console.print(f"Written: {escape(str(out))}", highlight=False)


def _shortest(budget: int, tokens: int) -> int:
    """Tokens of the shortest text: one that the budget holds is exact, and teaches nothing."""
    return min(budget + budget // 2, tokens)


def _bounded(
    loaded: LoadedModel, texts: tuple[str, ...], budget: int, tokens: int, seed: int, console: Console
) -> BoundedMemory:
    """The method for a budget, and recall before training, on the conversion's texts."""
    shortest = _shortest(budget, tokens)
    with stages(console) as watch:
        watch.begin("Choosing a split of the budget")
        samples = from_texts(loaded.tokenizer, texts, num_tokens=tokens, min_tokens=shortest, batch_size=1, seed=seed)
        return BoundedMemory(loaded, samples, budget, tokens, watch)


def _loss(progress: Progress) -> str:
    """How far a training has come."""
    return f"loss {progress.best:.4f}"


def _write(loaded: LoadedModel, conversion: Conversion, memory: BoundedConversion | None, draft: Path) -> None:
    """The model and its report."""
    if is_sentence_transformer(loaded.source) and find_spec("sentence_transformers") is not None:
        from linattn.hf import sentence_transformers

        sentence_transformers.save_pretrained(sentence_transformers.with_model(loaded.source, loaded.model), draft)
    else:
        save_pretrained(loaded.model, draft, tokenizer=loaded.tokenizer)
    write_json(draft / "conversion.json", to_json(conversion, finite=False))
    more: tuple[str, ...] = ()
    if memory is not None:
        write_json(draft / "memory.json", to_json(memory, finite=False))
        more = memory.sentence(), RECALL, memory.table().markdown()
    card = model_card(conversion, loaded.name, more, is_plain=isinstance(loaded.model, LinearLMForCausalLM))
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
    for line in kept_layers(conversion):
        console.print(f"Softmax stays in {line}.", markup=False, highlight=False)
