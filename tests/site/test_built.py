"""What the builder made: without a warning, whole, of bearable size, asking no other host, and searchable."""

from __future__ import annotations

import re
import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from built_site import QUESTIONS, Search
from pages import Page
from public_names import ROOMS, exported
from snippets import ROOT

# The site is built once.
pytestmark = pytest.mark.xdist_group("site")

LARGEST_PAGE = 2_000_000


def html_pages(site: Path) -> list[Path]:
    """All pages."""
    return sorted(site.rglob("*.html"))


def test_every_page_of_the_sources_is_there(site: Path) -> None:
    sources = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    assert sources <= {path.relative_to(site).with_suffix("") for path in html_pages(site)}


def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    for path in html_pages(site):
        for tag, attributes in Page(path.read_text(encoding="utf-8")).tags:
            for name in ("src", "srcset", "data", "action", *(["href"] if tag != "a" else [])):
                assert "//" not in (attributes.get(name) or ""), f"{path.name}: <{tag} {name}={attributes[name]!r}>"
    for path in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path.name


def test_headings_descend_one_level_at_a_time_and_columns_have_names(site: Path) -> None:
    """As those who hear a page need it; axe-core calls it heading-order and empty-table-header."""
    for path in html_pages(site):
        text = path.read_text(encoding="utf-8")
        levels = [
            int(level)
            for level in re.findall(r"<h([1-6])\b", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
        ]
        skipped = [(a, b) for a, b in pairwise(levels) if b > a + 1]
        assert not skipped, f"{path.name}: {skipped}"
        assert not re.search(r"<th\b[^>]*>\s*</th>", text), path.name


def test_pages_are_of_bearable_size(site: Path) -> None:
    """A page, with every script, style and drawing that it names."""
    for path in html_pages(site):
        named = [
            attributes.get("src") or attributes.get("href") or ""
            for tag, attributes in Page(path.read_text(encoding="utf-8")).tags
            if tag in ("script", "link", "img")
        ]
        files = {(path.parent / name.split("#")[0]).resolve() for name in named if name}
        assert path.stat().st_size + sum(file.stat().st_size for file in files if file.is_file()) <= LARGEST_PAGE, path


def test_every_public_name_has_an_anchor(site: Path) -> None:
    head, lines = (site / "objects.inv").read_bytes().split(b"\n", 4)[:4], (site / "objects.inv").read_bytes()
    assert len(head) == 4
    names = {line.split(" ")[0] for line in zlib.decompress(lines.split(b"\n", 4)[4]).decode().splitlines()}
    wanted = {f"{room}.{name}" for room in ROOMS if room != "linattn" for name in exported(room)}
    assert len(wanted) > 100
    assert wanted <= names


@pytest.fixture(scope="session")
def search(site: Path) -> Search:
    """The site's search."""
    pytest.importorskip("lunr", reason="the site's search is read by lunr: pip install 'linattn[dev]'")
    return Search(site)


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_newcomer_finds_the_answer_among_the_first_three_hits(search: Search, question: str) -> None:
    found = search.hits(question)[:3]
    assert set(QUESTIONS[question].split("|")) & set(found), f"found {found}"
    for answer in QUESTIONS[question].split("|"):
        assert answer in search.docs


def test_newcomers_ask_many_questions() -> None:
    assert len(QUESTIONS) >= 20


def test_no_word_of_the_search_has_a_digit(search: Search) -> None:
    """The pages' script mixes up nodes of its tree of words whose edges are digits: it fails on words that are none."""
    assert len(search.words) > 1000
    assert [word for word in search.words if re.search(r"\d", word)] == []
