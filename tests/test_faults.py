"""Every deliberate fault has a place in the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import FAULTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted({fault.path for fault in FAULTS}))
def test_faults_are_somewhere(path: str) -> None:
    """Those of a file."""
    source = (ROOT / path).read_text()
    for fault in (fault for fault in FAULTS if fault.path == path):
        assert fault.old in source, fault.name
        assert fault.old != fault.new, fault.name
        places = fault.tests.partition(" -k ")[0].split()
        assert places, fault.name
        assert all((ROOT / place.partition("::")[0]).exists() for place in places), fault.name
