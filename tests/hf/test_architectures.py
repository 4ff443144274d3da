"""Each use of a linearized or bounded model, architecture by architecture, is as docs/how_to/which_models.md says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from architecture_uses import TABLE, cells
from architectures import ARCHITECTURES


def verdicts(row: dict[str, str]) -> dict[str, str]:
    """Each use and "works", "refused" or "-", without the reasons, in which transformers has its say."""
    return {use: cell.partition(":")[0] for use, cell in row.items() if use not in ("class", "kind")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_use_works_or_is_refused_at_once(name: str, tmp_path: Path) -> None:
    """A use that gives another result than softmax, or crashes, raises."""
    with torch.no_grad():
        row = dict(cells(ARCHITECTURES[name], tmp_path))
    assert verdicts(row) == verdicts(json.loads(TABLE.read_text())[name])


@pytest.mark.parametrize(("way", "least"), [("linearize_", 60), ("BoundedCache", 40)])
def test_no_use_is_refused_after_a_model_was_accepted(way: str, least: int) -> None:
    """Of those in the table, most of which are."""
    table = {name: verdicts(row) for name, row in json.loads(TABLE.read_text()).items()}
    assert set(table) == set(ARCHITECTURES)
    accepted = {name: row for name, row in table.items() if row.get(way) == "works"}
    assert len(accepted) >= least
    refused = {(name, use) for name, row in accepted.items() for use, cell in row.items() if cell == "refused"}
    assert {use for _, use in refused} <= {"linearize_", "BoundedCache"}
