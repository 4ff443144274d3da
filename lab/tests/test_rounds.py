"""Units of a long measurement: done in order, some alone, none twice."""

from __future__ import annotations

import pytest

from linattn_lab.rounds import Unit, _rounds, in_rounds


class Told:
    """A watch that remembers."""

    def __init__(self):
        self.stages, self.parts, self.work = [], [], 0.0

    def begin(self, words):
        self.stages.append(words)

    def pass_by(self, words):
        self.parts.append(words)

    def advance(self, work):
        self.work += work


def units(letters):
    """A unit per letter: capitals are done alone, "x" is done already."""

    def unit(number, letter):
        return Unit(
            f"stage {number // 3}",
            letter,
            2.0,
            lambda: [letter, number],
            is_alone=letter.isupper(),
            is_done=letter == "x",
        )

    return [unit(number, letter) for number, letter in enumerate(letters)]


def test_rows_come_in_order_and_every_stage_is_told_once():
    told = Told()
    assert list(in_rounds(units("abxcD"), told)) == ["a", 0, "b", 1, "c", 3, "D", 4]
    assert (told.stages, told.parts, told.work) == (["stage 0", "stage 1"], ["a", "b", "c", "D"], 8.0)


@pytest.mark.parametrize(
    ("letters", "size", "rounds"),
    [("abcde", 2, ["ab", "cd", "e"]), ("abTcxd", 3, ["ab", "T", "cd"]), ("TTx", 2, ["T", "T"]), ("", 2, [])],
)
def test_no_unit_is_done_beside_one_that_wants_to_be_alone(letters, size, rounds):
    assert ["".join(unit.words for unit in found) for found in _rounds(units(letters), size)] == rounds
