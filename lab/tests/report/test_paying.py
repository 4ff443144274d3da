"""Whether a method pays, in words: for one named method its error, time, state and the length from which it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from linattn_lab.audit.records import AUDIT, Header, HeadRow, LengthsRow, ModelRow, TimeRow
from linattn_lab.report.answers import answers
from linattn_lab.report.audit.paying import longer, verdict
from linattn_lab.report.audit.summary import summarise_audit
from linattn_lab.report.audit.tables import overview

BASELINES = [ModelRow("exact", None, 0, 1.0, 1.0), ModelRow("uniform", None, 0, 0.5, 0.4)]
# 8 tokens, keys and values 2 wide: exact attention keeps 32 numbers.
HEADER = Header({}, "m", "M", False, 1, 1, 2, 2, "t", "", 8, 0, 8, ["Relu", "EluPlusOne"], [64], 1, 0, longest=512)


def rows_of(label, *, error=0.05, numbers=6, seconds=(2.0, 1.0, 9.0), lengths=None, exact=(1.0,)):
    """A method on one head whose model takes the middle one of the seconds, softmax 4."""
    head = HeadRow(0, 0, label, 2, 0, None, error, 0.8, 0.1, 0.4, None, 0.3, 1.0, 1.0, 4.0, 1.0, None, numbers, 20)
    rows = [head, ModelRow(label, 2, 0, 0.9, 0.9)]
    if seconds is not None:
        rows.append(TimeRow(label, 2, seconds, (4.0, 3.0, 5.0), 1))
    if lengths is not None:
        rows.append(LengthsRow(label, 2, lengths, (1.0,) * len(lengths), exact))
    return rows


@pytest.fixture
def told(tmp_path):
    """A function giving the verdict on some rows."""

    def of(*rows, header=HEADER):
        path = tmp_path / "audit.jsonl"
        AUDIT.write(path, header, [*BASELINES, *rows])
        summary = summarise_audit(path)
        assert answers(summary, None, None)[0] == verdict(summary)
        return summary, verdict(summary).text

    return of


def test_faster_and_good(told):
    summary, text = told(*rows_of("Relu"))
    assert summary.lines[0].time_ratio == 0.5
    assert (
        text
        == "Yes, at 8 tokens, if the error will do: Relu (2 features) has error 0.05 and takes 0.50 × softmax's time."
    )
    assert overview(summary).rows[2][5:] == ("0.50", "–", "6")
    assert overview(summary).rows[0][5:] == ("1.00", "", "32")


def test_the_fastest_of_the_good_ones_is_named_and_not_one_that_is_worse_or_faster_still(told):
    good, better = rows_of("Relu"), rows_of("EluPlusOne", error=0.01, seconds=(3.0,) * 3)
    assert told(*good, *better)[1].startswith("Yes, at 8 tokens, if the error will do: Relu (2 features) has")
    fair = rows_of("EluPlusOne", error=0.2, seconds=(0.1,) * 3)
    assert ": Relu (2 features) has error 0.05" in told(*good, *fair)[1]
    slow = rows_of("Relu", seconds=(5.0,) * 3)
    assert ": EluPlusOne (2 features) has error 0.20" in told(*slow, *fair)[1]


def test_a_method_that_is_better_than_averaging_is_named_before_one_whose_draws_are_not(told):
    draws = [replace(row, draw=draw) for draw, e in ((0, 0.01), (1, 1.0)) for row in rows_of("Relu", error=e)[:2]]
    summary, text = told(*draws, *rows_of("EluPlusOne", error=0.6))
    assert [line.verdict for line in summary.lines] == ["no better", "better"]
    assert text.startswith("Yes, at 8 tokens, if the error will do: EluPlusOne (2 features) has error 0.60")


@pytest.mark.parametrize(
    ("options", "begins"),
    [
        ({"seconds": (8.0,) * 3}, "Do not, at 8 tokens: Relu (2 features) has"),
        (
            {"error": 0.9},
            "Do not: no method measured is better than uniform attention at 8 tokens: Relu (2 features) has",
        ),
        ({"seconds": None}, "Time was not measured: Relu (2 features) has error 0.05."),
        ({"error": float("inf")}, "No: no method measured has a finite error."),
    ],
)
def test_do_not(told, options, begins):
    assert told(*rows_of("Relu", **options))[1].startswith(begins)


@pytest.mark.parametrize(
    ("numbers", "begins"),
    [(31, "Not to save time at 8 tokens, for memory perhaps: Relu"), (32, "Do not, at 8 tokens: Relu")],
)
def test_a_decoder_keeps_its_cache_between_calls(told, numbers, begins):
    header = replace(HEADER, is_causal=True)
    assert told(*rows_of("Relu", seconds=(8.0,) * 3, numbers=numbers), header=header)[1].startswith(begins)


@pytest.mark.parametrize(
    ("lengths", "exact", "text", "cell"),
    [
        ((8,), (2.0,), "faster at this length already. The model takes at most 512 tokens.", "here"),
        ((8, 16), (0.25, 0.5), "not faster up to 16 tokens. The model takes at most 512 tokens.", "> 16"),
        ((8, 32), (0.25, 4.0), "slower at 8 tokens, faster from 32 on. The model takes at most 512 tokens.", "8–32"),
        (
            (256, 4_096),
            (0.25, 4.0),
            "slower at 256 tokens, faster from 4,096 on, and the model takes at most 512.",
            "256–4,096",
        ),
    ],
)
def test_from_which_length_on(told, lengths, exact, text, cell):
    """An interval of measured lengths: what lies between them moves with the machine's load."""
    summary, _ = told(*rows_of("Relu", lengths=lengths, exact=exact))
    assert longer(summary).text == f"Relu (2 features): attention alone is {text}"
    assert overview(summary).rows[2][6] == cell


@pytest.mark.parametrize(
    ("lengths", "exact", "is_causal", "longest", "step"),
    [
        ((8, 32), (0.25, 4.0), False, 512, "The model takes at most 512 tokens. Audit it there: --tokens 32."),
        ((8, 32), (0.25, 4.0), True, None, "faster from 32 on. Audit it there: --tokens 32."),
        (
            (8, 32),
            (0.25, 4.0),
            False,
            8,
            "takes at most 8. Audit a model with a longer context, or bound a language model's KV cache: linattn audit "
            "gemma-3-270m --budget 512.",
        ),
        (
            (8, 16),
            (0.2, 0.5),
            True,
            512,
            "at most 512 tokens. Bound its KV cache instead: linattn audit m --budget 512.",
        ),
    ],
)
def test_the_next_step_where_a_method_does_not_pay(told, lengths, exact, is_causal, longest, step):
    header = replace(HEADER, is_causal=is_causal, longest=longest)
    rows = rows_of("Relu", seconds=(8.0,) * 3, lengths=lengths, exact=exact)
    assert longer(told(*rows, header=header)[0]).text.endswith(step)


def test_lengths_that_were_not_timed(told):
    assert longer(told(*rows_of("Relu"))[0]).text == "Not timed at other lengths."


@pytest.mark.parametrize("seconds", [(0.0, 1.0, 1.0), (), (float("inf"), 1.0, 1.0)])
def test_a_damaged_time(told, seconds):
    with pytest.raises(ValueError, match="Relu took no time, or no finite one"):
        told(*rows_of("Relu", seconds=seconds))
