"""Every deliberate fault has a place in the source."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults import FAULTS
from faults.fault import Fault

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_somewhere(fault: Fault) -> None:
    assert fault.old in (ROOT / fault.path).read_text()
    assert fault.old != fault.new
    places = fault.tests.partition(" -k ")[0].split()
    assert places
    assert all((ROOT / place.partition("::")[0]).exists() for place in places)
