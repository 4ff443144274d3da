"""Plans of a whole model: calibrated on one text, to be measured on another.

Letters: B batch, H query heads, L tokens, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from linattn.hf import AttentionCall, LoadedModel
from linattn.lab.audit.recording import record
from linattn.lab.audit.records import PlanRow
from linattn.lab.audit.text import Text
from linattn.planning import Plan, plan, read_plans


def second_half(loaded: LoadedModel, text: Text, num_tokens: int) -> Text:
    """The half of a text that an audit of its beginning never reads.

    Args:
        loaded: model and tokenizer.
        text: the text whose first tokens are measured.
        num_tokens: how many.

    Returns:
        The second half of its characters.

    Raises:
        ValueError: if the measured tokens reach into it.
    """
    middle = len(text.content) // 2
    measured, first = (
        loaded.encode(part, num_tokens)["input_ids"].shape[1] for part in (text.content, text.content[:middle])
    )
    if first < measured:
        raise ValueError(
            f"{text.source} has {first} tokens in its first half, fewer than the {measured} to be measured: its second "
            "half is not free to calibrate on; name another text with --calibration, or read fewer --tokens"
        )
    return Text(f"second half of {text.source}", text.content[middle:])


class Planner:
    """A plan for every layer of a model, made one after the other on its attention to a text.

    Attributes:
        target: the error each head is to meet.
        source: of the calibration text.
        even_if_slower: whether methods are chosen that save nothing.
        plans: those made so far, one per layer, in order.
    """

    target: float
    source: str
    even_if_slower: bool
    plans: list[Plan]

    def __init__(
        self, loaded: LoadedModel, text: Text, *, target_error: float, num_tokens: int, even_if_slower: bool = False
    ) -> None:
        """Check what is asked for; nothing is planned yet.

        Args:
            loaded: model and tokenizer.
            text: the calibration text.
            target_error: relative error of a head's output to be met.
            num_tokens: tokens of the text to read, and the length the plans are for.
            even_if_slower: as in `linattn.plan`.

        Raises:
            ValueError: if the target is not positive and finite, or the text gives fewer than `num_tokens` tokens.
        """
        if not 0 < target_error < math.inf:
            raise ValueError(f"target_error must be positive and finite, got {target_error}; 0.1 is a good one")
        self.target, self.source, self.plans = target_error, text.source, []
        self.even_if_slower = even_if_slower
        self._model, self._inputs = loaded.model, loaded.encode(text.content, num_tokens)
        self._calls: tuple[AttentionCall, ...] = ()
        length = self._inputs["input_ids"].shape[1]
        if length < num_tokens:
            raise ValueError(
                f"{text.source} gives {length} tokens to calibrate on, wanted {num_tokens}; give a longer one, or a "
                "smaller num_tokens"
            )

    def plan(self, layer: int) -> Plan:
        """The plan of a layer, made now if it is not yet, with those of the layers before.

        Cost: two forward passes the first time, and `linattn.plan` per layer.

        Args:
            layer: number of the layer, of those that are audited.

        Returns:
            The plan.

        Raises:
            ValueError: as `linattn.plan`.
        """
        while layer >= len(self.plans):
            self.take(len(self.plans), self.made(len(self.plans)))
        return self.plans[layer]

    def made(self, layer: int) -> Plan:
        """The plan of a layer, made now whatever is there, and not taken over; any process can make it."""
        if not self._calls:
            self._calls = record(self._model, self._inputs).calls
        call = self._calls[layer]
        return plan(
            call.query,
            call.key,
            call.value,
            target_error=self.target,
            is_causal=call.is_causal,
            scale=call.scale,
            even_if_slower=self.even_if_slower,
        )

    def take(self, layer: int, made: Plan) -> None:
        """Take over a layer's plan, after those of the layers before; one that is there already stays."""
        if layer == len(self.plans):
            self.plans.append(made)

    def go_on_from(self, file: Path, rows: Iterable[PlanRow]) -> None:
        """Take over the plans that an earlier run of the same audit has made and measured.

        Args:
            file: written by `linattn.write_plans`; one that is not there, or is damaged, is passed over.
            rows: the earlier run's; plans of a file that chose otherwise are another audit's.
        """
        measured: dict[int, list[tuple[str, float]]] = {}
        for row in rows:
            measured.setdefault(row.layer, []).append((row.method, row.expected_error))
        try:
            found = read_plans(file)
        except (OSError, ValueError):
            return
        same = takewhile(lambda pair: _choices(pair[1]) == measured.get(pair[0]), enumerate(found))
        plans = [one for _, one in same]
        if len(plans) > len(self.plans):
            self.plans = plans


def _choices(one: Plan) -> list[tuple[str, float]]:
    """What a plan chose for each head, and the error it expects."""
    return [(head.method, head.expected_error) for head in one.heads]
