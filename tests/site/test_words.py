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


def test_uniform_attention_has_one_name() -> None:
    """In help, in a report's fields and on the report's page."""
    report = ROOT / "lab" / "src" / "linattn_lab" / "report"
    texts = [
        *PRINTED,
        *(report / "templates").iterdir(),
        *(report / "audit").glob("*.py"),
        *(report / "bench").glob("*.py"),
    ]
    other = r"averaging (?:the values|error)|(?:uniform|than|to) averaging|averaging(?:'s| uniformly)"
    for path in texts:
        assert not re.findall(other, path.read_text("utf-8")), path.name


def tables(page: Path) -> str:
    """The generated tables of a page."""
    return " ".join(GENERATED.findall(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", BY_HAND, ids=name_of)
def test_errors_in_sentences_are_figures_of_the_page_s_tables(page: Path) -> None:
    text = re.sub(r"\A---.*?---", "", sentences(page), flags=re.DOTALL)
    typed = re.findall(r"(?<![\w.])0\.\d+", text)
    assert [figure for figure in typed if figure not in tables(page)] == []


def test_shares_in_sentences_are_those_of_the_tables() -> None:
    """What training loses of its throughput on longer texts, and from where a long encoder is faster."""
    train, faq, encoder = (ROOT / "docs" / name for name in ("tutorials/train.md", "faq.md", "how_to/encoder.md"))
    rows = re.findall(r"(?m)^\| (\w[^|]*) \| ([\d,]+) \| ([\d,]+) \|", tables(train))
    lost = {name: round(100 * (1 - float(b.replace(",", "")) / float(a.replace(",", "")))) for name, a, b in rows}
    linear = [share for name, share in lost.items() if "softmax" not in name and "window" not in name]
    said = " ".join(sentences(train).split())
    assert f"softmax loses {lost['softmax']} % of its throughput" in said
    assert f"linear blocks without a window {min(linear)} to {max(linear)} %" in said
    lengths = re.findall(r"length from which the entire model is faster \| [^|]* \| ([\d,]+) tokens", tables(encoder))
    assert len(lengths) == 2
    about = round(sum(int(length.replace(",", "")) for length in lengths) / 2, -2)
    assert f"about {about:,.0f} tokens" in faq.read_text(encoding="utf-8")


def test_a_command_takes_as_long_on_every_page() -> None:
    """`make test` and `make demo`, in README.md and on the pages about installing."""
    said: dict[str, set[str]] = {}
    for name in ("README.md", "docs/install.md", "docs/index.md"):
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for command, minutes in re.findall(r"`?make (demo|test)`?\b(?:(?!`?make )[^.]){0,120}?(\d+) minutes", text):
            said.setdefault(command, set()).add(minutes)
    assert {command: len(minutes) for command, minutes in said.items()} == {"demo": 1, "test": 1}


def test_figures_and_retired_words_are_found() -> None:
    assert FIGURE.findall("it is 2.1 × slower, six times as many tokens, 12 tokens/s") == [
        "2.1 ×",
        "six times as",
        "12 tokens/s",
    ]
    assert RETIRED.findall("Facts told once, in silence, of the rooms") == ["told", "in silence", "rooms"]
