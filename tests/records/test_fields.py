"""Records as JSON: what is written is read again, and a value of another type is refused by its place and its field."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from annotated_types import Ge

from linattn.records.json_files import Reading, read_json, read_record, to_json, write_json


class Egg(NamedTuple):
    weight: float
    colour: Literal["white", "brown"] = "white"


@dataclass(frozen=True)
class Cake:
    eggs: tuple[Egg, ...]
    heat: int | None
    notes: dict[str, list[float]] = field(default_factory=dict)
    rest: Any = None


CAKE = Cake((Egg(50.0), Egg(55.5, "brown")), None, {"a": [1.0, 2.0]}, [1, "b"])
LOOSE = Reading("a.json:2", "bake it again", finite=False)


def record(kind, values, **options):
    return Reading("a.json:2", "bake it again", **options).record(kind, values)


def test_what_is_written_is_read_again():
    written = json.loads(json.dumps(to_json(CAKE)))
    assert record(Cake, written) == CAKE
    assert isinstance(record(Cake, written).eggs[0], Egg)
    # Fields with a default may be missing, others not.
    del written["rest"], written["eggs"][0]["colour"]
    assert record(Cake, written).rest is None
    del written["heat"]
    with pytest.raises(ValueError, match=r"a.json:2: heat is missing, wanted the fields .*'heat'.*; bake it again"):
        record(Cake, written)


def test_numbers_that_json_does_not_have():
    values = {"weights": [math.inf, -math.inf, math.nan, 1.0]}
    kind = make_dataclass("Scales", [("weights", list[float])])
    written = to_json(kind(**values), finite=False)
    assert written == {"weights": ["inf", "-inf", "nan", 1.0]}
    found = LOOSE.record(kind, written).weights
    assert [str(x) for x in found] == ["inf", "-inf", "nan", "1.0"]
    for number in ("inf", math.inf, math.nan):
        with pytest.raises(ValueError, match=r"weights\[0\] must be a (valid|finite) number, got"):
            record(kind, {"weights": [number]})


def test_errors_name_the_way_to_the_field():
    eggs = [to_json(egg) for egg in CAKE.eggs]
    for change, words in (
        ({"eggs": [*eggs, 3]}, r"a.json:2: eggs\[2\] must be .*, got 3; bake it again"),
        ({"eggs": [{**eggs[0], "colour": "red"}]}, r"eggs\[0\].colour must be 'white' or 'brown', got 'red'"),
        ({"eggs": {}}, "a.json:2: eggs must be a valid array, got dict; bake it again"),
        ({"heat": 1.5}, r"heat must be a valid integer, got 1.5"),
        ({"notes": {"a": ["b"]}}, r"notes\.a\[0\] must be a valid number, got 'b'"),
        ({"more": 1}, "a.json:2: there is no 'more', wanted the fields"),
    ):
        with pytest.raises(ValueError, match=words):
            record(Cake, {**to_json(CAKE), **change})


def test_numbers_below_the_least():
    egg = make_dataclass("Egg", [("weight", Annotated[float, Ge(1)]), ("age", Annotated[int, Ge(0)] | None)])
    assert LOOSE.record(egg, {"weight": 1, "age": None}) == egg(1, None)
    for weight in (0, -1, "nan"):
        with pytest.raises(ValueError, match=r"^a.json:2: weight must be greater than or equal to 1, got .*; bake it"):
            LOOSE.record(egg, {"weight": weight, "age": 0})


def test_an_error_names_three_fields_and_counts_the_others():
    values = {"eggs": [{"weight": "a"}] * 5, "heat": None}
    with pytest.raises(
        ValueError, match=r"eggs\[0\].weight .*, eggs\[2\].weight .*, and 2 more; bake it again"
    ) as caught:
        record(Cake, values)
    assert "eggs[3]" not in str(caught.value)


def test_whole_numbers_of_float_fields_are_floats():
    assert isinstance(record(Egg, {"weight": 3}).weight, float)
    assert str(LOOSE.record(Egg, {"weight": "nan"}).weight) == "nan"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (True, int),
        (1.0, int),
        (2**63, int),
        (10**400, float),
        ("1.5", float),
        (True, float),
        (None, float),
        (1, str),
        ("\ud800", str),
        (1, bool),
        ("maybe", Literal["holds", "fails"]),
        ([1, "a"], list[int]),
        ({"a": 1}, dict[str, str]),
        ({}, list[float] | None),
    ],
)
def test_values_of_another_type_are_refused(value, wanted):
    with pytest.raises(ValueError, match=r"^a.json:2: .*field.* must be .*, got .*; bake it again$"):
        LOOSE.record(make_dataclass("Record", [("field", wanted)]), {"field": value})


@pytest.mark.parametrize("depth", [200, 900, 5000])
def test_a_value_that_is_nested_deeply_is_refused(depth):
    values = []
    for _ in range(depth):
        values = [values]
    with pytest.raises(ValueError, match=r"^a.json:2.*(recursion limit|nested too deeply).*; bake it again$"):
        LOOSE.record(make_dataclass("Record", [("field", Any)]), {"field": values})


@pytest.mark.parametrize("values", ["\ud800", ["\ud800"], None, 3])
def test_what_is_no_object_is_refused(values):
    with pytest.raises(ValueError, match=r"^a.json:2: .*; bake it again$"):
        LOOSE.record(Egg, values)


def test_files(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_json(path, {"kind": "cake", "version": 2, "eggs": 3})
    assert read_record(path, "cake", 2, "bake it again") == {"eggs": 3}
    with pytest.raises(ValueError, match="of version 2, this reads 3; bake it again"):
        read_record(path, "cake", 3, "bake it again")
    with pytest.raises(ValueError, match='is not a tart: it wants "kind": "tart"'):
        read_record(path, "tart", 2, "bake it again")
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, [math.nan])
    assert path.read_bytes() == before
    for content in (b"{", b"\xff", b"[" * 100_000, b"1" * 10_000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.json is not a cake: it is .*; bake it again"):
            read_json(path, "cake", "bake it again")
