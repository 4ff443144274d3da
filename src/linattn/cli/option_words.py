"""Errors of functions in the words of the command line: options in place of arguments."""

from __future__ import annotations

import re
from collections.abc import Collection

import typer

from linattn.cli.app import app

# Options by the names that functions have for them, for errors that come from there.
OPTIONS = {
    "adapter_rank": "--adapters",
    "batch_size": "--batch",
    "feature_map": "--map",
    "features": "--features",
    "head_dim": "--head-dim",
    "heads": "--heads",
    "hidden_size": "--width",
    "kinds": "--method",
    "intermediate_size": "--hidden",
    "learning_rate": "--learning-rate",
    "method": "--map",
    "methods": "--map",
    "num_attention_heads": "--heads",
    "num_features": "--features",
    "num_hidden_layers": "--layers",
    "num_parts": "--parts",
    "num_passages": "--passages",
    "num_samples": "--samples",
    "num_tokens": "--tokens",
    "redraw_every": "--redraw",
    "tasks": "--task",
    "top_p": "--top-p",
    **{name: f"--{name}" for name in ("batch", "budget", "context", "device", "draws", "dropout", "dtype", "gate")},
    **{name: f"--{name}" for name in ("gated", "lengths", "minutes", "pattern", "positions", "repeats", "seed")},
    **{name: f"--{name}" for name in ("steps", "temperature")},
}
# A written form with its options is left as it is; other names are options where they are given, judged, or no words.
_NAMED = re.compile(rf"\w+\(.*?\)+|\b({'|'.join(OPTIONS)})\b(=True\b|=| must\b)?")


def in_options(text: str, command: str) -> str:
    """A message of a function in the words of the command line.

    Example:
        >>> in_options("num_features must be even, got num_features=7; Sderf(num_features=8) has features", "convert")
        '--features must be even, got --features 7; Sderf(num_features=8) has features'
    """
    group = typer.main.get_group(app)
    asked = group.get_command(typer.Context(group), command)
    known = {option for parameter in asked.params for option in parameter.opts} if asked else set()

    def option(found: re.Match[str]) -> str:
        """One name."""
        name, after = found[1], found[2]
        word = None if name is None or (after is None and "_" not in name) else _word(name, known)
        return found[0] if word is None else word + {"=": " ", " must": " must"}.get(after or "", "")

    return _NAMED.sub(option, text)


def _word(name: str, known: Collection[str]) -> str | None:
    """Option of a command for an argument; None where it has no such option."""
    if OPTIONS[name] in known:
        return OPTIONS[name]
    # The width of a head follows from two options of training.
    return "--width over --heads" if name == "head_dim" and "--width" in known else None
