"""Words of README.md and the site: no figure is typed by hand, and no retired word is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from snippets import ROOT, pages

# Written by commands, from docstrings, results and help.
WRITTEN = {"changelog.md", "claims.md", "cli.md", "report_json.md"}
BY_HAND = [page for page in pages() if page.name not in WRITTEN]
GENERATED = re.compile(r"<!-- \w+ -->.*?<!-- end -->", re.DOTALL)
CODE = re.compile(r"```.*?```|(?<=\n)    [^\n]*|`[^`\n]*`|\]\([^)]*\)", re.DOTALL)
FIGURE = re.compile(r"\d[\d.,]* ?(?:×|tokens/s|nats|ms\b|MB/s)|\b\w+ times (?:as|faster|slower|larger|smaller)\b")
RETIRED = re.compile(
    r"\b(?:told|said again|in silence|the whole\b(?! \w)|as they are|so many|kept aside|g(?:one|oes) on with|"
    r"in the bytes of|nobody|anew|rooms?)\b",
    re.IGNORECASE,
)
# Of commands' help and of a report's fields, which no page explains.
VAGUE = re.compile(r"\b(?:go(?:es|ne|ing)? on|dealt out|once taken|borne out|how wrong)\b", re.IGNORECASE)
PRINTED = [ROOT / "docs" / name for name in ("cli.md", "report_json.md")]


def name_of(page: Path) -> str:
    """A page in a test's name."""
    return page.relative_to(ROOT).as_posix()


def sentences(page: Path) -> str:
    """A page without its generated tables and its code."""
    return CODE.sub("", GENERATED.sub("", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", BY_HAND, ids=name_of)
def test_no_measured_figure_is_typed_by_hand(page: Path) -> None:
    assert FIGURE.findall(sentences(page)) == []


@pytest.mark.parametrize("page", BY_HAND, ids=name_of)
def test_no_retired_word_is_read(page: Path) -> None:
    assert RETIRED.findall(sentences(page)) == []


@pytest.mark.parametrize("page", PRINTED, ids=name_of)
def test_help_and_fields_are_in_the_field_s_words(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert RETIRED.findall(text) + VAGUE.findall(text) == []


def test_figures_and_retired_words_are_found() -> None:
    assert FIGURE.findall("it is 2.1 × slower, six times as many tokens, 12 tokens/s") == [
        "2.1 ×",
        "six times as",
        "12 tokens/s",
    ]
    assert RETIRED.findall("Facts told once, in silence, of the rooms") == ["told", "in silence", "rooms"]
