"""Each use of a linearized model, architecture by architecture, is what docs/how_to/which_models.md says."""

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
    num_threads = torch.get_num_threads()
    # Tensors of some hundred numbers: threads would wait for one another.
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            row = dict(cells(ARCHITECTURES[name], tmp_path))
    finally:
        torch.set_num_threads(num_threads)
    assert verdicts(row) == verdicts(json.loads(TABLE.read_text())[name])


def test_no_use_is_refused_after_linearize_has_accepted_a_model() -> None:
    """Of those in the table; and there are fifty models, most of which work."""
    table = {name: verdicts(row) for name, row in json.loads(TABLE.read_text()).items()}
    assert set(table) == set(ARCHITECTURES)
    accepted = {name: row for name, row in table.items() if row["linearize_"] == "works"}
    assert len(accepted) >= 50
    assert not [(name, use) for name, row in accepted.items() for use, cell in row.items() if cell == "refused"]
