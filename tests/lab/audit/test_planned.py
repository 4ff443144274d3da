"""`linattn audit --target`: a plan made on one text, measured on another, told in words and kept as a file."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from linattn import softmax_attention
from linattn.hf import capture, load
from linattn.lab.audit.planned import Planner, second_half
from linattn.lab.audit.records import AUDIT, LengthsRow, ModelRow, PlanRow, TimeRow
from linattn.lab.audit.text import Text
from linattn.lab.commands.app import app
from linattn.lab.report import Report, summarise_audit, write_page
from linattn.lab.report.audit.plan_summary import PlanSummary
from linattn.planning import plan, read_plans
from linattn.planning.measures import relative_error
from linattn.planning.paying import Crossover
from pages import Page

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
WORDS = ["--map", "EluPlusOne", "--tokens", "32"]


@pytest.fixture
def run(folder, prose, tmp_path):
    """A function that runs `linattn audit --target` on a tiny model."""
    text = tmp_path / "text.txt"
    text.write_text(prose, encoding="utf-8")

    def with_words(*words, family="bert"):
        fixed = [str(folder(family)), "--text", str(text), *WORDS, "--out", str(tmp_path / "out")]
        return CliRunner(env=WIDE).invoke(app, ["audit", *fixed, *words])

    return with_words


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_planned_audit(run, folder, prose, tmp_path, family, monkeypatch):
    # At 32 tokens exact attention takes the fewest operations; some cheap candidate is to be used all the same.
    monkeypatch.setattr("linattn.planning.choosing.exact_flops_per_token", lambda *_, **__: 10**9)
    result = run("--target", "0.6", "--even-if-slower", family=family)
    assert result.exit_code == 0, result.output
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["audit.jsonl", "index.html", "plan.json", "report.json"]
    header, rows = AUDIT.read(out / "audit.jsonl")
    assert (header.target, header.calibration) == (0.6, f"second half of {tmp_path / 'text.txt'}")
    assert (header.even_if_slower, header.num_key_heads) == (True, 4 if family == "bert" else 2)
    assert any(isinstance(row, LengthsRow) and row.map == "planned" and row.lengths[0] == 32 for row in rows)
    # Queries that share a key head would share 32 keys and values of 8 each.
    assert summarise_audit(out / "audit.jsonl").planned.exact_numbers == 32 * 16 // (1 if family == "bert" else 2)
    heads = [row for row in rows if isinstance(row, PlanRow)]
    assert [(row.layer, row.head) for row in heads] == [(layer, head) for layer in range(2) for head in range(4)]
    assert any(row.method != "exact" for row in heads)
    (whole,) = (row for row in rows if isinstance(row, ModelRow) and row.map == "planned")
    assert rows.index(whole) > rows.index(heads[-1])
    assert "planned" in {row.map for row in rows if isinstance(row, TimeRow)}
    plans, loaded = read_plans(out / "plan.json"), load(folder(family))
    assert [head.method for plan in plans for head in plan.heads] == [row.method for row in heads]
    assert all(row.method == "exact" or row.expected_error <= 0.9 * 0.6 for row in heads)
    first = header.first_measured
    for layer, call in enumerate(capture(loaded.model, loaded.encode(prose, 32)).calls):
        q, k, v = (x.double() for x in (call.query, call.key, call.value))
        exact = softmax_attention(q, k, v, is_causal=call.is_causal, scale=call.scale, enable_gqa=True)
        found = relative_error(plans[layer].attend(call.query, call.key, call.value)[:, :, first:], exact[:, :, first:])
        assert [row.error for row in heads if row.layer == layer] == pytest.approx(found.tolist(), rel=1e-6)
    assert "A method for each head, for an error of 0.6." in result.output
    assert "FLOPs" in result.output
    page = Page((out / "index.html").read_text(encoding="utf-8"))
    assert "A method for each head, for an error of 0.6" in page.text
    assert "1.3" in page.text


def test_the_plan_goes_where_it_is_told(run, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("w1 w2 w3 w4 " * 20, encoding="utf-8")
    result = run("--target", "0.5", "--plan-out", str(tmp_path / "kept.json"), "--calibration", str(other))
    assert result.exit_code == 0, result.output
    assert len(read_plans(tmp_path / "kept.json")) == 2
    assert not (tmp_path / "out" / "plan.json").exists()
    assert AUDIT.read(tmp_path / "out" / "audit.jsonl")[0].calibration == str(other)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan-out", "plan.json"], "give --target too"),
        (["--calibration", "text.txt"], "give --target too"),
        (["--target", "0"], "--target must be positive"),
        (["--target", "0.1", "--tokens", "60"], "its second half is not free to calibrate on"),
        (["--target", "0.1", "--calibration", "/nowhere.txt"], "there is no text file"),
    ],
)
def test_refusals(run, tmp_path, words, message):
    result = run(*words)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_no_measured_token_is_calibrated_on(folder, prose):
    loaded = load(folder("bert"))
    half = second_half(loaded, Text("words", prose), 32)
    measured, calibrated = (loaded.encode(text, 32)["input_ids"][0].tolist() for text in (prose, half.content))
    whole = loaded.encode(prose, 64)["input_ids"][0].tolist()
    assert measured == whole[:32]
    assert calibrated[-20:] == whole[-20:]
    with pytest.raises(ValueError, match="gives 10 tokens to calibrate on, wanted 32"):
        Planner(loaded, Text("few", "w1 " * 10), target_error=0.1, num_tokens=32)


def without_times(out):
    """The rows of a folder's audit, all but what depends on the machine."""
    return [row for row in AUDIT.read(out / "audit.jsonl")[1] if not isinstance(row, TimeRow | LengthsRow)]


def test_plans_are_gone_on_from(run, tmp_path, monkeypatch):
    """A plan that was made and measured is not made again; that of another audit is kept aside."""
    out = tmp_path / "out"
    assert run("--target", "0.6", "--even-if-slower").exit_code == 0
    whole, plans = set(without_times(out)), (out / "plan.json").read_bytes()
    (out / "audit.jsonl").unlink()
    (out / "plan.json").unlink()
    made = []

    def counted(*tensors, **options):
        made.append(options["target_error"])
        if len(made) == 2:
            raise KeyboardInterrupt
        return plan(*tensors, **options)

    monkeypatch.setattr("linattn.lab.audit.planned.plan", counted)
    assert run("--target", "0.6", "--even-if-slower").exit_code == 130
    assert len(read_plans(out / "plan.partial.json")) == 1
    assert sorted(path.name for path in out.iterdir()) == [
        "audit.jsonl",
        "index.html",
        "plan.partial.json",
        "report.json",
    ]
    assert "planned" in Page((out / "index.html").read_text(encoding="utf-8")).text
    assert run("--target", "0.6", "--even-if-slower").exit_code == 0
    assert len(made) == 3
    assert set(without_times(out)) == whole
    assert (out / "plan.json").read_bytes() == plans
    assert run("--target", "0.6", "--even-if-slower").exit_code == 0
    assert len(made) == 3
    assert run("--target", "0.05", "--even-if-slower").exit_code == 0
    assert made[3:] == [0.05] * 2
    assert (out / "plan.1.json").read_bytes() == plans


def head(number, method, expected, error, flops=50):
    return PlanRow(0, number, method, expected, None, error, 0.8, 100, flops)


HEADS = (
    head(0, "Relu", 0.09, 0.14),
    head(1, "Relu", 0.05, 0.16),
    head(2, "Relu", 0.08, 0.03),
    head(3, "exact", 0.0, 0.0, 200),
)


def test_shares_and_words():
    found = PlanSummary(0.1, "a text", HEADS, ModelRow("planned", None, 0, 0.9, 0.8), 200, 101, True)
    assert found.kept == 0.75
    assert found.foretold == pytest.approx(1 / 3)
    words = found.words()
    assert "Of 4 heads, 1 stay exact and 3 are approximated, with 0.44 of exact attention's operations" in words
    assert "Made on a text, measured on this text: 75% of all heads have an error of at most 0.15" in words
    assert "cosine of the embedding 0.900." in words
    assert "Of the approximated heads alone, 67% do, and for 33% of them" in words
    relu, exact = found.table().rows
    assert relu == ("Relu", "3", "0.07", "0.11", "0.16", "100", "50")
    assert exact[:5] == ("exact", "1", "0.00", "0.00", "0.00")
    assert [row[0] for row in found.by_head().rows] == ["0.0", "0.1", "0.2", "0.3"]
    alone = replace(found, heads=HEADS[3:])
    assert alone.foretold is None
    assert "approximated heads alone" not in alone.words()


@pytest.mark.parametrize(
    ("numbers", "ratio", "words"),
    [
        (
            101,
            2.0,
            "less than the 101 of the exact cache. Not to save time here: for memory perhaps.",
        ),
        (100, 2.0, "100 numbers per head, no less than the 100 of the exact cache. Do not: it saves nothing here."),
        (100, 0.5, "It keeps 100 numbers per head, no less than the 100 of the exact cache."),
        (100, None, "It keeps 100 numbers per head, no less than the 100 of the exact cache."),
    ],
)
def test_whether_a_plan_pays(numbers, ratio, words):
    model = ModelRow("planned", None, 0, 0.9, 0.8)
    found = PlanSummary(0.1, "a text", HEADS, model, 200, numbers, True, time_ratio=ratio)
    assert found.paying().endswith(words)
    assert found.paying() in found.words()
    crossed = replace(found, crossover=Crossover(40.0, (32, 64), False, 64), longest=16)
    assert "Attention alone is faster from 40 tokens on, and the model takes at most 16." in crossed.paying()
    assert "for memory perhaps" not in replace(found, is_causal=False).paying()


def test_without_a_plan_the_page_has_no_such_part(run, tmp_path):
    assert run().exit_code == 0
    summary = summarise_audit(tmp_path / "out" / "audit.jsonl")
    assert summary.planned is None
    write_page(Report(audit=summary), tmp_path / "page.html")
    assert "A method for each head" not in Page((tmp_path / "page.html").read_text(encoding="utf-8")).text
