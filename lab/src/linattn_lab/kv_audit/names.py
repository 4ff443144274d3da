"""Names of methods and tasks, and what counts as answered, for audits of a bounded KV cache and their reports."""

from __future__ import annotations

FULL, UNIFORM, BOUNDED, PLANNED = "full cache", "uniform attention", "bounded cache", "planned"
WINDOW = "sinks + window"
"""The rival of all: sinks and the latest tokens exact, or but the very latest in few bits; the oldest are evicted."""
NO_BUDGET = 0
"""The budget of methods that have none: baselines, and written forms, whose sizes are their own."""

FACTS = "facts"
"""The task of facts told once, by depth."""
ENOUGH = 0.9
"""What the full cache has to score for a task to be measured."""
