"""Files of plans that somebody has damaged or written: refused with the layer, the head and the field."""

from __future__ import annotations

import json
import math

import pytest

from linattn.planning import HeadPlan, read_plans


def _broken(layers, **changes):
    return json.dumps({"kind": "linattn plan", "version": 1, "layers": layers} | changes)


HEAD = {
    "method": "exact",
    "expected_error": 0.0,
    "next_order_error": None,
    "uniform_error": 0.5,
    "state_numbers": 1,
    "flops_per_token": 1,
}
LAYER = {
    "heads": [HEAD],
    "head_dim": 4,
    "value_dim": 4,
    "scale": 0.5,
    "is_causal": False,
    "num_tokens": 8,
    "target_error": 0.1,
    "max_features": None,
    "fitted": {},
}


REQUIRED = ("heads", "head_dim", "value_dim", "scale", "is_causal", "num_tokens")


def _without(record, name):
    return {key: value for key, value in record.items() if key != name}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "it is no JSON"),
        ("[]", 'it wants "kind": "linattn plan"'),
        ('{"kind": "audit"}', 'it wants "kind": "linattn plan"'),
        (_broken([LAYER], version=2), "is a linattn plan of version 2, this reads 1"),
        (_broken([]), "holds no layers"),
        (_broken({}), "holds no layers"),
        (_broken([1]), "layer 0: got int, wanted the fields"),
        (_broken([{**LAYER, "more": 1}]), "there is no 'more', wanted the fields"),
        *((_broken([_without(LAYER, name)]), f"layer 0: {name} is missing") for name in REQUIRED),
        *((_broken([{**LAYER, "heads": [_without(HEAD, name)]}]), rf"heads\[0\]: {name} is missing") for name in HEAD),
        *(
            (_broken([{**LAYER, "heads": [HEAD, {**HEAD, name: number}]}]), rf"layer 0, heads\[1\]: {name} must be ")
            for name in HEAD
            if name != "method"
            for number in (-1, -1e-9, math.nan, math.inf, "1", [1], True)
        ),
        *(
            (_broken([{**LAYER, name: number}]), f"layer 0: {name} must be at least 1, got {number}")
            for name in ("head_dim", "value_dim", "num_tokens", "max_features")
            for number in (0, -4)
        ),
        (_broken([{**LAYER, "scale": -0.5}]), "scale and target_error must be positive, got -0.5"),
        (_broken([{**LAYER, "target_error": -0.1}]), "scale and target_error must be positive, got 0.5 and -0.1"),
        (_broken([{**LAYER, "heads": []}]), "heads must be a list of at least one head"),
        (_broken([{**LAYER, "fitted": []}]), "fitted must be an object, got list"),
        (_broken([{**LAYER, "head_dim": "4"}]), "head_dim must be a finite int, got '4'"),
        (_broken([{**LAYER, "head_dim": True}]), "head_dim must be a finite int, got True"),
        (_broken([{**LAYER, "scale": math.inf}]), "scale must be a finite float, got inf"),
        (
            _broken([LAYER, {**LAYER, "heads": [{**HEAD, "method": 3}]}]),
            r"layer 1, heads\[0\]: method must be a str, got 3",
        ),
        (
            _broken([{**LAYER, "heads": [{**HEAD, "method": "Performer"}]}]),
            "layer 0: 'Performer': there is no feature map",
        ),
        (
            _broken([{**LAYER, "heads": [{**HEAD, "method": "Expansion"}], "is_causal": True}]),
            "Expansion has no centres",
        ),
        (
            _broken([{**LAYER, "fitted": {"Expansion": {"centres": 3}}}]),
            r"layer 0: fitted\['Expansion'\]\['centres'\] is no tensor",
        ),
        (
            _broken(
                [{**LAYER, "fitted": {"Expansion": {"centres": {"dtype": "float32", "shape": [3], "base64": "AAAA"}}}}]
            ),
            "is no tensor",
        ),
    ],
)
def test_files_that_are_no_plan(tmp_path, text, words):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        read_plans(path)
    assert str(path) in str(caught.value)


def test_the_whole_file_of_the_refusals_is_a_plan(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(_broken([LAYER]))
    assert read_plans(path)[0].heads == (HeadPlan(**HEAD),)
    with pytest.raises(FileNotFoundError, match="there is no plan"):
        read_plans(tmp_path / "other.json")
