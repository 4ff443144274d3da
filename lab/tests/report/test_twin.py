"""The figures of a page as JSON: whole, described field by field, and a damaged file is none."""

from __future__ import annotations

import json
import shutil
from copy import deepcopy

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from linattn.records.json_files import Reading
from linattn_lab.report import Report, Twin, report_schema, write_report
from linattn_lab.report.audit.summary import summarise_audit


@pytest.fixture(scope="module")
def twin(whole, tmp_path_factory):
    """The file of a page of audit, bench and claims, and of one file that cannot be read."""
    folder = tmp_path_factory.mktemp("twin")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    (folder / "memory.jsonl").write_text("no audit", encoding="utf-8")
    assert write_report(folder) == folder / "index.html"
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def schema():
    """A validator of the schema, which is a schema itself."""
    found = report_schema()
    Draft202012Validator.check_schema(found)
    return Draft202012Validator(found)


def test_a_twin_is_as_its_schema_says_and_has_the_page_s_figures(schema, twin, whole):
    schema.validate(twin)
    assert (twin["kind"], twin["version"], twin["memory"]) == ("linattn report", 1, None)
    assert [point["heading"] for point in twin["unread"]] == ["memory.jsonl could not be read"]
    assert twin["answers"][0]["heading"] == "Should I linearize this model?"
    line, found = summarise_audit(whole / "audit.jsonl").lines[0], twin["audit"]["lines"][0]
    assert (found["map"], found["error"]["mean"], found["time_ratio"]) == (line.map, line.error.mean, line.time_ratio)
    assert len(twin["bench"]["rows"]) == 3
    assert [claim["decision"]["status"] for claim in twin["claims"]["claims"]] == ["holds", "fails"]


def test_a_twin_is_read_back_as_the_records_it_was_written_from(twin):
    reading = Reading("report.json", "write it again", finite=False)
    read = reading.record(Twin, twin)
    assert (read.claims.claims[0].status, read.audit.lines[0].verdict) == ("holds", "no better")
    with pytest.raises(ValueError, match=r"report.json: version must be 1, got 2; write it again"):
        reading.record(Twin, {**twin, "version": 2})


def test_a_page_of_nothing_has_a_twin(schema, tmp_path):
    write_report(tmp_path)
    schema.validate(json.loads((tmp_path / "report.json").read_text(encoding="utf-8")))


def test_every_field_is_described(schema):
    kinds = schema.schema["$defs"]
    assert {"Twin", "Line", "LengthRow", "Decision", "MemoryLine", "Point"} <= set(kinds)
    assert set(Report.__annotations__) <= set(kinds["Twin"]["properties"])
    for name, kind in kinds.items():
        assert len(kind["description"]) > 5, name
        assert kind["required"] == list(kind["properties"]), name
        for field, value in kind["properties"].items():
            assert len(value["description"].split()) > 1, f"{name}.{field}"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["version"], 2),
        (["kind"], "linattn audit"),
        (["surplus"], 1),
        (["answers"], None),
        (["audit", "lines", 0, "error", "mean"], "nothing"),
        (["audit", "lines", 0, "features"], 1.5),
        (["audit", "lines", 0, "head_ratios"], [1.0]),
        (["audit", "baselines"], []),
        (["bench", "rows", 0, "length"], "8"),
        (["claims", "claims", 0, "decision", "status"], "perhaps"),
    ],
)
def test_a_damaged_twin_is_refused(schema, twin, place, value):
    damaged = deepcopy(twin)
    holder = damaged
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    with pytest.raises(ValidationError):
        schema.validate(damaged)


@pytest.mark.parametrize("name", ["answers", "audit", "bench", "unread"])
def test_a_twin_without_a_field_is_refused(schema, twin, name):
    with pytest.raises(ValidationError, match=f"'{name}' is a required property"):
        schema.validate({field: value for field, value in twin.items() if field != name})
