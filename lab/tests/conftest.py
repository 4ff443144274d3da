"""What the laboratory's tests share: tiny models, in memory and saved."""

from __future__ import annotations

import pytest

from saved_models import _short_texts as _short_texts
from saved_models import folder as folder
from saved_models import prose as prose
from tiny_models import tiny as tiny
from tiny_models import words as words

ALLOCATED = 4096
"""Bytes that a chunk allocates at most, where it is not read for them."""
WRITTEN = 16
"""Tokens of greedy texts."""


@pytest.fixture(scope="module")
def unprofiled():
    """Audits without the chunk that is read under torch's profiler, which takes longer than all else of a tiny model's,
    and with short greedy texts.

    test_figures.py has the profiler, test_gemma.py texts as long as the commands'.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("linattn_lab.kv_audit.passage_figures.peak_bytes", lambda run: ALLOCATED)
        patch.setattr("linattn_lab.kv_audit.passage_figures.NUM_WRITTEN", WRITTEN)
        yield ALLOCATED
