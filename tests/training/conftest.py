"""What tests of checkpoints share."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing import Trained, save, train_a_little
from linattn.training.checkpoints import Progress, WorkFolder


@pytest.fixture
def trained() -> Trained:
    """A model and an optimiser that has taken two steps."""
    return train_a_little()


@pytest.fixture
def twice(trained: Trained, tmp_path: Path) -> tuple[WorkFolder, Path]:
    """A work folder with two checkpoints, and where they are."""
    folder = WorkFolder(tmp_path, {}, kind="conversion")
    for step in (1, 2):
        save(folder, trained, Progress(step, 1.0, 1.0, 1.0, 1.0), dict(trained[0].state_dict()))
    return folder, tmp_path / "checkpoints" / "transfer"
