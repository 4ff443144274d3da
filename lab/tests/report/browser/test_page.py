"""The report in a browser: what a reader sees and can do."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from linattn_lab.audit.records import AUDIT, WeightsRow

# The report is made once.
pytestmark = pytest.mark.xdist_group("report in a browser")

WIDTHS = [380, 1280]
LARGEST_PAGE = 2_000_000


def shown(page):
    """Names of the claims in the table that are not filtered away."""
    return [row.get_attribute("data-claim") for row in page.locator("table.claims tbody tr").all() if row.is_visible()]


def open_all(page):
    """Open every fold."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")


def test_one_file_of_bearable_size(report):
    assert report.stat().st_size <= LARGEST_PAGE


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_chart_is_drawn_and_nothing_is_cut_off(opened, width, theme):
    page = opened(width, theme)
    open_all(page)
    names = page.evaluate("Object.keys(figures)")
    assert {"state-frontier", "flops-frontier", "time-curves", "chart-constant-time-lookup"} <= set(names)
    for name in names:
        chart = page.locator(f"[id='{name}']")
        chart.scroll_into_view_if_needed()
        expect(chart.locator("svg").first).to_be_visible()
        assert chart.locator(".mark, .line").count() > 0, f"{name} is empty"
        assert "NaN" not in chart.inner_html()
        box = chart.bounding_box()
        assert box["width"] > 0.8 * (min(width, 1056) - 70)
        assert box["height"] > 200
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)" if theme == "light" else "rgb(20, 23, 27)"
    )


def test_charts_have_words_for_those_who_do_not_see_them(opened):
    page = opened()
    for chart in page.locator("[role=img]").all():
        assert len(chart.get_attribute("aria-label")) > 20


def test_claims_are_filtered_by_verdict_and_by_words(opened):
    page = opened()
    assert shown(page) == ["constant-time-lookup", "query-costs-r", "elementwise-exp-is-softmax"]
    page.get_by_role("button", name="Holds").click()
    assert shown(page) == ["constant-time-lookup"]
    assert page.get_by_role("button", name="Holds").get_attribute("aria-pressed") == "true"
    expect(page.locator("#claim-query-costs-r")).to_be_hidden()
    page.get_by_role("button", name="Fails").click()
    assert shown(page) == ["query-costs-r", "elementwise-exp-is-softmax"]
    page.get_by_label("Search claims").fill("ELEMENTWISE")
    assert shown(page) == ["elementwise-exp-is-softmax"]
    expect(page.locator("#claims-shown")).to_have_text("1 shown")
    page.get_by_role("button", name="All").click()
    page.get_by_label("Search claims").fill("no such words")
    assert shown(page) == []


@pytest.mark.parametrize("name", ["numbers kept", "FLOPs per token"])
def test_tables_sort_both_ways_and_baselines_stay_on_top(opened, name):
    page = opened()
    heads = page.locator("table#heads")
    column = heads.get_by_role("button", name=name)
    place = column.locator("xpath=..").evaluate("(head) => head.cellIndex")

    def numbers():
        rows = heads.locator("tbody tr:not(.baseline)").all()
        return [float(row.locator("th, td").nth(place).inner_text().replace(",", "")) for row in rows]

    # As texts they would stand in another order.
    assert sorted(numbers()) != sorted(numbers(), key=lambda number: f"{number:,.0f}")
    column.click()
    assert numbers() == sorted(numbers())
    column.click()
    assert numbers() == sorted(numbers(), reverse=True)
    assert column.locator("xpath=..").get_attribute("aria-sort") == "descending"
    assert "baseline" in heads.locator("tbody tr").first.get_attribute("class")


def test_long_tables_filter(opened):
    page = opened()
    page.locator("input[data-filters=heads]").fill("relu")
    visible = [row.inner_text() for row in page.locator("table#heads tbody tr").all() if row.is_visible()]
    assert visible
    assert all("Relu" in text for text in visible)


def test_the_theme_changes_page_and_charts(opened):
    page = opened(theme="light")
    page.locator("#state-frontier").scroll_into_view_if_needed()
    expect(page.locator("#state-frontier text").first).to_be_visible()
    ink = "getComputedStyle(document.querySelector('#state-frontier text')).fill"
    before = page.evaluate(ink)
    page.get_by_role("button", name="Switch to dark colours").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert page.evaluate(ink) != before
    page.get_by_role("button", name="Switch to light colours").click()
    assert page.evaluate(ink) == before


def test_a_claim_opens_from_the_table_with_its_chart(opened):
    page = opened()
    page.locator("table.claims a[href='#claim-query-costs-r']").click()
    chart = page.locator("#chart-query-costs-r")
    expect(chart.locator("svg").first).to_be_visible()
    expect(chart).to_be_in_viewport()


def test_the_heat_map_follows_the_choice(opened):
    page = opened()
    drawn = (
        "[...document.querySelectorAll('#head-map td')].map((cell) => getComputedStyle(cell).backgroundColor).join()"
    )
    before, words = page.evaluate(drawn), page.locator("#head-map").inner_text()
    labels = page.locator("#choice option").all_inner_texts()
    page.locator("#choice").select_option(label=next(label for label in labels if label.startswith("FavorPlus")))
    assert page.evaluate(drawn) != before
    assert page.locator("#head-map").inner_text() != words


def test_a_point_tells_its_figure_and_a_name_shows_its_curve(opened):
    page = opened()
    chart = page.locator("#state-frontier")
    chart.scroll_into_view_if_needed()
    mark = chart.locator(".mark.shape").first
    mark.hover()
    expect(chart.locator(".tip")).to_have_text(mark.get_attribute("data-tip"))
    page.locator("#state-frontier + .legend li").first.hover()
    expect(chart.locator(".tip")).to_be_hidden()
    assert chart.locator(".curve.dim").count() == chart.locator(".curve").count() - 1
    page.mouse.move(0, 0)
    expect(chart.locator(".curve.dim")).to_have_count(0)


def test_a_chart_is_as_wide_as_the_page(opened):
    page = opened(1280)
    chart = page.locator("#state-frontier")
    chart.scroll_into_view_if_needed()
    for width in (1280, 380):
        page.set_viewport_size({"width": width, "height": 900})
        wanted = str(int(chart.bounding_box()["width"]))
        expect(chart.locator("svg")).to_have_attribute("width", wanted)


def test_everything_that_acts_is_reached_by_keyboard(opened):
    page = opened()
    reached, wanted = set(), {"theme", "A", "all", "fails", "claim-search", "SUMMARY", "choice"}
    for _ in range(400):
        page.keyboard.press("Tab")
        found = page.evaluate(
            "(() => { const one = document.activeElement; return one.id || one.dataset.status || one.tagName; })()"
        )
        reached.add(found)
        if reached >= wanted:
            break
    assert reached >= wanted
    page.locator("#claim-constant-time-lookup summary").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#chart-constant-time-lookup svg").first).to_be_visible()


def drawn(page, place=0):
    """The paths of softmax's curve and of the method's."""
    return [line.get_attribute("d") for line in page.locator(f"#explorer-{place} .line").all()]


def test_the_explorer_shows_a_head_s_rows_error_and_bytes(opened):
    """Head, budget and method are chosen by their labels; rows, figures and words for those who do not see follow."""
    page = opened(380)
    head, budget, method = (page.get_by_label(name, exact=True) for name in ("Head", "At most, per head", "Method"))
    page.locator("#explorer-0").scroll_into_view_if_needed()
    expect(page.locator("#explorer-0 svg")).to_be_visible()
    before, words = drawn(page), page.locator("#explorer-words").inner_text()
    assert len(before) == 2
    errors = [float(text.rpartition("error ")[2]) for text in method.locator("option").all_inner_texts()]
    assert len(errors) == 4
    assert errors == sorted(errors)
    method.select_option("Relu (8 features)")
    after, told = drawn(page), page.locator("#explorer-words").inner_text()
    assert (after[0] == after[1], after[1] == before[1], told == words) == (False, False, False)
    # 8·9 sums and a maximum of 4 bytes each, and 32 keys and values of 8 each.
    assert "Relu (8 features) on layer 0, head 0: relative error" in told
    assert "It keeps 292 bytes per head, less than the 2,048 bytes of the exact cache of 32 tokens." in told
    assert "under Relu (8 features)" in page.locator("#explorer-2").get_attribute("aria-label")
    head.select_option("layer 1, head 3")
    assert drawn(page)[0] != before[0]
    assert "Relu (8 features) on layer 1, head 3" in page.locator("#explorer-words").inner_text()
    budget.select_option("292 bytes")
    assert [text.partition(":")[0] for text in method.locator("option").all_inner_texts()] == ["Relu (8 features)"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_the_explorer_s_rows_are_those_of_the_file(opened, report):
    """What is drawn sums to one for softmax, up to rounding, and is what the audit kept."""
    page = opened()
    rows = page.evaluate("explorer.exact.map((text) => explorer.queries.map((_, place) => cellsOf(text, place)))")
    assert len(rows) == 8
    assert all(len(row) == 32 and abs(sum(row) - 1) < 32 * 0.02 for head in rows for row in head)
    kept = [row for row in AUDIT.read(report.parent / "audit.jsonl")[1] if isinstance(row, WeightsRow)]
    texts = [text for row in kept if row.map == "exact" for text in row.rows]
    assert page.evaluate("explorer.exact") == texts
