"""The command `linattn generate`: its options; `linattn.cli.generation` does the work, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[
    str,
    typer.Argument(
        help="A folder (of linattn train, linattn convert, or any causal language model), a GGUF file, a Hugging Face "
        'name, or "gemma-3-270m", which comes as a package.'
    ),
]
Prompt = Annotated[str | None, typer.Option(help="The prompt: the text before what is generated.")]
PromptFile = Annotated[
    typer.FileText | None,
    typer.Option(
        metavar="FILE",
        encoding="utf-8",
        help="A file with the prompt in UTF-8, or - for the standard input. The prompt is not printed then, and a line "
        "end at its end is left out.",
    ),
]
Length = Annotated[
    int,
    typer.Option(
        "--tokens", metavar="N", min=1, help="How many tokens at most; a model of bytes has one token per byte."
    ),
]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token, 1 draws as the model says.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens of so much probability.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the draws.")]
Budget = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=2**20,
        help="Bound what each global layer of a softmax model keeps to the bytes of N keys: quantize, then merge.",
    ),
]
Bits = Annotated[
    int | None,
    typer.Option(
        help="With a budget: quantize merged keys and values to 2 to 8 bits a number; 32: do not. 4 if left out."
    ),
]
Recall = Annotated[
    Literal["near", "far"] | None,
    typer.Option(
        help="With a budget: near, the default, for the least KL divergence; far to keep what was said long ago, in "
        "fewer bits."
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
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="With a budget: measure the KL divergence from the full cache on the end of the prompt. Reads the prompt "
        "a second time, with the full cache: its memory, and about the seconds of the first time.",
    ),
]


def generate(
    model: Model,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    length: Length = 256,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    budget: Budget = None,
    bits: Bits = None,
    recall: Recall = None,
    plan: PlanFile = None,
    measure: Measure = False,
) -> None:
    """Go on with a text, token by token, in constant memory where attention is linear or has a budget.

    The text goes to the standard output. The standard error has a progress bar while a long prompt is read, and at the
    end the throughput and the bytes of the cache; with a budget also how many tokens were merged, what a plan or
    --measure says of the KL divergence, and the bytes of the full cache.
    """
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give one of --prompt TEXT and --prompt-file FILE")
    if budget is None and (bits is not None or recall is not None or plan is not None or measure):
        raise typer.BadParameter("--bits, --recall, --plan and --measure are of a bounded cache; give --budget too")
    if plan is not None and (bits is not None or recall is not None):
        raise typer.BadParameter("--plan says how each layer's keys are kept; give no --bits and no --recall")
    if recall == "far" and bits is not None:
        raise typer.BadParameter("--recall far has bits of its own; give no --bits")
    if bits not in (None, *range(2, 9), 32):
        raise typer.BadParameter(f"--bits must be from 2 to 8, or 32, got {bits}")
    # Help is not to wait for torch.
    from linattn.cli.generation import Draws, generation
    from linattn.cli.keeping import Keeping

    generation(
        model,
        prompt_file or prompt or "",
        num_tokens=length,
        draws=Draws(temperature, top_p, seed),
        keeping=None if budget is None else Keeping(budget, bits, recall, plan, measure),
    )
