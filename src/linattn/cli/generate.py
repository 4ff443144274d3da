"""The command `linattn generate`: its options; `linattn.cli.generation` does the work, imported when it runs."""

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
Prompt = Annotated[str | None, typer.Option(help="The prompt: the text to continue.")]
PromptFile = Annotated[
    typer.FileText | None,
    typer.Option(
        metavar="FILE",
        encoding="utf-8-sig",
        help="Read the prompt from this file (UTF-8), or from the standard input for -. The prompt is then not "
        "printed, and a line end at its end is dropped.",
    ),
]
Length = Annotated[
    int,
    typer.Option(
        "--tokens", metavar="N", min=1, help="Generate at most N tokens; a model of bytes has one token per byte."
    ),
]
Temperature = Annotated[
    float, typer.Option(help="0: take the likeliest token (greedy); 1: sample from the model's probabilities.")
]
TopP = Annotated[
    float, typer.Option(help="Sample from the likeliest tokens whose probabilities add up to this (nucleus sampling).")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the draws.")]
Budget = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=2**20,
        help="Bound the KV cache of a softmax model to N tokens: the bytes of N exact keys and values in the model's "
        "dtype, per layer and key/value head. Older tokens are quantized, then merged. Full if left out.",
    ),
]
Bits = Annotated[
    int | None,
    typer.Option(help="With --budget: quantize to this many bits, 2 to 8; 32 does not quantize. 4 if left out."),
]
Recall = Annotated[
    Literal["near", "middle", "far"] | None,
    typer.Option(
        help="With --budget: near (the default) has the least median KL divergence; middle merges fewer tokens, and "
        "retrieves facts from farther back; far merges the fewest, and quantizes to 3 bits."
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="With --budget: use the per-layer budgets that linattn audit --budget N --plan-out FILE wrote.",
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="With --budget: measure the KL divergence from the full cache at the end of the prompt. Reads the prompt "
        "a second time, with the full cache in memory.",
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
    """Generate text in constant memory, with a bounded KV cache (--budget) or a linear model.

    The text goes to the standard output; progress and, at the end, throughput and bytes of the cache to the standard
    error. --budget adds how many tokens are exact, quantized and merged, and the bytes of the full cache; --plan and
    --measure add the KL divergence from it. Example: linattn generate gemma-3-270m --budget 512 --prompt "Once"
    """
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give one of --prompt TEXT and --prompt-file FILE")
    if prompt is not None and prompt.encode(errors="ignore").decode() != prompt:
        raise typer.BadParameter("--prompt is no text in UTF-8; give it by --prompt-file, saved in UTF-8")
    if budget is None and (bits is not None or recall is not None or plan is not None or measure):
        raise typer.BadParameter("--bits, --recall, --plan and --measure are of a bounded cache; give --budget too")
    if plan is not None and (bits is not None or recall is not None):
        raise typer.BadParameter("--plan says how each layer's keys are kept; give no --bits and no --recall")
    if recall in ("middle", "far") and bits is not None:
        raise typer.BadParameter(f"--recall {recall} has bits of its own; give no --bits")
    if bits not in (None, *range(2, 9), 32):
        raise typer.BadParameter(f"--bits must be from 2 to 8, or 32, got {bits}")
    if plan is not None and not plan.is_file():
        raise typer.BadParameter(f"--plan: there is no file {plan}; linattn audit --plan-out FILE writes one")
    # Help is not to wait for torch.
    from linattn.cli.generation import Keeping, generation

    keeping = None if budget is None else Keeping(budget, bits, recall, plan, measure)
    text = prompt_file or prompt or ""
    generation(model, text, num_tokens=length, temperature=temperature, top_p=top_p, seed=seed, keeping=keeping)
