"""Claims of the texts linattn was founded on and of the Performer paper, each measured: one file, one claim.

    derivation/        "From Softmax to Performer Linear Attention", a derivation in English and Chinese
    time_to_perform/   "Time to Perform", a note on the Performer paper
    kernel_trick/      "The Kernel Trick: Math Behind Linearization", a tutorial
    overview/          an overview of linear attention, in Chinese
    performer/         the Performer paper (arXiv 2009.14794)
    beyond/            what they leave out

A file in one of these rooms is an experiment; there is no other list.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import cast

from linattn_lab.experiments.experiment import Experiment

ROOMS = ("derivation", "time_to_perform", "kernel_trick", "overview", "performer", "beyond")


def _experiments() -> dict[str, Experiment]:
    """Every experiment by its name on the command line, room by room."""
    found: dict[str, Experiment] = {}
    for room in ROOMS:
        package = import_module(f"{__name__}.{room}")
        for module in iter_modules(package.__path__):
            if not module.name.startswith("_"):
                name = module.name.replace("_", "-")
                if name in found:
                    raise ImportError(f"two experiments are called {name}; rename one of the files")
                found[name] = cast(Experiment, import_module(f"{package.__name__}.{module.name}"))
    return found


EXPERIMENTS: dict[str, Experiment] = _experiments()
"""Every experiment by name, as the command line has it."""
