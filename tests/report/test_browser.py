"""A report in a real browser: nothing fetched, nothing complained of, everything drawn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        missing = "chromium is not installed: apt-get install -y chromium"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(report_file: Path) -> str:
    return report_file.as_uri()


def opened(browser: Browser, report: str, width: int = 1000, scheme: str = "light") -> Page:
    """The report in a window of its own, which has not complained and has asked for one file."""
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page = context.new_page()
    page.set_default_timeout(120_000)  # a busy machine is no fault of the page
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report)
    assert complaints == []
    assert asked == [report]
    return page


@pytest.mark.parametrize("width", [1000, 400])
def test_every_chart_shows_its_marks(browser: Browser, report: str, width: int) -> None:
    page = opened(browser, report, width)
    charts = page.locator("figure .chart")
    assert charts.count() >= 12
    for index in range(charts.count()):
        chart = charts.nth(index)
        drawn = chart.locator("svg:visible")
        assert drawn.count() == 1
        sizes = drawn.locator(".mark").evaluate_all(
            "marks => marks.map(mark => mark.getBoundingClientRect())"
            ".map(box => Math.max(box.width, box.height))"
        )
        assert any(size > 3 for size in sizes), chart.get_attribute("aria-label")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_texts_stay_within_their_charts(browser: Browser, report: str) -> None:
    for width in (1000, 400):
        page = opened(browser, report, width)
        outside = page.evaluate(
            """() => [...document.querySelectorAll('figure svg')]
                .filter(svg => svg.checkVisibility())
                .flatMap(svg => {
                    const box = svg.getBoundingClientRect();
                    return [...svg.querySelectorAll('text')].filter(text => {
                        const own = text.getBoundingClientRect();
                        return own.left < box.left - 12 || own.right > box.right + 12;
                    }).map(text => text.textContent);
                })"""
        )
        assert outside == []


def test_the_keyboard_reaches_every_section(browser: Browser, report: str) -> None:
    page = opened(browser, report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0  # type: ignore[index]
    wanted = set(page.locator("main section").evaluate_all("all => all.map(each => each.id)"))
    linked: set[str] = set()
    opened_tables: set[str] = set()
    for _ in range(200):
        page.keyboard.press("Tab")
        at = page.evaluate(
            """() => { const e = document.activeElement; return [e.tagName, e.hash || '',
            (e.closest('figure') || {}).id || '']; }"""
        )
        if at[0] == "A":
            linked.add(at[1].removeprefix("#"))
        elif at[0] == "SUMMARY" and at[2] not in opened_tables:
            opened_tables.add(at[2])
            page.keyboard.press("Enter")
            assert page.locator(f"#{at[2]} table").is_visible()
        elif at[0] == "BODY":
            break
    assert wanted <= linked
    assert len(opened_tables) == page.locator("figure").count()


def test_colors_follow_the_scheme(browser: Browser, report: str) -> None:
    found = {}
    for scheme in ("light", "dark"):
        page = opened(browser, report, scheme=scheme)
        found[scheme] = page.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector('#speedup svg text')).fill]"""
        )
    assert found["light"][0] == "rgb(255, 255, 255)"
    assert found["light"][0] != found["dark"][0]
    assert found["light"][1] != found["dark"][1]


def test_prints_on_paper_in_light_colors(browser: Browser, report: str) -> None:
    page = opened(browser, report, 400, "dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("nav").is_hidden()
    assert page.locator("#speedup-0 .wide").is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")
