"""The command `linattn bench`: its options; `linattn_lab.commands.benchmark` does the work, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from linattn_lab.commands._terminal import whole_numbers

Lengths = Annotated[str, typer.Option(metavar="L,L,…", help="Context lengths, in tokens.")]
Map = Annotated[
    str,
    typer.Option(
        "--map",
        metavar="NAME",
        help='Measure this method, as in "FavorPlus + window 64" or "window 32 + merged 128".',
    ),
]
Features = Annotated[int | None, typer.Option(min=1, help="Features of a map that takes any number; 256 if left out.")]
Backward = Annotated[bool, typer.Option("--backward", help="Measure the gradients of queries, keys and values too.")]
Memory = Annotated[bool, typer.Option(help="Measure peak memory, each figure in a process of its own.")]


def bench(
    lengths: Lengths = "512,1024,2048,4096,8192,16384",
    map_: Map = "FavorPlus",
    features: Features = None,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a query, key and value.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Dtype of all tensors.")] = "float32",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device to measure on.")] = "cpu",
    causal: Annotated[bool, typer.Option("--causal", help="Attend causally.")] = False,
    backward: Backward = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each method at each length.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the map's draw and of the inputs.")] = 0,
    memory: Memory = True,
    out: Annotated[Path, typer.Option(help="Folder for bench.jsonl and index.html.")] = Path("report"),
) -> None:
    """Measure the length from which linear attention is faster than exact attention, on your shapes.

    Each result is verified before it is timed. A map with statistics is fitted before; unfitted, it would fit in every
    call, and be slower. Printed are time by length, the crossover, peak memory and the error.
    After an interruption, run the same command again to resume.

    Example: linattn bench --lengths 512,2048,8192 --map "window 32 + merged 96"
    """
    # Help is not to wait for torch.
    from linattn.cli.terminal import of_option
    from linattn.methods.method import parse_method
    from linattn_lab.bench.settings import Settings
    from linattn_lab.commands.benchmark import benchmark

    with of_option("--map"):
        parse_method(map_)
    settings = Settings(
        lengths=whole_numbers(lengths, "--lengths", "512,1024,2048"),
        map=map_,
        features=features,
        heads=heads,
        head_dim=head_dim,
        batch=batch,
        dtype=dtype,
        is_causal=causal,
        backward=backward,
        repeats=repeats,
        seed=seed,
        device=device,
        memory=memory,
    )
    benchmark(settings, out)
