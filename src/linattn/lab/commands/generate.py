"""The command `linattn generate` as the terminal shows it."""

from __future__ import annotations

import codecs
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from linattn.hf import LinearLMForCausalLM, StreamCache, stream_tokens
from linattn.lab.commands.terminal import ending
from linattn.records.json_files import read_json


def generate(
    folder: Annotated[Path, typer.Argument(help="A model's folder, as linattn train writes it.")],
    prompt: Annotated[str, typer.Option(help="The text that is gone on with.")],
    length: Annotated[int, typer.Option("--bytes", metavar="N", help="How many bytes.")] = 1000,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte, 1 draws as the model says.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest bytes of so much probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
) -> None:
    """Go on with a text, byte by byte, in constant memory where every block of the model is linear.

    The text goes to the standard output; how fast it came, and what the model kept of it, to the standard error.
    """
    console = Console(stderr=True)
    written = 0
    with ending("generate", console, lambda: f"{written:,} bytes were written."):
        model = _load(folder)
        tokens = torch.tensor([list(prompt.encode())], dtype=torch.long)
        draws = torch.Generator().manual_seed(seed)
        cache = StreamCache(len(model.model.blocks))
        stream = stream_tokens(model, tokens, temperature=temperature, top_p=top_p, generator=draws, cache=cache)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        start = time.perf_counter()
        sys.stdout.write(prompt)
        for token in islice(stream, length):
            sys.stdout.write(decoder.decode(bytes([int(token)])))
            sys.stdout.flush()
            written += 1
        sys.stdout.write(decoder.decode(b"", final=True) + "\n")
        seconds = time.perf_counter() - start
    pace = written / max(seconds, 1e-9)
    console.print(
        f"{written:,} bytes, {pace:,.0f} a second; the model keeps {cache.num_bytes:,} bytes of the text",
        highlight=False,
    )


def _load(folder: Path) -> LinearLMForCausalLM:
    """The model of a folder; another kind of model is refused."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not a folder with a model; give one that linattn train has written")
    kind = read_json(folder / "config.json", "model's configuration", "give another folder").get("model_type")
    wanted = LinearLMForCausalLM.config_class.model_type
    if kind != wanted:
        raise ValueError(
            f"{folder} holds a model of type {kind!r}, wanted {wanted!r}, a model of bytes; linattn train writes one"
        )
    model: LinearLMForCausalLM = LinearLMForCausalLM.from_pretrained(folder)
    model.train(False)
    return model
