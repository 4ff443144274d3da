"""The site in a browser: nothing runs out of a page, everyone can read it, and its search answers."""

from __future__ import annotations

import re

import pytest

from built_site import QUESTIONS
from snippets import ROOT

# The site is built once.
pytestmark = pytest.mark.xdist_group("site")

AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
MAIN = ["index.html", "quickstart.html", "concepts/maps.html", "faq.html", "evidence/audit.html"]
MAIN += ["evidence/explorer.html", "how_to/constant_memory.html", "how_to/compared.html"]
NAVIGATION = [
    page.replace(".md", ".html")
    for page in re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
]
WIDE = "all => all.filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.innerText.slice(0, 60))"


def test_the_explorer_shows_a_head(visit):
    """In a frame of its page, which asks for nothing but itself, on a phone too."""
    page = visit("evidence/explorer.html", 380)
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    frame = page.frame_locator("iframe.explorer")
    words = frame.locator("#explorer-words")
    before = words.inner_text()
    frame.get_by_label("Method", exact=True).select_option("FavorPlus (256 features)")
    assert words.inner_text() != before
    assert "FavorPlus (256 features) on layer 0, head 0: relative error" in words.inner_text()
    assert frame.locator("#explorer-0 .line").count() == 2


def test_the_navigation_has_every_page():
    sources = {
        path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")
    }
    assert set(NAVIGATION) == sources


# Of tables, cells and pictures: those that are wider than their place, and tables that do not scroll in themselves.
CUT = """() => {
  const within = (kinds) => [...document.querySelectorAll(kinds.split(', ').map((one) => `article ${one}`).join())];
  const begins = (one) => `${one.tagName} ${one.textContent.trim().slice(0, 60)}`;
  const tables = within('table');
  return {
    wide: tables.filter((one) => one.scrollWidth > one.clientWidth + 1).map(begins),
    cut: within('th, td').filter((one) => one.scrollWidth > one.clientWidth + 1).map(begins),
    beyond: within('table, img, iframe, p').filter((one) => !one.parentElement.closest('table')
      && one.getBoundingClientRect().right > innerWidth).map(begins),
    still: tables.filter((one) => getComputedStyle(one).overflowX !== 'auto').map(begins),
    page: document.querySelector('main').scrollWidth,
  };
}"""


def test_every_table_of_every_page_has_room(visit, address):
    """On a desk; on a phone a wide one scrolls in its place. Without scripts, which would take most of the time."""
    page, faults, num_tables, widths = visit("index.html", has_scripts=False), [], 0, (1280, 390)
    for name in NAVIGATION:
        page.goto(f"{address}/{name}")
        num_tables += page.locator("article table").count()
        # A page is opened as wide as the one before was left: each is laid out twice.
        widths = widths[::-1]
        for width in widths:
            page.set_viewport_size({"width": width, "height": 900})
            found = page.evaluate(CUT)
            kinds = ("wide", "cut", "beyond") if width == 1280 else ("cut", "beyond", "still")
            faults += [f"{name} at {width}: {kind}: {one}" for kind in kinds for one in found[kind]]
            assert found["page"] <= width, f"{name} at {width} is {found['page']} wide"
    assert faults == []
    assert num_tables > 80
    # What is too wide is found.
    page.set_viewport_size({"width": 1280, "height": 900})
    page.evaluate(
        "document.querySelector('article').insertAdjacentHTML('afterbegin', '<style>td { white-space: nowrap }')"
    )
    assert len(page.evaluate(CUT)["wide"]) > 5


def test_no_table_is_cut_on_paper(visit, address):
    """Of A4 without its margins, at 96 dots an inch; there nothing scrolls."""
    page = visit("index.html", 718, has_scripts=False)
    page.emulate_media(media="print")
    for name in ("evidence/constant_memory.html", "evidence/index.html", *MAIN):
        page.goto(f"{address}/{name}")
        found = page.evaluate(CUT)
        assert (found["wide"], found["cut"], found["beyond"]) == ([], [], []), name


@pytest.mark.parametrize("name", ["index.html", "evidence/constant_memory.html", "report_json.html"])
def test_nothing_runs_out_of_a_page(visit, name):
    """With the scripts, which put each table into a place of its own."""
    for width, theme, ground in ((380, "light", "rgb(255, 255, 255)"), (1280, "dark", "rgb(30, 33, 41)")):
        page = visit(name, width, theme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        wide = page.locator(".md-typeset__scrollwrap").evaluate_all(WIDE)
        assert width < 1280 or wide == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_picture_is_seen_once_in_the_colours_of_the_page(visit, theme):
    page = visit("index.html", theme=theme)
    pictures = page.locator("img[src*='images/'][src*='#only']").all()
    assert len(pictures) == 4
    assert [one.is_visible() for one in pictures] == [f"-{theme}.svg" in one.get_attribute("src") for one in pictures]


OVERLAPPING = """() => {
  const texts = [...document.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  return texts.flatMap(([a, x], place) => texts.slice(place + 1).filter(([b, y]) =>
    x.left < y.right && y.left < x.right && x.top < y.bottom && y.top < x.bottom).map(([b]) => [a, b]));
}"""


@pytest.mark.parametrize("name", ["kl_against_bytes", "error_against_bytes", "state_is_a_monoid"])
def test_no_words_of_a_picture_overlap_others(visit, name):
    page = visit("index.html")
    page.set_content((ROOT / "docs" / "images" / f"{name}-light.svg").read_text(encoding="utf-8"))
    assert page.locator("text").count() > 8
    assert page.evaluate(OVERLAPPING) == []


# No package of Python's has axe-core: CI installs it, and who has no npm runs the other tests.
@pytest.mark.skipif(not AXE.exists(), reason="no axe-core: npm install --no-save axe-core@4.14.1")
@pytest.mark.parametrize(
    ("name", "width", "theme"),
    [(name, 380, "light") for name in MAIN] + [(name, 1280, "dark") for name in ("quickstart.html", "faq.html")],
)
def test_everyone_can_read_a_page(visit, name, width, theme):
    page = visit(name, width, theme)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 20
    bad = [
        (one["id"], one["nodes"][0]["html"]) for one in found["violations"] if one["impact"] in ("serious", "critical")
    ]
    assert bad == []


def test_the_keyboard_opens_the_navigation_of_a_narrow_page_and_is_never_out_of_sight(visit):
    page = visit("faq.html", 390)
    focused = "(() => { const box = document.activeElement.getBoundingClientRect(); return [box.left, box.right]; })()"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Navigation"
    for _ in range(12):
        page.keyboard.press("Tab")
        left, right = page.evaluate(focused)
        assert right >= 0
        assert left < 390, page.evaluate("document.activeElement.outerHTML")
    page.locator("#__drawer").focus()
    page.keyboard.press("Space")
    link = page.locator(".md-sidebar--primary a", has_text="Install").first
    link.wait_for()
    link.focus()
    page.wait_for_timeout(500)
    assert page.evaluate(focused)[0] >= 0


def hits(page):
    """Where the first three hits lead, without the words to be marked there."""
    links = page.locator(".md-search-result__link").evaluate_all("all => all.slice(0, 3).map((one) => one.href)")
    return {re.sub(r"\?[^#]*", "", link).split("/", 3)[-1] for link in links}


def test_the_search_box_finds_the_answers(visit):
    page = visit("index.html")
    for question, answers in QUESTIONS.items():
        page.locator(".md-search__input").fill("")
        page.locator(".md-search__input").click()
        # Pasted but for a last key: hits follow each key, from a worker.
        page.keyboard.insert_text(question[:-1])
        page.keyboard.type(question[-1])
        for _ in range(100):
            if found := set(answers.split("|")) & hits(page):
                break
            page.wait_for_timeout(100)
        assert found, f"{question}: {hits(page)}"


def test_the_search_box_takes_figures_and_code(visit):
    """Its console stays empty after each key; digits are left out."""
    page = visit("index.html")
    for words in ["num_merged=96", "13.10", "0.012", "float16"]:
        page.locator(".md-search__input").fill("")
        page.locator(".md-search__input").click()
        page.keyboard.type(words, delay=20)
        page.wait_for_timeout(300)
    page.locator(".md-search-result__link").first.wait_for()
