"""From an audit's rows to one line per method and width."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from linattn.methods.measures import exact_state_numbers
from linattn.methods.method import parse_method
from linattn_lab.audit.grid import AuditGrid
from linattn_lab.audit.records import AUDIT, EXACT, UNIFORM, AuditRow, Header, HeadRow, ModelRow, RankRow
from linattn_lab.crossover import Crossover
from linattn_lab.report._text import method_words
from linattn_lab.report.audit.explored import Explored, explored_of
from linattn_lab.report.audit.times import Times, times_of

# Less gain over averaging than this is not worth a map.
SMALL_GAIN = 0.05


@dataclass(frozen=True)
class MeanAndSpread:
    """A mean and its spread over draws.

    Attributes:
        mean: mean over draws.
        spread: standard deviation over draws; None with fewer than two, or where the mean is not finite.
    """

    mean: float
    spread: float | None = None


@dataclass(frozen=True)
class Line:
    """One method at one width, over all heads and draws.

    Attributes:
        map: the method's written form.
        features: R, the map's width.
        state_numbers: numbers kept per head.
        flops_per_token: operations per head and token.
        draws: how many draws were measured.
        error: relative output error, mean over heads.
        median_error: median over heads, mean over draws.
        uniform_error: the same as `error` for uniform attention.
        better_heads: share of heads with less error than uniform attention, mean over draws.
        total_variation: of the attention rows, mean over heads.
        kl: mean over heads, in nats; None where some head has none.
        predicted_ratio: median over heads of the predicted error over uniform attention's; None without a closed form.
        embedding_cosine: of the whole model, to the exact one.
        token_cosine: of the whole model, mean over tokens.
        head_ratios: error over uniform attention's of `[layer][head]`, mean over draws.
        time_ratio: the whole model's time over its time with softmax, medians; None in files without times.
        crossover: from which length on one layer's attention is faster than softmax; None where that was not timed.
    """

    map: str
    features: int
    state_numbers: int
    flops_per_token: int
    draws: int
    error: MeanAndSpread
    median_error: float
    uniform_error: float
    better_heads: float
    total_variation: MeanAndSpread
    kl: float | None
    predicted_ratio: float | None
    embedding_cosine: MeanAndSpread
    token_cosine: MeanAndSpread
    head_ratios: tuple[tuple[float, ...], ...]
    time_ratio: float | None = None
    crossover: Crossover | None = None

    @property
    def words(self) -> str:
        """The method with its width, where it has a map."""
        return method_words(self.map, self.features)

    @property
    def ratio(self) -> float:
        """Mean error over that of uniform attention."""
        return over(self.error.mean, self.uniform_error)

    @property
    def verdict(self) -> str:
        """How the map stands to uniform attention, its spread over draws counted against it.

        "better", "hardly better" or "no better" than uniform attention.
        """
        worst = self.ratio + over(self.error.spread or 0.0, self.uniform_error)
        if not worst < 1:
            return "no better"
        return "better" if self.ratio < 1 - SMALL_GAIN else "hardly better"


@dataclass(frozen=True)
class Baseline:
    """Exact attention or uniform attention in every layer.

    Attributes:
        name: "exact" or "uniform".
        error: mean relative output error over heads.
        total_variation: mean over heads.
        kl: mean over heads, in nats.
        embedding_cosine: of the whole model, to the exact one.
        token_cosine: of the whole model, mean over tokens.
    """

    name: str
    error: float
    total_variation: float
    kl: float | None
    embedding_cosine: float
    token_cosine: float


@dataclass(frozen=True)
class Limit:
    """The attention matrices cut to one rank.

    Attributes:
        rank: r, how many singular values are kept.
        state_numbers: what a map of r features keeps.
        error: of the output, mean over heads.
    """

    rank: int
    state_numbers: int
    error: float


@dataclass(frozen=True)
class AuditSummary:
    """An audit, summed up.

    Attributes:
        header: its circumstances.
        lines: one per map and width, in the order measured.
        baselines: exact, then uniform.
        uniform_errors: error of uniform attention of `[layer][head]`.
        limits: of the attention matrices cut to a rank, narrowest first; none where the text was too long for them.
        explored: a few attention rows of each head under each method; None in files without them.
        unfinished: methods of which some width or draw is not measured yet, in the order they will be.
    """

    header: Header
    lines: tuple[Line, ...]
    baselines: tuple[Baseline, Baseline]
    uniform_errors: tuple[tuple[float, ...], ...]
    limits: tuple[Limit, ...]
    explored: Explored | None = None
    unfinished: tuple[str, ...] = ()

    @property
    def exact_numbers(self) -> int:
        """Numbers per head that exact attention keeps of the text."""
        header = self.header
        return exact_state_numbers(header.num_tokens, head_dim=header.head_dim, value_dim=header.value_dim)


def summarise_audit(path: Path) -> AuditSummary:
    """Read audit.jsonl, finished or not, and sum up what was measured to its end.

    Raises:
        ValueError: if the file is none of `linattn audit`, or none of its methods was measured to its end.
    """
    header, rows = AUDIT.so_far(path)
    measured = {(row.map, row.features, row.draw) for row in rows if isinstance(row, ModelRow)}
    heads: dict[tuple[str, int], list[HeadRow]] = {}
    models: dict[tuple[str, int | None], list[ModelRow]] = {}
    for row in rows:
        if isinstance(row, HeadRow) and (row.map, row.features, row.draw) in measured:
            heads.setdefault((row.map, row.features), []).append(row)
        elif isinstance(row, ModelRow):
            models.setdefault((row.map, row.features), []).append(row)
    baselines = {name: models.pop((name, None), []) for name in (EXACT, UNIFORM)}
    if not heads or set(models) != set(heads) or not all(baselines.values()):
        raise ValueError(
            f"{path} is no whole audit: rows of some map or baseline are missing, or no method is measured to its end "
            "yet; run the audit again"
        )
    _check_heads(path, header, heads.values())
    reference, times = next(iter(heads.values())), times_of(rows)
    return AuditSummary(
        header=header,
        lines=tuple(_line(header, heads[label, features], models[label, features], times) for label, features in heads),
        baselines=(_exact(baselines[EXACT][0]), _uniform(baselines[UNIFORM][0], reference)),
        uniform_errors=_by_head(header, reference, lambda row: row.uniform_error),
        limits=_limits(rows),
        explored=explored_of(header, rows),
        unfinished=_unfinished(header, models),
    )


def _check_heads(path: Path, header: Header, found: Iterable[list[HeadRow]]) -> None:
    """Refuse a file that lacks a head of some map, or has one twice."""
    wanted: Counter[tuple[int, int]] | None = None
    for rows in found:
        for draw in {row.draw for row in rows}:
            heads = Counter((row.layer, row.head) for row in rows if row.draw == draw)
            wanted = heads if wanted is None else wanted
            if heads != wanted or {layer for layer, _ in heads} != set(range(header.num_layers)):
                raise ValueError(f"{path} is no whole audit: {rows[0].map} has not one row per head; measure again")


def _unfinished(header: Header, models: Mapping[tuple[str, int | None], list[ModelRow]]) -> tuple[str, ...]:
    """Methods that the header announces and that are not measured at all widths with all draws."""
    found = Counter(label for (label, _), rows in models.items() for _ in rows)
    methods = tuple(map(parse_method, header.maps))
    wanted = AuditGrid(methods, tuple(header.features), header.draws, max(header.seed, 0)).configurations()
    counts = Counter(configuration.method.label for configuration in wanted)
    return tuple(label for label, count in counts.items() if found[label] < count)


def _line(header: Header, heads: list[HeadRow], models: list[ModelRow], times: Times) -> Line:
    """One map at one width."""
    label, features = heads[0].map, heads[0].features
    draws: dict[int, list[HeadRow]] = {}
    for row in heads:
        draws.setdefault(row.draw, []).append(row)

    def over_heads(value: Callable[[HeadRow], float]) -> list[float]:
        """Mean over heads, one per draw."""
        return [fmean(value(row) for row in rows) for rows in draws.values()]

    return Line(
        map=label,
        features=features,
        state_numbers=heads[0].state_numbers,
        flops_per_token=heads[0].flops_per_token,
        draws=len(draws),
        error=_mean_and_spread(over_heads(lambda row: row.error)),
        median_error=fmean(median(row.error for row in rows) for rows in draws.values()),
        uniform_error=fmean(row.uniform_error for row in heads),
        better_heads=fmean(over_heads(lambda row: float(row.error < row.uniform_error))),
        total_variation=_mean_and_spread(over_heads(lambda row: row.total_variation)),
        kl=_existing((row.kl for row in heads), fmean),
        predicted_ratio=_existing((row.predicted_ratio for row in heads), median),
        embedding_cosine=_mean_and_spread([row.embedding_cosine for row in models]),
        token_cosine=_mean_and_spread([row.token_cosine for row in models]),
        head_ratios=_by_head(header, heads, lambda row: over(row.error, row.uniform_error)),
        time_ratio=times.ratios.get((label, features)),
        crossover=times.crossovers.get((label, features)),
    )


def _exact(row: ModelRow) -> Baseline:
    """The exact model, whose errors are 0 by definition."""
    return Baseline(row.map, 0.0, 0.0, 0.0, row.embedding_cosine, row.token_cosine)


def _uniform(row: ModelRow, heads: list[HeadRow]) -> Baseline:
    """Uniform attention, whose errors every head row repeats."""
    return Baseline(
        row.map,
        fmean(head.uniform_error for head in heads),
        fmean(head.uniform_total_variation for head in heads),
        _existing((head.uniform_kl for head in heads), fmean),
        row.embedding_cosine,
        row.token_cosine,
    )


def _limits(rows: Iterable[AuditRow]) -> tuple[Limit, ...]:
    """Mean errors by rank."""
    found: dict[int, list[RankRow]] = {}
    for row in rows:
        if isinstance(row, RankRow):
            found.setdefault(row.rank, []).append(row)
    return tuple(
        Limit(rank, found[rank][0].state_numbers, fmean(row.error for row in found[rank])) for rank in sorted(found)
    )


def _by_head(header: Header, heads: list[HeadRow], value: Callable[[HeadRow], float]) -> tuple[tuple[float, ...], ...]:
    """A figure of [layer][head], mean over draws."""
    found: dict[tuple[int, int], list[float]] = {}
    for row in heads:
        found.setdefault((row.layer, row.head), []).append(value(row))
    widths = [1 + max(head for at, head in found if at == layer) for layer in range(header.num_layers)]
    return tuple(tuple(fmean(found[layer, head]) for head in range(width)) for layer, width in enumerate(widths))


def over(error: float, uniform_error: float) -> float:
    """Error over that of averaging; where averaging is exact, 1 if the error is 0 too and infinity if not."""
    if uniform_error == 0:
        return math.inf if error else 1.0
    return error / uniform_error


def _mean_and_spread(values: list[float]) -> MeanAndSpread:
    """Mean and standard deviation over draws."""
    mean = fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return MeanAndSpread(mean)
    return MeanAndSpread(mean, stdev(values))


def _existing(values: Iterable[float | None], summed_up: Callable[[list[float]], float]) -> float | None:
    """A mean or median where every value exists, else None."""
    collected = list(values)
    existing = [value for value in collected if value is not None]
    return summed_up(existing) if len(existing) == len(collected) else None
