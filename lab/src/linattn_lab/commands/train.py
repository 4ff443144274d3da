"""The command `linattn train`: its options; `linattn_lab.commands.training` does the work, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_Text = Annotated[
    list[Path] | None,
    typer.Option(
        help="Train on this text file, or on the text files of this folder; may be repeated. Python's own sources if "
        "left out. Hidden files and files that are not UTF-8 are skipped and counted."
    ),
]
_Pattern = Annotated[str, typer.Option(help='A letter per block, repeated: "l" linear, "s" softmax, as in "llls".')]
_Map = Annotated[
    str, typer.Option("--map", metavar="NAME", help='A map, as in "FavorPlus" or "LearnedExponential + window 64".')
]
_Features = Annotated[
    int, typer.Option("--features", metavar="R", min=1, help="Features of a map that takes any number.")
]
_Positions = Annotated[str, typer.Option(help='Position encoding of linattn.positions, as "Rotary", or "none".')]
_Gate = Annotated[
    str | None,
    typer.Option(
        help='Gate: "ForgetGate", "Alibi", "RetNet" or "none".', show_default="ForgetGate where a block is gated"
    ),
]
_Layers = Annotated[int, typer.Option("--layers", min=1, help="Number of blocks.")]
_Width = Annotated[int, typer.Option("--width", min=1, help="Width of a token, E.")]
_Heads = Annotated[int, typer.Option("--heads", min=1, help="Heads of each block.")]
_Hidden = Annotated[int | None, typer.Option("--hidden", min=1, help="Width inside the MLPs; 8/3 of E if left out.")]
_Batch = Annotated[int, typer.Option("--batch", min=1, help="Texts per step.")]
_Redraw = Annotated[int | None, typer.Option("--redraw", metavar="N", min=1, help="Redraw random maps every N steps.")]
_Parts = Annotated[int, typer.Option(metavar="N", min=1, help="Under torchrun: cut each text into N parts.")]
_Shard = Annotated[
    bool,
    typer.Option(
        "--shard", help="Under torchrun: split weights, gradients and the optimizer's moments over processes."
    ),
]
_Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the finished training in OUT, with the same options, until it has --minutes or --steps in all.",
    ),
]


def train(
    call: typer.Context,
    out: Annotated[Path, typer.Argument(help="A new folder for the model and its report.")],
    text: _Text = None,
    pattern: _Pattern = "l",
    method: _Map = "LearnedExponential",
    num_features: _Features = 64,
    positions: _Positions = "Rotary(require_relative=False)",
    gate: _Gate = None,
    gated: Annotated[str, typer.Option(help='Blocks that have the gate: "l" linear, "s" softmax, "ls" both.')] = "l",
    num_hidden_layers: _Layers = 4,
    hidden_size: _Width = 128,
    num_attention_heads: _Heads = 4,
    intermediate_size: _Hidden = None,
    dropout: Annotated[float, typer.Option(help="Dropout rate.")] = 0.0,
    context: Annotated[int, typer.Option(min=1, help="Context length in bytes.")] = 4096,
    batch_size: _Batch = 1,
    minutes: Annotated[float, typer.Option(help="Minutes of training.")] = 15.0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, in place of --minutes.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 4e-3,
    redraw_every: _Redraw = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, draws and the order of texts.")] = 0,
    parts: _Parts = 1,
    shard: _Shard = False,
    resume: _Resume = False,
) -> None:
    """Train a language model of bytes with linear or softmax attention, and measure its bits per byte.

    Text is held out for validation and the test: files, of a hundred or more, or else the last part of each file.
    Validation takes at most a tenth of the time. Ctrl-C ends the training and keeps the best weights.

    After a kill, run the same command again to resume, with any number of processes: under torchrun they share the
    texts of a step, or with --parts the parts of each text. OUT/resume has the last checkpoint, four times the model's
    size: delete it if you will not use --resume.

    Example: linattn train OUT --minutes 15 --pattern llls --gate ForgetGate
    """
    # Help is not to wait for torch.
    from linattn.hf import LinearLMConfig
    from linattn_lab.commands.training import Asked, gate_of, training
    from linattn_lab.pretraining import TrainConfig

    model = LinearLMConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        intermediate_size=intermediate_size,
        pattern=pattern,
        method=method,
        num_features=num_features,
        positions=None if positions == "none" else positions,
        gate=gate_of(gate, gated, pattern),
        gated=gated,
        dropout=dropout,
        seed=seed,
    )
    config = TrainConfig(context, batch_size, minutes, steps, learning_rate, redraw_every, seed)
    # Of "." or a link the name is elsewhere.
    training(call, out.resolve(), Asked(tuple(text or ()), model, config, parts, shard, resume))
