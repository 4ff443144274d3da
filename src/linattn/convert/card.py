"""A conversion in words: tables of its stages and of its layers, for a terminal or a model card."""

from linattn.convert.course import Conversion
from linattn.convert.stages import Stage
from linattn.records.texts import Table

_WORDS = {
    "uniform": "uniform attention",
    "unconverted": "the map as drawn",
    "calibrated": "calibrated",
    "converted": "distilled",
}
_WORK = {"calibrated": "calibrating", "converted": "distilling"}
# Heading and exact value of each figure of an `Agreement`; the last ones exist of some models alone.
_MEASURES = {
    "embedding_cosine": ("embedding cosine", 1.0),
    "token_cosine": ("token cosine", 1.0),
    "rank_correlation": ("rank correlation", 1.0),
    "divergence": ("prediction KL", 0.0),
    "perplexity": ("perplexity", None),
}
# Of figures; of two that agree to the fewer, the more.
_FEWER, _MORE = 4, 8


def stage_table(conversion: Conversion) -> Table:
    """The whole model at every stage, below both baselines."""
    stages = conversion.stages
    names = [name for name in _MEASURES if any(getattr(stage.agreement, name) is not None for stage in stages)]
    measured = {name: _MEASURES[name] for name in names}
    # The original model's perplexity is a figure of its own, of every stage the same.
    perplexity = stages[-1].agreement.exact_perplexity
    rows = [("exact attention", *(_number(perplexity if exact is None else exact) for _, exact in measured.values()))]
    rows += [(_WORDS[stage.name], *(_number(getattr(stage.agreement, name)) for name in measured)) for stage in stages]
    return Table(("stage", *(words for words, _ in measured.values())), tuple(rows), baselines=2)


def layer_table(conversion: Conversion) -> Table:
    """The relative error of each layer by stage, beside uniform attention's; of the worst head at the stage kept."""
    stages = [stage for stage in conversion.stages if stage.layers]
    columns = ("layer", "uniform attention", *(_WORDS[stage.name] for stage in stages), "worst head")
    rows = []
    for number, summary in enumerate(conversion.result.layers):
        figures = (summary.uniform_error, *(stage.layers[number].error for stage in stages), summary.worst)
        rows.append((summary.layer, *map(_number, figures)))
    return Table(columns, tuple(rows))


def kept_in_words(conversion: Conversion) -> str:
    """Which stage's weights the model has, and why where it is not the last: a sentence without its full stop."""
    result = conversion.result
    later = conversion.stages[conversion.stages.index(result) + 1 :]
    if not later:
        return f"Kept: {_WORDS[result.name]}"
    figure, others = _figure(result), [_figure(stage) for stage in later]
    digits = _MORE if any(f"{other:.{_FEWER}f}" == f"{figure:.{_FEWER}f}" for other in others) else _FEWER
    measure = "embedding cosine" if result.agreement.divergence is None else "prediction KL"
    work = " and ".join(_WORK[stage.name] for stage in later)
    effect = "no better" if any(other == figure for other in others) else "worse"
    figures = " and ".join(f"{other:.{digits}f}" for other in others)
    return (
        f"Kept: {_WORDS[result.name]}, since {work} made it {effect}: {measure} {figures} against {figure:.{digits}f}"
    )


def speed_in_words(conversion: Conversion) -> str:
    """Time beside the original's, state beside the exact cache, and what follows; empty where nothing was measured."""
    speed, paying = conversion.speed, conversion.paying
    if speed is None:
        return ""
    parts = [
        f"Time: {speed.batch_size} texts of {speed.num_tokens:,} tokens take {speed.ratio:.2f} × the original model's "
        f"time ({speed.device}, {speed.threads} threads)."
    ]
    if paying is not None:
        relation = "less than" if paying.state_numbers < paying.exact_numbers else "no less than"
        parts.append(
            f"State: {paying.state_numbers:,.0f} numbers per head, {relation} the {paying.exact_numbers:,.0f} of the "
            f"exact cache of {paying.num_tokens:,} tokens."
        )
    if speed.ratio >= 1 and paying is not None and paying.saves_memory:
        parts.append("At this length softmax is faster, and exact: the converted model saves memory here, not time.")
    elif speed.ratio >= 1:
        parts.append("At this length softmax is faster, and exact: do not use the converted model here.")
    return " ".join(parts)


def kept_layers(conversion: Conversion) -> list[str]:
    """The layers whose softmax stays: those of one reason together, with the reason."""
    names: dict[str, list[str]] = {}
    for layer in conversion.linearization.kept:
        assert layer.reason is not None
        names.setdefault(layer.reason, []).append(layer.module_name)
    return [f"{', '.join(same)}: {reason}" for reason, same in names.items()]


def model_card(conversion: Conversion, name: str) -> str:
    """The model card of a converted model, as Markdown; `name` is that of the model it was made from."""
    steps = ", ".join(f"{x.steps} steps of {x.name} in {x.seconds / 60:.1f} minutes" for x in conversion.trainings)
    layers = conversion.linearization
    parts = [
        f"# {name} with linear attention",
        f"{len(layers.replaced)} of {len(layers.layers)} attention layers attend by `{conversion.method}`. "
        f"Training: {steps or 'none'}. Load it with `linattn.hf.from_pretrained`; transformers' own classes would load "
        "these weights under softmax, for which they were not trained.",
        f"Error on {conversion.num_held_out} texts of {conversion.num_held_out_tokens:,} tokens that "
        "nothing was fitted to or trained on, against the original model:",
        stage_table(conversion).markdown(),
        " ".join(filter(None, (f"{kept_in_words(conversion)}.", speed_in_words(conversion)))),
        "Relative error of each layer's attention, against softmax on the same queries, keys and values (0 is exact):",
        layer_table(conversion).markdown(),
    ]
    if softmax_layers := [f"* {line}" for line in kept_layers(conversion)]:
        parts += ["Layers that keep softmax:", "\n".join(softmax_layers)]
    return "\n\n".join(parts) + "\n"


def _figure(stage: Stage) -> float:
    """Figure by which stages are compared, as it is shown: divergence, or embedding cosine."""
    agreement = stage.agreement
    return agreement.embedding_cosine if agreement.divergence is None else agreement.divergence


def _number(value: float | None) -> str:
    """A figure; nothing where there is none."""
    return "" if value is None else f"{value:.4f}"
