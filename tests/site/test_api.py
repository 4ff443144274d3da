"""Every public name has its place on the site, once, and every room has a page."""

from __future__ import annotations

import ast

import pytest

from public_names import ROOMS, documented, exported, identity


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_documented(room: str) -> None:
    there = {id(identity(name)) for name in documented()}
    missing = [
        name
        for name in exported(room)
        if id(found := identity(f"{room}.{name}")) not in there and not isinstance(found, type(ast))
    ]
    assert not missing, f"write ::: {room}.NAME into a page of docs/api for each of {', '.join(missing)}"


def test_no_name_is_documented_twice_or_gone() -> None:
    found = documented()
    assert [name for name, count in found.items() if count > 1] == []
    for name in found:
        identity(name)


def test_there_are_rooms() -> None:
    assert {"linattn", "linattn.feature_maps", "linattn.hf", "linattn.nn"} <= set(ROOMS)
    assert "linear_attention" in exported("linattn")
    assert "PreTrainedModel" not in exported("linattn.hf")
