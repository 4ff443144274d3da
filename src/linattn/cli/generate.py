"""The command `linattn generate` as the terminal shows it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor

from linattn.cli.terminal import ending, of_option
from linattn.hf import (
    BoundedCache,
    IncrementalDecoder,
    LoadedModel,
    cache_bytes,
    end_tokens,
    load_language_model,
    new_cache,
    stream_tokens,
)
from linattn.kv_cache.budget import BITS_BY_DEFAULT, check_budget
from linattn.methods.method import together

# Bits of a number that is quantized, and of one that is kept as it is.
_FEWEST, _MOST, _WHOLE = 2, 8, 32

Budget = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Bound what each global layer of a softmax model keeps to the bytes of N keys, by merging keys.",
    ),
]
Bits = Annotated[
    int | None,
    typer.Option(
        help="With a budget: quantize merged keys and values to 2 to 8 bits a number; 32: do not. "
        f"{BITS_BY_DEFAULT} if left out."
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="With a budget: bound each layer as was planned for it, by linattn audit --budget --plan-out.",
    ),
]


def generate(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder (of linattn train, linattn convert, or any causal language model), a GGUF file, a Hugging "
            'Face name, or "gemma-3-270m", which comes as a package.'
        ),
    ],
    prompt: Annotated[str, typer.Option(help="The prompt: the text before what is generated.")],
    length: Annotated[
        int, typer.Option("--tokens", metavar="N", help="How many tokens at most; a model of bytes has one per byte.")
    ] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, 1 draws as the model says.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of so much probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    budget: Budget = None,
    bits: Bits = None,
    plan: PlanFile = None,
) -> None:
    """Go on with a text, token by token, in constant memory where attention is linear or has a budget.

    The text goes to the standard output; how fast it came, and what the model kept of it, to the standard error: with a
    budget, beside what the exact cache would take.
    """
    console = Console(stderr=True)
    written: list[int] = []
    with ending("generate", console, lambda: f"{len(written):,} tokens were written."):
        if length < 1:
            raise ValueError(f"num_tokens must be at least 1, got {length}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        if budget is not None:
            check_budget(budget)
        if plan is not None and (budget is None or bits is not None):
            raise ValueError("--plan says how the keys of a budget are kept; give --budget too, and no --bits")
        kept_in = _bits(bits, budget)
        loaded = load_language_model(model)
        tokens: Tensor = loaded.tokenizer(prompt, return_tensors="pt")["input_ids"]
        if not tokens.numel():
            raise ValueError("--prompt gives no token; give a text")
        with of_option("--budget"):
            cache = new_cache(loaded.model) if budget is None else _bounded(loaded, budget, kept_in, plan)
        _check_length(loaded.model, tokens.shape[1] + length)
        draws = torch.Generator().manual_seed(seed)
        start = time.perf_counter()
        stream = stream_tokens(
            loaded.model, tokens.long(), temperature=temperature, top_p=top_p, generator=draws, cache=cache
        )
        sys.stdout.write(prompt)
        times = [start]
        for text in _texts(loaded, tokens[0].tolist(), islice(stream, length), written):
            times.append(time.perf_counter())
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        _tell(console, tokens.shape[1], len(written), times, cache_bytes(cache))
        if isinstance(cache, BoundedCache):
            _tell_beside_exact(console, cache, tokens.shape[1] + len(written))


def _check_length(model: torch.nn.Module, num_tokens: int) -> None:
    """Refuse texts beyond a table of positions; rotary ones, made as they are needed, have no end."""
    most = getattr(model.config, "max_position_embeddings", None)
    is_rotary = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
    if most is not None and num_tokens - 1 > most and not is_rotary:
        raise ValueError(
            f"num_tokens must be small enough for the {most} positions that the model has, got {num_tokens} with the "
            "prompt; give fewer"
        )


def _bits(bits: int | None, budget: int | None) -> int | None:
    """Bits of merged keys, None for 32, as --bits says them."""
    if bits not in (None, *range(_FEWEST, _MOST + 1), _WHOLE):
        raise ValueError(f"--bits must be from {_FEWEST} to {_MOST}, or {_WHOLE}, got {bits}")
    if bits is not None and budget is None:
        raise ValueError("--bits say how the keys of a budget are kept; give --budget too")
    return {None: BITS_BY_DEFAULT, _WHOLE: None}.get(bits, bits)


def _bounded(loaded: LoadedModel, budget: int, bits: int | None, plan: Path | None) -> BoundedCache:
    """The cache of a budget."""
    if plan is not None:
        return BoundedCache(loaded.model, budget, plan=plan)
    return BoundedCache(loaded.model, budget, bits=bits)


def _texts(loaded: LoadedModel, prompt: list[int], stream: Iterator[Tensor], written: list[int]) -> Iterator[str]:
    """The text of each token, which `written` then has; ends with the model's own end of a text, if that comes."""
    decoder, ends = IncrementalDecoder(loaded.tokenizer, prompt), end_tokens(loaded.model)
    for token in map(int, stream):
        if token in ends:
            break
        written.append(token)
        yield decoder.decode(token)
    yield decoder.finish()


def _tell(console: Console, num_read: int, num_written: int, times: list[float], num_bytes: int) -> None:
    """Pace and memory: `times` has the start, each token's and the end's."""
    pace = max(num_written - 1, 0) / max(times[-1] - times[1], 1e-9)
    console.print(
        f"{num_read:,} tokens read and the first written after {times[1] - times[0]:.1f} s, {num_written:,} written, "
        f"{pace:,.1f} a second; the cache holds {num_bytes:,} bytes",
        highlight=False,
    )


def _tell_beside_exact(console: Console, cache: BoundedCache, num_tokens: int) -> None:
    """Print the bytes that the bounded layers keep, at most and at this length, beside those of exact attention."""
    bounded = [(layer, layer.config.label) for layer in cache.report if layer.config is not None]
    most, kept_bytes = (sum(layer.kept_bytes(number) for layer, _ in bounded) for number in (2**62, num_tokens))
    exactly = sum(layer.exact_bytes(num_tokens) for layer, _ in bounded)
    console.print(
        f"{len(bounded)} global layers by {together([label for _, label in bounded])}: they keep at most {most:,} "
        f"bytes, {kept_bytes:,} after {num_tokens:,} tokens; exact attention keeps {exactly:,} of them",
        highlight=False,
    )
