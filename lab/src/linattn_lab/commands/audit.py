"""The command `linattn audit`: `linattn_lab.commands.head_audit` does the work, imported when it runs."""

from __future__ import annotations

from pathlib import Path

import typer

from linattn_lab.commands import _audit_options as options


def audit(
    call: typer.Context,
    model: options.Model = None,
    text: options.TextFile = None,
    maps: options.Maps = None,
    full: options.Full = False,
    features: options.Features = None,
    tokens: options.Tokens = None,
    draws: options.Draws = None,
    seed: options.Seed = 0,
    out: options.Out = Path("report"),
    again: options.Again = False,
    plan_out: options.PlanOut = None,
    calibration: options.Calibration = None,
    budget: options.Budget = None,
    dtype: options.Dtype = None,
    text_kinds: options.TextKinds = None,
    passages: options.Passages = 1,
    kinds: options.Methods = None,
    tasks: options.Tasks = None,
    samples: options.Samples = 1,
) -> None:
    """Measure how wrong linear attention is on a model: every layer, head and method, and the whole model.

    Seven methods that decide, on MiniLM and 512 tokens about a minute on two cores; --full measures all, in about
    six. The command says how long it takes before it starts. Everything is measured next to exact attention and to
    averaging the values uniformly. Each figure is saved once taken: after an interruption the same command resumes.
    Another audit's file is renamed. Under torchrun layers and methods are dealt out to the processes; any number of
    them may resume.
    """
    # Help is not to wait for torch.
    from linattn_lab.commands.head_audit import audit_model

    audit_model(
        call,
        model,
        text,
        maps,
        full,
        features,
        tokens,
        draws,
        seed,
        out,
        again,
        plan_out,
        calibration,
        budget,
        dtype,
        text_kinds,
        passages,
        kinds,
        tasks,
        samples,
    )
