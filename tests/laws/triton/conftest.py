"""Small tiles, so that few tokens fill several blocks and few features several tiles; a GPU runs what ships."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> str:
    """Where the kernels run: on a GPU, or interpreted."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from linattn.attention.backends.triton import tiles

    if tiles.IS_INTERPRETED:
        monkeypatch.setattr(tiles, "sizes", lambda *_, **__: (16, 16))
