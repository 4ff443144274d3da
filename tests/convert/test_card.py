"""A conversion's tables and model card say what its stages say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from linattn.convert import Agreement, Conversion, LayerError, Paying, Speed, Stage, Trained
from linattn.convert.card import kept_in_words, kept_layers, layer_table, model_card, speed_in_words, stage_table
from linattn.hf import LayerReport, Linearization
from linattn.records.texts import Table


def stage(name, value, *errors):
    layers = tuple(LayerError(f"layer.{number}", error, 2 * error, 0.8) for number, error in enumerate(errors))
    return Stage(name, Agreement(value, value / 2, value / 4, value * 3), layers)


@pytest.fixture
def conversion():
    return Conversion(
        method="FavorPlus(num_features=8) + window 4",
        linearization=Linearization(
            (
                LayerReport(0, "layer.0", "FavorPlus", None),
                LayerReport(1, "layer.1", "FavorPlus", None),
                LayerReport(2, "layer.2", None, "a sliding window of 8 tokens"),
            )
        ),
        stages=(stage("uniform", 0.1), stage("unconverted", 0.2, 0.6, 0.7), stage("converted", 0.4, 0.25, 0.3)),
        trainings=(Trained("distillation", 1234, 90.0, 0.5, 0.125, False),),
        num_held_out=9,
        num_held_out_tokens=12345,
        stopped=False,
    )


def without(conversion, **changes):
    """The conversion of a model that lacks some figures."""
    stages = tuple(replace(one, agreement=replace(one.agreement, **changes)) for one in conversion.stages)
    return replace(conversion, stages=stages)


def test_stages_below_both_baselines(conversion):
    table = stage_table(conversion)
    assert table.columns == ("stage", "embedding cosine", "token cosine", "rank correlation", "prediction KL")
    assert table.baselines == 2
    assert table.rows == (
        ("exact attention", "1.0000", "1.0000", "1.0000", "0.0000"),
        ("uniform attention", "0.1000", "0.0500", "0.0250", "0.3000"),
        ("the map as drawn", "0.2000", "0.1000", "0.0500", "0.6000"),
        ("distilled", "0.4000", "0.2000", "0.1000", "1.2000"),
    )


def test_only_figures_that_exist_have_a_column(conversion):
    assert stage_table(without(conversion, divergence=None)).columns[3:] == ("rank correlation",)
    table = stage_table(without(conversion, divergence=None, rank_correlation=None))
    assert table.columns == ("stage", "embedding cosine", "token cosine")
    assert all(len(row) == 3 for row in table.rows)
    assert stage_table(without(conversion, rank_correlation=None)).rows[0] == (
        "exact attention",
        "1.0000",
        "1.0000",
        "0.0000",
    )


def test_layers_beside_averaging(conversion):
    table = layer_table(conversion)
    assert table.columns == ("layer", "uniform attention", "the map as drawn", "distilled", "worst head")
    assert table.rows == (
        ("layer.0", "0.8000", "0.6000", "0.2500", "0.5000"),
        ("layer.1", "0.8000", "0.7000", "0.3000", "0.6000"),
    )


def test_the_card(conversion):
    card = model_card(conversion, "tiny")
    assert card.startswith("# tiny with linear attention\n")
    assert "2 of 3 attention layers attend by `FavorPlus(num_features=8) + window 4`" in card
    assert "Training: 1234 steps of distillation in 1.5 minutes." in card
    assert "on 9 texts of 12,345 tokens" in card
    assert stage_table(conversion).markdown() in card
    assert layer_table(conversion).markdown() in card
    assert "Layers that keep softmax:\n\n* layer.2: a sliding window of 8 tokens\n" in card
    calibrated = replace(conversion, trainings=(), linearization=Linearization(conversion.linearization.layers[:2]))
    assert "Training: none." in model_card(calibrated, "tiny")
    assert "keep softmax" not in model_card(calibrated, "tiny")


def staged(kept, divergence=None, **figures):
    """A conversion with these stages, each of an embedding cosine, or of a divergence and of cosines that say less."""
    stages = []
    for number, (name, figure) in enumerate(figures.items()):
        values = (figure, 0.5, 0.5, None) if divergence is None else (0.9 + number / 100, 0.5, 0.5, figure)
        layers = () if name == "uniform" else (LayerError("layer.0", number / 8, number / 4, 0.8),)
        stages.append(Stage(name, Agreement(*values), layers))
    return Conversion("Taylor", Linearization(()), tuple(stages), (), 9, 99, False, kept)


def test_layers_that_keep_softmax_for_one_reason_are_told_together(conversion):
    reports = conversion.linearization.layers
    more = LayerReport(3, "layer.3", None, reports[2].reason), LayerReport(4, "layer.4", None, "not among `layers`")
    found = replace(conversion, linearization=Linearization((*reports, *more)))
    lines = ["layer.2, layer.3: a sliding window of 8 tokens", "layer.4: not among `layers`"]
    assert kept_layers(found) == lines
    assert "\n".join(f"* {line}" for line in lines) in model_card(found, "a model")


def test_the_stage_that_is_kept_and_why():
    def found(*args, **figures):
        return kept_in_words(staged(*args, uniform=0.4, **figures))

    assert found("converted", unconverted=0.98, calibrated=0.97, converted=0.99) == "Kept: distilled"
    words = "Kept: the map as drawn, since distilling made it worse: embedding cosine 0.9884 against 0.9918"
    assert found("unconverted", unconverted=0.9918, converted=0.9884) == words
    words = (
        "Kept: the map as drawn, since calibrating and distilling made it worse: embedding cosine 0.9700 and 0.9884 "
        "against 0.9918"
    )
    assert found("unconverted", unconverted=0.9918, calibrated=0.97, converted=0.9884) == words
    words = "Kept: calibrated, since distilling made it no better: embedding cosine 0.97000000 against 0.97000000"
    assert found("calibrated", unconverted=0.5, calibrated=0.97, converted=0.97) == words
    words = "Kept: calibrated, since distilling made it worse: embedding cosine 0.97000000 against 0.97000100"
    assert found("calibrated", unconverted=0.5, calibrated=0.970001, converted=0.97) == words


def test_what_predicts_is_kept_by_its_predictions():
    words = "Kept: calibrated, since distilling made it worse: prediction KL 0.2000 against 0.1000"
    assert kept_in_words(staged("calibrated", True, uniform=9.0, calibrated=0.1, converted=0.2)) == words


def test_the_card_and_the_worst_head_are_those_of_the_stage_that_was_kept():
    conversion = staged("calibrated", uniform=0.4, unconverted=0.5, calibrated=0.99, converted=0.97)
    card = model_card(conversion, "tiny")
    assert f"\n{kept_in_words(conversion)}.\n" in card
    assert layer_table(conversion).rows == (("layer.0", "0.8000", "0.1250", "0.2500", "0.3750", "0.5000"),)
    # Conversions that name no stage are those of their last.
    assert kept_in_words(replace(conversion, kept="")) == "Kept: distilled"


def test_time_beside_the_originals(conversion):
    """The middle pass of each; a model that is slower is not said to pay."""
    assert speed_in_words(conversion) == ""
    slow = Speed(4, 1512, (9.0, 5.0, 1.0), (2.0, 2.0, 3.0), 2, "cpu")
    text = speed_in_words(replace(conversion, speed=slow))
    assert text.startswith("Time: 4 texts of 1,512 tokens take 2.50 × the original model's time (cpu, 2 threads). ")
    assert text.endswith("At this length softmax is faster, and exact: do not use the converted model here.")
    assert text in model_card(replace(conversion, speed=slow), "tiny")
    fast = replace(slow, exact_seconds=(10.0, 10.0, 10.0))
    assert speed_in_words(replace(conversion, speed=fast)).endswith(
        "take 0.50 × the original model's time (cpu, 2 threads)."
    )
    assert replace(conversion, speed=fast) == conversion


SLOWER = "At this length softmax is faster, and exact: "


@pytest.mark.parametrize(
    ("kept", "slow", "causal", "relation", "advice"),
    [
        (900.0, True, True, "less than", f" {SLOWER}the converted model saves memory here, not time."),
        (1000.0, True, True, "no less than", f" {SLOWER}do not use the converted model here."),
        (77952.4, False, True, "no less than", ""),
        (900.0, True, False, "less than", f" {SLOWER}do not use the converted model here."),
    ],
)
def test_whether_it_pays(conversion, kept, slow, causal, relation, advice):
    speed = Speed(4, 1512, (2.0 if slow else 0.5,), (1.0,), 2, "cpu")
    found = replace(conversion, speed=speed, paying=Paying(1512, kept, 1000.0, causal))
    words = f"State: {kept:,.0f} numbers per head, {relation} the 1,000 of the exact cache of 1,512 tokens.{advice}"
    assert speed_in_words(found).partition(" threads). ")[2] == words
    assert words in model_card(found, "tiny")
    assert found == conversion


def test_a_table_in_markdown_by_hand():
    assert Table(("a", "b"), (("x", "1"),)).markdown() == "| a | b |\n|---|---:|\n| x | 1 |"
