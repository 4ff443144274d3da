"""A conversion in words: tables of its stages and of its layers, for a terminal or a model card."""

from __future__ import annotations

from collections import Counter

from linattn.convert import Conversion, Stage
from linattn.lab.report._text import Table
from linattn.planning.plans import EXACT

_WORDS = {
    "uniform": "uniform averaging",
    "unconverted": "the map as drawn",
    "calibrated": "calibrated",
    "converted": "distilled",
}
_WORK = {"calibrated": "calibrating", "converted": "distilling"}
# Of figures; of two that agree to the fewer, the more.
_FEWER, _MORE = 4, 8


def stage_table(conversion: Conversion) -> Table:
    """The whole model at every stage, below both baselines.

    Cost: none worth naming.

    Args:
        conversion: what `linattn.convert.convert_` returned.

    Returns:
        One row per stage; a column for what exists of this model.

    Example:
        See `tests/lab/report/test_conversion.py`.

    Source: none.
    """
    divergence = any(stage.agreement.divergence is not None for stage in conversion.stages)
    ranks = any(stage.agreement.rank_correlation is not None for stage in conversion.stages)
    columns = ["stage", "embedding cosine", "token cosine"]
    exact = ["exact attention", _number(1.0), _number(1.0)]
    if ranks:
        columns.append("rank correlation")
        exact.append(_number(1.0))
    if divergence:
        columns.append("prediction KL")
        exact.append(_number(0.0))
    rows = [tuple(exact)]
    for stage in conversion.stages:
        found = stage.agreement
        row = [_WORDS[stage.name], _number(found.embedding_cosine), _number(found.token_cosine)]
        row += [_number(found.rank_correlation)] * ranks + [_number(found.divergence)] * divergence
        rows.append(tuple(row))
    return Table(tuple(columns), tuple(rows), baselines=2)


def layer_table(conversion: Conversion) -> Table:
    """The relative error of every layer's attention at every stage, beside that of averaging.

    Cost: none worth naming.

    Args:
        conversion: what `linattn.convert.convert_` returned.

    Returns:
        One row per converted layer; 0 is exact. The worst head is that of the stage that was kept.

    Example:
        See `tests/lab/report/test_conversion.py`.

    Source: none.
    """
    stages = [stage for stage in conversion.stages if stage.layers]
    columns = ("layer", "uniform averaging", *(_WORDS[stage.name] for stage in stages), "worst head")
    rows = [_layer_row(stages, conversion.result, number) for number in range(len(stages[-1].layers))]
    return Table(columns, tuple(rows))


def kept_in_words(conversion: Conversion) -> str:
    """Which stage's weights the model has, and why where it is not the last.

    Cost: none worth naming.

    Args:
        conversion: what `linattn.convert.convert_` returned.

    Returns:
        A sentence without its full stop.

    Example:
        See `tests/lab/report/test_conversion.py`.

    Source: none.
    """
    result = conversion.result
    later = conversion.stages[conversion.stages.index(result) + 1 :]
    if not later:
        return f"Kept: {_WORDS[result.name]}"
    kept, others = _figure(result), [_figure(stage) for stage in later]
    digits = _MORE if any(f"{other:.{_FEWER}f}" == f"{kept:.{_FEWER}f}" for other in others) else _FEWER
    measure = "embedding cosine" if result.agreement.divergence is None else "prediction KL"
    work = " and ".join(_WORK[stage.name] for stage in later)
    effect = "no better" if any(other == kept for other in others) else "worse"
    figures = " and ".join(f"{other:.{digits}f}" for other in others)
    return f"Kept: {_WORDS[result.name]}, since {work} made it {effect}: {measure} {figures} against {kept:.{digits}f}"


def method_table(conversion: Conversion) -> Table:
    """How many heads have which method, of a conversion for a target error.

    Cost: none worth naming.

    Args:
        conversion: what `linattn.convert.convert_` returned.

    Returns:
        One row per method over all converted layers, exact attention first, then the most frequent; none where all
        heads share one.

    Example:
        See `tests/lab/report/test_conversion.py`.

    Source: none.
    """
    counts = Counter(method for layer in conversion.heads for method in layer)
    rows = sorted(counts.items(), key=lambda row: (row[0] != EXACT, -row[1], row[0]))
    return Table(("method", "heads"), tuple((method, str(count)) for method, count in rows))


def markdown(table: Table) -> str:
    """A table as Markdown.

    Cost: linear in the table.

    Args:
        table: any table.

    Returns:
        Lines, the first column to the left and the others to the right.

    Example:
        >>> print(markdown(Table(("a", "b"), (("x", "1"),))))
        | a | b |
        |---|---:|
        | x | 1 |

    Source: GitHub Flavored Markdown, "Tables".
    """
    head = f"| {' | '.join(table.columns)} |"
    rule = f"|---|{'---:|' * (len(table.columns) - 1)}"
    return "\n".join([head, rule, *(f"| {' | '.join(row)} |" for row in table.rows)])


def model_card(conversion: Conversion, name: str) -> str:
    """What a converted model's folder says of it.

    Cost: none worth naming.

    Args:
        conversion: how it was made.
        name: of the model it was made from.

    Returns:
        Markdown.

    Example:
        See `tests/lab/report/test_conversion.py`.

    Source: none.
    """
    steps = ", ".join(
        f"{one.steps} steps of {one.name} in {one.seconds / 60:.1f} minutes" for one in conversion.trainings
    )
    kept = [f"* {layer.module_name}: {layer.reason}" for layer in conversion.linearization.kept]
    layers = conversion.linearization
    parts = [
        f"# {name} with linear attention",
        f"{len(layers.replaced)} of {len(layers.layers)} attention layers attend by {method_in_words(conversion)}. "
        f"Training: {steps or 'none'}. Load it with `linattn.hf.from_pretrained`; transformers' own classes would load "
        "these weights under softmax, for which they were not trained.",
        f"How wrong it is, on {conversion.num_held_out} texts of {conversion.num_held_out_tokens:,} tokens that "
        "nothing was fitted to or trained on, against the original model:",
        markdown(stage_table(conversion)),
        f"{kept_in_words(conversion)}.",
        "Relative error of each layer's attention, against softmax on the same queries, keys and values (0 is exact):",
        markdown(layer_table(conversion)),
    ]
    if conversion.heads:
        parts += ["The methods of the heads (exact is softmax attention):", markdown(method_table(conversion))]
    if kept:
        parts += ["Layers that keep softmax:", "\n".join(kept)]
    return "\n\n".join(parts) + "\n"


def method_in_words(conversion: Conversion) -> str:
    """What the converted layers attend by, within a sentence: one method, or how many heads stay exact.

    Cost: none worth naming.

    Args:
        conversion: what `linattn.convert.convert_` returned.

    Returns:
        Words, Markdown where a method is named.

    Example:
        See `tests/lab/report/test_conversion.py`.

    Source: none.
    """
    if not conversion.heads:
        return f"`{conversion.method}`"
    methods = [method for layer in conversion.heads for method in layer]
    return (
        f"a method for each head, {conversion.method}: {methods.count(EXACT)} of {len(methods)} heads stay exact, "
        "which is quadratic"
    )


def _layer_row(stages: list[Stage], result: Stage, number: int) -> tuple[str, ...]:
    """One layer."""
    kept = result.layers[number]
    errors = (_number(stage.layers[number].error) for stage in stages)
    return kept.layer, _number(kept.uniform_error), *errors, _number(kept.worst)


def _figure(stage: Stage) -> float:
    """What stages are compared by, as it is shown."""
    found = stage.agreement
    return found.embedding_cosine if found.divergence is None else found.divergence


def _number(value: float | None) -> str:
    """A figure; nothing where there is none."""
    return "" if value is None else f"{value:.4f}"
