"""The status page as a user sees it, in a real browser."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from ingestd.config.redaction import Redactor
from ingestd.http.auth import Protection
from ingestd.http.status_diff import RedactionCache, StatusDiff
from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import TableState
from ingestd.model.lsn import Lsn
from ingestd.observe.status import SourceState
from ingestd.ports import CaptureLag
from tests.browser.conftest import LIMIT_MS
from tests.harness.page_server import PageServer
from tests.harness.page_states import STATES, healthy, many, stopped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Locator, Page, ViewportSize

expect.set_options(timeout=LIMIT_MS)
T0 = datetime(2026, 1, 2, tzinfo=UTC)
TOKEN = "0123456789abcdef0123456789abcdef"
PHONE: ViewportSize = {"width": 360, "height": 780}


@pytest.fixture
def served() -> Iterator[PageServer]:
    with PageServer(*healthy()) as made:
        yield made


def source(page: Page, name: str = "shop") -> Locator:
    return page.get_by_role("article", name=name, exact=True)


def tables(page: Page) -> Locator:
    return source(page).locator("table.tables")


def names(page: Page) -> list[str]:
    return tables(page).locator("tbody tr:not(.why) th").all_inner_texts()


def overall(page: Page) -> Locator:
    return page.locator("#overall")


# --- what is shown ---------------------------------------------------------------------------

SHOWN = {
    "healthy": ["All sources deliver every table", "Every table is up to date", "1.12 s"],
    "lagging": ["shop: behind", "9 min 14 s", "raise max_slot_wal_keep_size", "4 times"],
    "stopped": [
        "2 problems need attention",
        "password authentication failed",
        "ALTER TABLE public.payments REPLICA IDENTITY FULL;",
        "Partially delivering",
    ],
    "snapshotting": ["6 tables are being read", "64 %, 19.2 GB of 30 GB, about 2 min left"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("state", STATES)
def test_a_state_is_shown_in_words_on_desktop_and_phone(page: Page, state: str) -> None:
    with PageServer(*STATES[state]()) as served:
        page.goto(served.url)
        for text in SHOWN[state]:
            expect(page.locator("main")).to_contain_text(text)
        page.set_viewport_size(PHONE)
        expect(overall(page)).to_be_in_viewport()
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= PHONE["width"]
        assert page.evaluate(UNNAMED) == []


UNNAMED = """[...document.querySelectorAll(
  'button, input, select, meter, progress, a, table th, svg[role=img], article, nav')]
  .filter((e) => e.checkVisibility())
  .filter((e) => !(e.textContent.trim() || e.labels?.length || e.ariaLabel
    || e.getAttribute('aria-labelledby')))
  .map((e) => e.outerHTML)"""
"""What a screen reader would have no name for."""


def test_names_with_markup_in_them_are_text(page: Page) -> None:
    evil = '<img src=x onerror="document.title=1"><b>&amp;</b>'
    daemon, history = healthy()
    shop = daemon.sources["shop"]
    with PageServer(daemon, history) as served:
        fault = OperatorError(f"no key {evil}", remedy=f"run {evil}")
        served.do(lambda: shop.table(f"public.{evil}", TableState.STOPPED, T0, fault))
        served.do(lambda: shop.enter(SourceState.BACKING_OFF, T0, fault))
        page.goto(served.url)
        expect(page.locator("main")).to_contain_text(f"public.{evil}")
        expect(page.locator("main")).to_contain_text(f"run {evil}")
        assert page.locator("img, main b").count() == 0
        assert "ingestd" in page.title()


def test_charts_say_in_words_what_they_draw(page: Page, served: PageServer) -> None:
    page.goto(served.url)
    chart = source(page).get_by_role("img", name="Lag, the last hour")
    expect(chart).to_have_attribute("aria-label", re.compile(r"lag now 1\.12 s, highest 3\.\d+ s"))
    drawn = str(chart.locator("path.line").get_attribute("d"))
    assert drawn.count("L") == 359
    chart.hover(position={"x": 5, "y": 20})
    expect(source(page).locator(".read").first).to_have_text(
        re.compile(r"\d\d:\d\d:\d\d\s+.+ m?s\s*$")
    )


# --- what changes ----------------------------------------------------------------------------


def test_what_happens_is_shown_as_it_happens(page: Page, served: PageServer) -> None:
    shop = served.status.sources["shop"]
    page.goto(served.url)
    orders = tables(page).locator("tbody").filter(has_text="public.orders")
    expect(orders).to_contain_text("Live")
    fault = OperatorError("it has no key", remedy="ALTER TABLE ...")
    served.do(lambda: shop.table("public.orders", TableState.STOPPED, T0, fault))
    expect(orders).to_contain_text("it has no key")
    assert names(page)[0] == "public.orders"
    expect(page.get_by_role("status").first).to_have_text("1 problem needs attention")
    assert page.title().startswith("! 1 problem needs attention")
    served.do(lambda: shop.table("public.orders", TableState.LIVE, T0))
    expect(orders.get_by_text("it has no key")).to_be_hidden()
    expect(page.get_by_role("status").first).to_have_text("All sources deliver every table")
    served.do(lambda: shop.tables.pop("public.orders"))
    expect(orders).to_have_count(0)


@pytest.mark.thorough
def test_a_source_that_is_paused_and_one_that_goes_are_shown(
    page: Page, served: PageServer
) -> None:
    shop = served.status.sources["shop"]
    [other] = [name for name in served.status.sources if name != "shop"]
    page.goto(served.url)
    lag = CaptureLag(Lsn(2_000_000), Lsn(0), 2_000_000, 3_000_000, None)

    def pause() -> None:
        shop.pause(datetime.now(UTC))
        shop.measured(lag, None, datetime.now(UTC))

    served.do(pause)
    status = page.get_by_role("status").first
    expect(status).to_have_text("The other source delivers every table; shop: paused")
    expect(source(page)).to_contain_text("its slot retains 3 MB of WAL")
    expect(source(page)).to_contain_text("Resume with: ingestd resume shop")
    served.do(lambda: served.status.sources.pop(other))
    expect(source(page, other)).to_have_count(0)
    expect(status).to_have_text("shop: paused")


@pytest.mark.thorough
def test_figures_are_not_read_aloud(page: Page, served: PageServer) -> None:
    shop = served.status.sources["shop"]
    page.goto(served.url)
    expect(page.get_by_role("status").first).to_have_text("All sources deliver every table")
    page.evaluate(COUNT_SAID)
    for n in range(3):
        served.do(lambda n=n: shop.measured(_lag(), 2.0 + n, T0))  # type: ignore[misc]
        expect(source(page)).to_contain_text(f"{2 + n} s")
    assert page.evaluate("window.said") == 0


COUNT_SAID = """() => {
  window.said = 0;
  const live = document.querySelectorAll('[role=status], [role=alert], [aria-live], output');
  for (const region of live) {
    new MutationObserver(() => { window.said += 1; })
      .observe(region, { childList: true, characterData: true, subtree: true });
  }
}"""


def _lag() -> CaptureLag:
    return CaptureLag(Lsn(90), Lsn(50), 40, 60, 1000)


def test_a_lost_daemon_is_shown_and_reconnected_to(page: Page, served: PageServer) -> None:
    page.goto(served.url)
    expect(page.locator("#connection")).to_have_text("Connected")
    find = source(page).get_by_label("Find")
    find.fill("pay")
    served.__exit__(None, None, None)
    try:
        expect(overall(page)).to_have_text(
            "No connection to the daemon: the data below is out of date"
        )
        expect(page.locator("#connection")).to_contain_text("No connection since")
        assert page.title().startswith("! No connection")
    finally:
        served.__enter__()
    expect(page.locator("#connection")).to_have_text("Connected")
    expect(overall(page)).to_have_text("All sources deliver every table")
    assert (find.input_value(), names(page)) == ("pay", ["public.payments"])


# --- tables ----------------------------------------------------------------------------------


def test_tables_are_found_and_sorted_by_keyboard(page: Page, served: PageServer) -> None:
    page.goto(served.url)
    find = source(page).get_by_label("Find")
    find.focus()
    page.keyboard.type("or")
    expect(tables(page).locator("tbody")).to_have_count(2)
    assert names(page) == ["public.order_lines", "public.orders"]
    expect(source(page).locator("output")).to_have_text("2 of 16 tables")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Table"
    heading = tables(page).locator("th[data-key=table]")
    page.keyboard.press("Enter")
    expect(heading).to_have_attribute("aria-sort", "ascending")
    page.keyboard.press("Space")
    expect(heading).to_have_attribute("aria-sort", "descending")
    assert names(page) == ["public.orders", "public.order_lines"]
    assert tables(page).locator("[aria-sort]").count() == 1
    find.fill("nothing like that")
    expect(source(page)).to_contain_text("No table matches.")


def test_the_order_of_the_focus_is_that_of_the_page(page: Page, served: PageServer) -> None:
    page.goto(served.url)
    expect(overall(page)).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the status"
    expect(page.locator(".skip")).to_be_in_viewport()
    page.keyboard.press("Enter")
    tops = []
    for _ in range(6):
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
        tops.append(page.evaluate("document.activeElement.getBoundingClientRect().top + scrollY"))
    assert tops == sorted(tops)


# --- light, dark, motion ---------------------------------------------------------------------

CONTRAST = """() => {
  const light = (rgb) => {
    const [r, g, b] = rgb.match(/[\\d.]+/g).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = (e) => {
    for (let at = e; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (color !== 'rgba(0, 0, 0, 0)' && !color.includes('color(')) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !e.checkVisibility() || e.closest('noscript')) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${e.className} ${e.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return found;
}"""
"""Texts whose contrast is less than WCAG 2 asks for (AA)."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_by_day_and_by_night(page: Page, scheme: Any) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    with PageServer(*stopped()) as served:
        page.goto(served.url)
        expect(overall(page)).to_have_text("2 problems need attention")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) > 380) == (scheme == "light")
        assert page.evaluate(CONTRAST) == []
        moving = "[...document.querySelectorAll('*')].filter((e) => parseFloat("
        moving += "getComputedStyle(e).transitionDuration) > 0 || e.getAnimations().length).length"
        assert page.evaluate(moving) == 0


# --- the token -------------------------------------------------------------------------------


def test_the_page_asks_for_the_token_and_keeps_it_for_the_tab(
    page: Page, faults: list[str]
) -> None:
    with PageServer(*healthy(), protection=Protection(TOKEN)) as served:
        page.goto(served.url)
        field = page.get_by_label("Token")
        expect(field).to_be_focused()
        assert "shop" not in page.content()
        field.fill("not that")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("The daemon rejects this token.")
        field.fill(TOKEN)
        page.get_by_role("button", name="Show the status").click()
        expect(overall(page)).to_have_text("All sources deliver every table")
        page.reload()
        expect(overall(page)).to_have_text("All sources deliver every table")
        assert page.context.cookies() == []
        assert TOKEN not in page.content() + page.url
        page.get_by_role("button", name="Forget the token").click()
        expect(field).to_be_focused()
        assert "shop" not in page.content()
        page.reload()
        expect(field).to_be_visible()
    assert all("401" in fault for fault in faults if "ERR_" not in fault)
    faults.clear()


# --- 500 tables ------------------------------------------------------------------------------

OBSERVE = """() => {
  window.shift = 0;
  new PerformanceObserver((list) => {
    for (const e of list.getEntries()) if (!e.hadRecentInput) window.shift += e.value;
  }).observe({ type: 'layout-shift', buffered: true });
}"""
FIRST = """() => ({
  paint_ms: performance.getEntriesByName('first-contentful-paint')[0].startTime,
  file_bytes: performance.getEntries().reduce((sum, e) => sum + (e.transferSize ?? 0), 0),
})"""


class Costs:
    """What a page costs the browser's main thread, in CPU time: the same on a loaded machine."""

    def __init__(self, page: Page) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self._before = self._now_ms()

    def since_ms(self) -> float:
        """Since the last call."""
        before, self._before = self._before, self._now_ms()
        return self._before - before

    def _now_ms(self) -> float:
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        return float(next(m["value"] for m in metrics if m["name"] == "TaskDuration")) * 1000


@pytest.mark.thorough
def test_500_tables_that_all_change_each_second_stay_smooth(page: Page) -> None:
    """What it prints is in docs/status-page.md; an update costs no more a table than of a few."""
    daemon, history = many(500)
    shop = daemon.sources["shop"]
    page.add_init_script(f"({OBSERVE})()")
    costs = Costs(page)

    def change() -> None:
        for table in shop.tables.values():
            table.rows += 1

    with PageServer(daemon, history) as served:
        page.goto(served.url)
        expect(tables(page).locator("tbody")).to_have_count(100)
        told = {**page.evaluate(FIRST), "load_cpu_ms": costs.since_ms()}
        told["state_bytes"] = served.do(lambda: len(_state(served)))
        for shown in (100, 500):
            if shown == 500:
                page.get_by_role("button", name="Show all 500").click()
                expect(tables(page).locator("tbody")).to_have_count(500)
            row = tables(page).locator("tbody").last.locator("tr")
            number = row.locator("td.number").first
            last = shop.tables[row.locator("th").inner_text()]
            last.rows = 100
            costs.since_ms()
            for _ in range(4):
                served.do(change)
                expect(number).to_have_text(str(last.rows))
            told[f"update_cpu_ms_{shown}"] = costs.since_ms() / 4
        told["shift"] = page.evaluate("window.shift")
    print({name: round(value, 4) for name, value in told.items()})  # noqa: T201
    assert told["file_bytes"] + told["state_bytes"] < 150_000
    assert told["update_cpu_ms_500"] < 10 * told["update_cpu_ms_100"]
    assert told["shift"] < 0.02


def _state(served: PageServer) -> bytes:
    shown = StatusDiff(RedactionCache(Redactor()))
    found = shown.update(served.status, served.server.feed.history, datetime.now(UTC))
    return json.dumps(found, separators=(",", ":")).encode()
