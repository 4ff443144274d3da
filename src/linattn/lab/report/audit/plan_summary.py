"""What an audit found of a plan: whether its heads keep what was expected of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from linattn.lab.audit.records import ModelRow, PlanRow
from linattn.lab.report._text import number
from linattn.planning.paying import Crossover, from_where
from linattn.planning.plans import EXACT
from linattn.records.tables import Table

# A head keeps its target if its error on another text is within this of it, and its expectation if within a factor.
TOLERANCE, FACTOR = 1.5, 2.0


@dataclass(frozen=True)
class PlanSummary:
    """A plan, measured.

    Attributes:
        target: the error each head was to meet.
        calibration: source of the text it was made on.
        heads: one row per head.
        model: the whole model with the plan in every layer.
        exact_flops: operations of exact attention per head and token, at the length measured.
        exact_numbers: numbers of the exact cache per query head.
        is_causal: whether the model keeps a cache between calls; an encoder keeps none.
        time_ratio: the whole model's time over its time with softmax; None in files without times.
        crossover: from which length on one layer's attention is faster than softmax; None where that was not timed.
        longest: tokens that the model takes at most; None where it does not say.
    """

    target: float
    calibration: str
    heads: tuple[PlanRow, ...]
    model: ModelRow
    exact_flops: int
    exact_numbers: int
    is_causal: bool
    time_ratio: float | None = None
    crossover: Crossover | None = None
    longest: int | None = None

    @property
    def approximate(self) -> tuple[PlanRow, ...]:
        """The heads that are not left exact."""
        return tuple(row for row in self.heads if row.method != EXACT)

    @property
    def kept(self) -> float:
        """Share of all heads whose measured error is at most 1.5 times the target."""
        return _share(row.error <= TOLERANCE * self.target for row in self.heads)

    @property
    def foretold(self) -> float | None:
        """Share of approximated heads whose expected error is within twice the measured; None where all are exact."""
        ours = self.approximate
        return _share(row.error / FACTOR <= row.expected_error <= row.error * FACTOR for row in ours) if ours else None

    def words(self) -> str:
        """The plan in a few sentences.

        Returns:
            The text.

        Example:
            >>> row = PlanRow(0, 0, "Expansion(num_centres=1)", 0.08, None, 0.1, 0.8, 100, 50)
            >>> model = ModelRow("planned", None, 0, 0.99, 0.98)
            >>> PlanSummary(0.1, "a text", (row,), model, 200, 400, True).words().split(" with ")[0]
            'Of 1 heads, 0 stay exact and 1 are approximated,'
        """
        heads, ours = self.heads, self.approximate
        flops = sum(row.flops_per_token for row in heads) / len(heads)
        bound, cosine = TOLERANCE * self.target, self.model.embedding_cosine
        time = "" if self.time_ratio is None else f" and {number(self.time_ratio)} × softmax's time for the whole model"
        text = (
            f"Of {len(heads)} heads, {len(heads) - len(ours)} stay exact and {len(ours)} are approximated, with "
            f"{number(flops / self.exact_flops)} of exact attention's operations in all{time}. Made on "
            f"{self.calibration}, measured on this text: {self.kept:.0%} of all heads have an error of at most "
            f"{number(bound)}; cosine of the embedding {number(cosine, 3)}. {self.paying()}"
        )
        if self.foretold is None:
            return text
        within = _share(row.error <= bound for row in ours)
        return (
            f"{text} Of the approximated heads alone, {within:.0%} do, and for {self.foretold:.0%} of them the "
            f"expected error is within a factor of {FACTOR:.0f} of the measured one."
        )

    def paying(self) -> str:
        """What it keeps beside the exact cache, from which length it is faster, and whether it saves anything."""
        kept = _mean([row.state_numbers for row in self.heads])
        smaller = kept < self.exact_numbers
        text = (
            f"It keeps {kept:,.0f} numbers per head, {'less' if smaller else 'no less'} than the "
            f"{self.exact_numbers:,} of the exact cache."
        )
        if self.crossover is not None:
            text = f"{text} {from_where(self.crossover, self.longest)}"
        if self.time_ratio is None or self.time_ratio < 1:
            return text
        if smaller and self.is_causal:
            return f"{text} Not to save time here: for memory perhaps."
        return f"{text} Do not: it saves nothing here."

    def table(self) -> Table:
        """One row per method, the most frequent first."""
        methods: dict[str, list[PlanRow]] = {}
        for row in self.heads:
            methods.setdefault(row.method, []).append(row)
        rows = [
            (
                label,
                str(len(found)),
                number(_mean([row.expected_error for row in found])),
                number(_mean([row.error for row in found])),
                number(max(row.error for row in found)),
                f"{found[0].state_numbers:,}",
                f"{found[0].flops_per_token:,}",
            )
            for label, found in sorted(methods.items(), key=lambda item: -len(item[1]))
        ]
        return Table(
            ("method", "heads", "expected", "measured", "worst", "numbers kept", "FLOPs per token"), tuple(rows)
        )

    def by_head(self) -> Table:
        """One row per head."""
        rows = [
            (
                f"{row.layer}.{row.head}",
                row.method,
                number(row.expected_error, 3),
                "–" if row.next_order_error is None else number(row.next_order_error, 3),
                number(row.error, 3),
                number(row.uniform_error, 3),
            )
            for row in self.heads
        ]
        return Table(("layer.head", "method", "expected", "by the next order", "measured", "averaging"), tuple(rows))


def _share(found: Iterable[bool]) -> float:
    """Share of truths."""
    truths = list(found)
    return sum(truths) / len(truths)


def _mean(values: list[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)
