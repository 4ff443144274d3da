"""A report of all three commands in Debian's Chromium; without it this folder is left out, and the run says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page
from typer.testing import CliRunner

from linattn.cli.app import app
from linattn_lab.kv_audit.names import BOUNDED, FULL, UNIFORM
from linattn_lab.kv_audit.records import MEMORY
from linattn_lab.report import write_report
from memory_rows import MEMORY_HEADER, memory_facts, memory_passage

CHROMIUM = shutil.which("chromium")
collect_ignore_glob = [] if CHROMIUM else ["test_*.py"]

MEMORY_ROWS = [
    memory_passage(0, FULL, 0.0, budget=0),
    memory_passage(0, UNIFORM, 0.8, budget=0),
    *(memory_passage(number, BOUNDED, 0.1234) for number in range(2)),
    *(memory_passage(number, "sinks + window", 0.2345) for number in range(2)),
    *(memory_passage(number, "sinks + window in 3.5 bits", 0.1678) for number in range(2)),
    memory_facts(FULL, [1.0, 0.8], 0),
    memory_facts(BOUNDED, [1.0, 0.2]),
]
_CLAIMS = ("constant-time-lookup", "query-costs-r", "elementwise-exp-is-softmax")


@pytest.fixture(scope="session")
def report(folder: Callable[[str], Path], prose: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a tiny model's audit, of three claims, of a tiny benchmark and of made-up figures of a KV cache."""
    out = tmp_path_factory.mktemp("report")
    text = out / "text.txt"
    text.write_text(prose, encoding="utf-8")
    where = ["--out", str(out)]
    audit = ["--text", str(text), "--tokens", "32", "--features", "16"]
    # A long name without a space: it is not to run out of a narrow page.
    long = "Centred(Balanced(FavorPlus(draw='orthogonal',lengths='fixed')))"
    for method in ("Relu", "FavorPlus", "Expansion(num_centres=4) + window 16", long):
        audit += ["--map", method]
    bench = ["--lengths", "8,16", "--heads", "2", "--head-dim", "8", "--repeats", "1", "--no-memory"]
    for words in (
        ["audit", str(folder("bert")), *audit],
        ["bench", *bench],
        ["reproduce", *_CLAIMS],
    ):
        result = CliRunner().invoke(app, [*words, *where])
        assert result.exit_code == 0, result.output
    MEMORY.write(out / "memory.jsonl", MEMORY_HEADER, MEMORY_ROWS)
    return write_report(out)


@pytest.fixture
def opened(browser: Browser, report: Path) -> Iterator[Callable[..., Page]]:
    """A function that opens the report; whatever its console says, or it asks the network for, fails the test."""
    complaints: list[str] = []
    pages: list[Page] = []

    def at(width: int = 1280, theme: str = "light") -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", lambda request: complaints.append(request.url) if request.url != report.as_uri() else None)
        page.goto(report.as_uri())
        pages.append(page)
        return page

    yield at
    for page in pages:
        page.close()
    assert complaints == []
