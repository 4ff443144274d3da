"""Plans of a constant memory: which contender each global layer takes, of what share of the bytes, by measured KL.

Made on one passage and measured on others. Every step is checked end to end on the whole model, and the plain window is
among the candidates: a plan departs from it only for a KL that is lower by a margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

MARGIN = 0.95
"""A plan departs from the plain window for a KL of at most this share of the window's."""

# How many candidates beside the best are tried in single layers.
_RUNNERS_UP = 1


class Choice(NamedTuple):
    """What a layer keeps."""

    name: str  # of a candidate
    num_keys: int  # the layer's own budget, in exact keys


class Trial(NamedTuple):
    """What was measured end to end."""

    choices: tuple[Choice, ...]  # of each layer
    kl: float  # from the exact model


Measure = Callable[[tuple[Choice | None, ...]], float]
"""The KL of a choice for each layer, None for exact attention; inf where the bytes are too few for a candidate."""


def choose(candidates: Sequence[str], num_layers: int, budget: int, measure: Measure) -> list[Trial]:
    """Try candidates in all layers, then shares of the bytes, then the runner-up in single layers; the best is first.

    In every trial the layers have at most num_layers·budget keys' bytes. The plain window is one for all layers: what
    departs from it has none of it.

    Cost: a measurement per candidate, two per layer, and one.

    Args:
        candidates: names, the plain window first.
        num_layers: of the model that attend to all tokens.
        budget: in exact keys, per layer.
        measure: what was measured of choices.

    Returns:
        All trials that could be measured. The first is the choice: the least KL, or the plain window's where that is
        within the margin.
    """
    trials: dict[tuple[Choice, ...], float] = {}

    def tried(choices: tuple[Choice, ...]) -> Trial:
        """Measured, once."""
        if choices not in trials:
            trials[choices] = measure(choices)
        return Trial(choices, trials[choices])

    alike = [tried((Choice(name, budget),) * num_layers) for name in candidates]
    plain, *others = alike
    others.sort(key=lambda trial: trial.kl)
    best = others[0]
    if num_layers > 1 and best.kl < math.inf:
        one = best.choices[0]
        alone = [measure(tuple(one if place == n else None for n in range(num_layers))) for place in range(num_layers)]
        split = tuple(Choice(one.name, num_keys) for num_keys in shares(budget, alone))
        best = min(best, tried(split), key=lambda trial: trial.kl)
        for place in range(num_layers):
            for runner_up in others[1 : 1 + _RUNNERS_UP]:
                own = Choice(runner_up.choices[0].name, best.choices[place].num_keys)
                best = min(
                    best, tried((*best.choices[:place], own, *best.choices[place + 1 :])), key=lambda trial: trial.kl
                )
    chosen = best if best.kl <= MARGIN * plain.kl else plain
    rest = (Trial(choices, kl) for choices, kl in trials.items() if kl < math.inf)
    return [chosen, *(trial for trial in rest if trial != chosen)]


def shares(budget: int, alone: Sequence[float]) -> list[int]:
    """Keys of each layer, of which all have len(alone)·budget at most, by the KL of each where it alone is bounded.

        n_l in proportion to √KL_l,   but no fewer than a quarter of the budget

    Where KL_l falls as 1/n_l and the layers' sum, that is the least of the sum. The bound keeps what one text shows not
    to need, and another may.

    Example:
        >>> shares(512, [0.016, 0.011, 0.0001])
        [769, 638, 128]
        >>> shares(512, [0.0, 0.0])
        [512, 512]
    """
    roots, least = [max(kl, 0.0) ** 0.5 for kl in alone], max(budget // 4, 1)
    few: set[int] = set()
    while True:
        left, total = len(roots) * budget - least * len(few), sum(x for n, x in enumerate(roots) if n not in few)
        found = [
            least if n in few else int(left * x / total) if total > 0 else left // (len(roots) - len(few))
            for n, x in enumerate(roots)
        ]
        fewer = {n for n, keys in enumerate(found) if keys < least}
        if not fewer:
            return found
        few |= fewer
