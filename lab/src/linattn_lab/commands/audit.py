"""The command `linattn audit`: `head_audit` or `memory_audit` beside it does the work, imported when it runs."""

from __future__ import annotations

from contextlib import ExitStack
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
    """Measure the error of linear attention on a model; with --budget, that of a bounded KV cache.

    Without --budget: measure the error of each layer and head and of the entire model, by seven methods, beside exact
    attention (error 0) and uniform attention, which averages the values. The packaged MiniLM and 512 tokens take half a
    minute on two cores; --full measures all methods in some minutes.

    With --budget: measure KL divergence, perplexity, needle retrieval, memory and time of a language model, beside the
    full cache.

    The command prints an estimate of its time before it starts, and saves each figure as it is measured. Run it again
    to resume, with any number of processes: under torchrun they share layers and methods. Times depend on threads: with
    --budget resume with as many (OMP_NUM_THREADS). A file of another audit in the folder is renamed.

    Example: linattn audit gemma-3-270m --budget 512 --text FILE
    """
    # Help is not to wait for torch.
    from rich.console import Console

    from linattn.cli.new_folder import check_same_options
    from linattn.processes import launched
    from linattn.records.files import locked
    from linattn_lab.commands import head_audit, memory_audit

    with launched() as processes, ExitStack() as opened:
        console = Console(quiet=not processes.is_first)
        check_same_options(processes, call)
        processes.first_does(lambda: opened.enter_context(locked(out)))
        if budget is None:
            are_mixed = any((text_kinds, kinds, tasks, dtype, plan_out, calibration)) or passages != 1 or samples != 1
            heads = head_audit.Asked(model, text, maps, full, features, tokens, draws, seed, out, again, are_mixed)
            head_audit.audit_heads(heads, console, is_first=processes.is_first)
        else:
            words = (model, text, text_kinds, budget, tokens, dtype, passages, kinds, tasks, samples)
            others = {"--map": maps, "--full": full or None, "--features": features, "--draws": draws}
            others["--seed"] = seed or None
            cache = memory_audit.Asked(*words, out, again, plan_out, calibration)
            memory_audit.audit_memory(cache, others, console, is_first=processes.is_first)
