"""Check that a launcher started every process alike, before they work together."""

from __future__ import annotations

import typer

from linattn.processes import Processes

# The first process alone writes.
_OF_FIRST = ("out", "plan_out")


def check_same_options(processes: Processes, call: typer.Context) -> None:
    """Refuse a command whose processes were started with different arguments, on all of them; one small gather."""
    asked = {"command": str(call.info_name)}
    for parameter in call.command.params:
        if parameter.name in call.params and parameter.name not in _OF_FIRST:
            asked[parameter.opts[0]] = str(call.params[parameter.name])
    every = processes.gather(asked)
    differing = []
    for name in dict.fromkeys(name for each in every for name in each):
        values = [each.get(name, "none") for each in every]
        if len(set(values)) > 1:
            holders = ", ".join(f"process {rank} has {value}" for rank, value in enumerate(values))
            differing.append(f"{name} ({holders})")
    if differing:
        raise ValueError(
            f"every process must be started with the same command, got different ones: {'; '.join(differing)}; start "
            "all of them by one torchrun, or give each machine the same arguments"
        )
