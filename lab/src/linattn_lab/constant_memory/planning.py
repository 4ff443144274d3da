"""A plan of the global layers' bytes, chosen by the KL of candidates on a passage."""

from __future__ import annotations

import math
from collections.abc import Callable

from linattn.hf import LoadedModel
from linattn.kv_cache.budget import Sizes
from linattn.kv_cache.layer_plans import PLAIN, MemoryPlan, TrialRecord
from linattn.records.texts import Text
from linattn_lab.constant_memory.answering import Probe, probed
from linattn_lab.constant_memory.candidates import CANDIDATES, filled
from linattn_lab.constant_memory.passages import TokenText
from linattn_lab.constant_memory.plans import Choice, Trial, choose
from linattn_lab.constant_memory.read_passage import ReadPassage, measured_tokens
from linattn_lab.contenders.contender import Contender


def plan_memory(
    loaded: LoadedModel,
    text: Text,
    budget: int,
    *,
    num_tokens: int,
    begin: Callable[[str], None],
    probe: Probe | None = None,
    is_common: bool = False,
) -> MemoryPlan:
    """Choose a candidate and a share of the bytes for each global layer, by KL on the first passage of a text.

    Cost: three forward passes, one per candidate, and two per global layer.

    Args:
        loaded: a causal language model with softmax attention.
        text: one that is not measured.
        budget: in exact keys and values, per layer and key/value head.
        num_tokens: of the passage.
        begin: told what is tried.
        probe: of the model, where there is one.
        is_common: whether all layers are to have the same.

    Returns:
        A `MemoryPlan`, whose KL is the plain window's or lower.

    Raises:
        ValueError: if the model is no language model, the text too short, or the budget too small for a plain window.
    """
    num_measured = measured_tokens(loaded, num_tokens)
    layers, _, _, sizes = probe or probed(loaded.model)
    contender_of(Choice(PLAIN, budget), sizes)
    content = TokenText.of(loaded, text)
    tokens = content.passage(content.starts(num_tokens, 1)[0], num_tokens)
    passage = ReadPassage(loaded, layers, tokens, num_measured)

    def measure(choices: tuple[Choice | None, ...]) -> float:
        """The KL of a choice for each layer."""
        try:
            contenders = {place: contender_of(one, sizes) for place, one in enumerate(choices) if one is not None}
        except ValueError:
            return math.inf
        words = dict.fromkeys(contender.label for contender in contenders.values())
        begin(f"Planning at {budget:,} keys: {', '.join(words)}")
        return passage.kl(layers.by(contenders))

    trials = choose(tuple(CANDIDATES), len(layers.names), budget, measure, is_common=is_common)
    best = trials[0]
    return MemoryPlan(
        model=loaded.name,
        budget=budget,
        num_tokens=num_tokens,
        calibration=text.source,
        calibration_sha256=text.sha256,
        layers=list(layers.numbers),
        choices=[one.name for one in best.choices],
        budgets=[one.num_keys for one in best.choices],
        labels=[contender_of(one, sizes).label for one in best.choices],
        kl=best.kl,
        window_kl=next(trial.kl for trial in trials if {one.name for one in trial.choices} == {PLAIN}),
        trials=list(map(_record, trials)),
    )


def contender_of(choice: Choice, sizes: Sizes) -> Contender:
    """What a layer keeps; ValueError where its bytes are too few."""
    try:
        return filled(CANDIDATES[choice.name], choice.num_keys, sizes)
    except ValueError as error:
        raise ValueError(f"{choice.name}: {error}") from None


def _record(trial: Trial) -> TrialRecord:
    """A trial as a file has it."""
    return TrialRecord([one.name for one in trial.choices], [one.num_keys for one in trial.choices], trial.kl)
