"""The site, built once for all tests that look at what was built."""

from __future__ import annotations

from pathlib import Path

import pytest

from built_site import build


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder
