"""Nothing on the page covers or cuts anything else: labels of charts, tables, and the page on paper."""

from __future__ import annotations

import pytest

# The report is made once.
pytestmark = pytest.mark.xdist_group("report in a browser")

# A phone, a laptop; paper of A4 without its margins, at 96 dots an inch.
WIDTHS, PAPER = [390, 1280], 718
DRAW = """
document.querySelectorAll('details').forEach((one) => { one.open = true; });
for (const place of places) draw(place, figures[place.id]);
"""
PRINT = "dispatchEvent(new Event('beforeprint'))"
# Of every chart: pairs of labels whose boxes meet, and labels beyond its edges. Slanted names run along one another: of
# two the lines must be a line's height apart.
COVERED = """
[...document.querySelectorAll('.chart svg')].flatMap((chart) => {
  const edge = chart.getBoundingClientRect(), name = chart.parentElement.id;
  const labels = [...chart.querySelectorAll('text')].map((text) => {
    const box = text.getBoundingClientRect(), turn = text.transform.baseVal.consolidate()?.matrix;
    const apart = turn ? (turn.a * turn.f - turn.b * turn.e) : null;
    return { words: text.textContent, box, apart };
  });
  const beyond = labels.filter(({ box }) => box.left < edge.left - 1 || box.right > edge.right + 1
                                            || box.top < edge.top - 1 || box.bottom > edge.bottom + 1);
  const pairs = labels.flatMap((one, at) => labels.slice(at + 1).filter((other) => {
    if (one.apart !== null && other.apart !== null) return Math.abs(one.apart - other.apart) < 12;
    const [a, b] = [one.box, other.box];
    return a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  }).map((other) => `${name}: ${one.words} and ${other.words}`));
  return [...pairs, ...beyond.map(({ words }) => `${name}: ${words} beyond its edge`)];
})
"""
# Tables that are wider than their place, and cells that are wider than their column.
CUT = """
[...document.querySelectorAll('table')].flatMap((table) => {
  const place = table.parentElement.getBoundingClientRect(), box = table.getBoundingClientRect();
  const cells = [...table.querySelectorAll('th, td')].filter((cell) => cell.scrollWidth > cell.clientWidth + 1);
  return [...(box.right > place.right + 1 ? [`${table.id} is ${box.width} wide in ${place.width}`] : []),
          ...cells.map((cell) => `${table.id}: ${cell.textContent}`)];
})
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_label_of_a_chart_covers_another(opened, width, theme):
    page = opened(width, theme)
    page.evaluate(DRAW)
    assert page.locator(".chart svg").count() > 8
    assert page.evaluate(COVERED) == []


def test_marks_at_a_glance_have_labels(opened):
    """As many as have room; on a wide page most of four."""
    page = opened(1280)
    page.evaluate(DRAW)
    assert 2 <= page.locator("#audit-glance .label").count() <= 4


def test_no_table_is_cut_on_a_wide_page(opened):
    page = opened(1280)
    page.evaluate(DRAW)
    assert page.evaluate(CUT) == []


def test_tables_scroll_in_their_own_places_on_a_phone(opened):
    page = opened(390)
    page.evaluate(DRAW)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    places = page.evaluate(
        "[...document.querySelectorAll('table')].map((one) => getComputedStyle(one.parentElement).overflowX)"
    )
    assert set(places) == {"auto"}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_paper_has_headings_whole_tables_and_what_was_chosen(opened, theme):
    page = opened(PAPER, theme)
    label = page.locator("#choice option").last.inner_text()
    page.locator("#choice").select_option(label=label)
    page.emulate_media(media="print", color_scheme=theme)
    page.evaluate(PRINT)
    for button in page.locator("th button").all():
        assert button.is_visible()
    for control in page.locator("select, input, #theme").all():
        assert control.is_hidden()
    assert label in page.locator("#head-map caption").inner_text()
    assert page.locator("#head-map caption").is_visible()
    assert page.evaluate(CUT) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PAPER
    assert page.evaluate(COVERED) == []
    # Ink on paper, whatever the screen has.
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_charts_on_paper_are_drawn_at_its_width_and_then_at_the_screen_s(opened):
    """Shrunk to it, those of a wide screen would have letters that nobody reads."""
    page = opened(1280)
    widths = "new Set([...document.querySelectorAll('.chart svg')].map((one) => one.width.baseVal.value))"
    page.evaluate(PRINT)
    printed = page.evaluate(f"[...{widths}]")
    assert len(printed) == 1
    assert 600 < printed[0] <= PAPER
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert min(page.evaluate(f"[...{widths}]")) > PAPER


def test_paper_has_what_is_folded_on_the_screen(opened):
    """Every fold is open while the page is printed, with its chart; afterwards those that the reader had opened are."""
    page = opened(PAPER)
    folds = "[...document.querySelectorAll('details')].map((one) => one.open)"
    page.locator("details summary").first.click()
    assert page.evaluate(folds) == [True, False, False]
    page.evaluate(
        f"""addEventListener('beforeprint', () => {{
          window.printed = [{folds}, document.querySelectorAll('details .chart svg').length];
        }})"""
    )
    assert page.pdf().startswith(b"%PDF")
    assert page.evaluate("window.printed") == [[True] * 3, 3]
    assert page.evaluate(folds) == [True, False, False]


def test_the_first_screen_has_the_verdict_a_picture_and_nothing_twice(opened):
    page = opened(1280)
    verdict = page.locator(".verdict")
    assert verdict.bounding_box()["y"] < 200
    sentences = page.evaluate("document.body.innerText").replace("\n", " ").split(". ")
    long = [sentence for sentence in sentences if len(sentence) > 80]
    assert len(long) == len(set(long))
