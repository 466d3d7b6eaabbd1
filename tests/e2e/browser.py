"""A Chromium for tests of pages. Tests that use it have the marker `browser`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

if TYPE_CHECKING:  # playwright need not be installed where there is no Chromium
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, ViewportSize

# The shell has the same engine and nothing of a desktop's browser, so a page takes half of the CPU time.
PROGRAMS = ("chromium-headless-shell", "chromium")
WAIT_MS = 120_000  # on a busy machine
PHONE: ViewportSize = {"width": 360, "height": 740}
DESK: ViewportSize = {"width": 1280, "height": 900}
_CONTRASTS = (Path(__file__).parent / "contrast.js").read_text()
OpenPage = Callable[..., "Page"]


def program() -> str | None:
    """Return the path of a Chromium if one is installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as running:
        # The sandbox does not start for root, as in a container. All pages are our own.
        browser = running.chromium.launch(executable_path=program(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def shared_context(browser: Browser) -> Iterator[BrowserContext]:
    """Keep a context with an empty page, whose process later pages share: to start one takes a second of CPU time."""
    with browser.new_context() as context:
        context.new_page()
        yield context


@pytest.fixture
def open_page(browser: Browser, shared_context: BrowserContext) -> Iterator[OpenPage]:
    """Give a function that opens a page.

    The pages of a test share cookies and storage, which the next test finds empty. A page that `is_alone` has a context
    of its own, for changes that a context cannot undo, such as another clock.

    In the end, check that no page had a problem: an error or a warning in its console, or a request to another server.
    A page that `may_log` may have errors in its console, as when a server refuses a request.
    """
    alone = []
    origins = set()
    problems = []

    def note(line: ConsoleMessage) -> None:
        if line.type in ("error", "warning"):
            problems.append(f"{line.text} ({line.location['url']})")

    def open_page(
        url: str,
        viewport: ViewportSize = DESK,
        *,
        may_log: bool = False,
        is_alone: bool = False,
        color_scheme: Literal["light", "dark"] = "light",
        permissions: Sequence[str] = (),
    ) -> Page:
        context = shared_context
        if is_alone:
            context = browser.new_context()
            alone.append(context)
        context.grant_permissions(permissions)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.set_viewport_size(viewport)
        page.emulate_media(color_scheme=color_scheme)
        base = url.rpartition("/")[0]
        if not may_log:
            page.on("console", note)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda sent: problems.append(sent.url) if not sent.url.startswith(base) else None)
        page.on("request", lambda sent: origins.add("/".join(sent.url.split("/")[:3])))
        page.goto(url)
        return page

    yield open_page
    for context in alone:
        context.close()
    empty, *pages = shared_context.pages
    for page in pages:
        page.close()
    shared_context.clear_permissions()
    shared_context.clear_cookies()
    storage = shared_context.new_cdp_session(empty)
    for origin in origins:
        storage.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
    storage.detach()
    assert problems == [], problems


def weak_contrasts(page: Page, least_texts: int = 0) -> list[str]:
    """Return the visible texts whose contrast is less than WCAG asks for. There must be more than `least_texts`."""
    contrasts = page.evaluate(_CONTRASTS)
    assert len(contrasts) > least_texts
    return [named for ratio, named in contrasts if ratio < 4.5]


def fits_the_width(page: Page) -> bool:
    """Return whether the page needs no horizontal scrolling."""
    return page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")


def check_texts_and_controls(page: Page, least_texts: int = 0) -> None:
    """Check that texts have enough contrast and controls a name, and that all fits into the width and nothing moves."""
    assert weak_contrasts(page, least_texts) == []
    assert fits_the_width(page)
    nameless = "nodes => nodes.filter((n) => !(n.labels?.length || n.textContent.trim() || n.ariaLabel)).length"
    assert page.locator("button, input, textarea, select").evaluate_all(nameless) == 0
    moves = """() => [...document.querySelectorAll("*")].map((node) => getComputedStyle(node)).filter(
      (style) => style.transitionDuration !== "0s" || style.animationName !== "none").length"""
    assert page.evaluate(moves) == 0


def walk_to(page: Page, selector: str, key: str = "Tab") -> None:
    """Press the key until an element that the selector matches has the focus."""
    for _ in range(60):
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
        page.keyboard.press(key)
    raise AssertionError(f"{key} does not lead to {selector}")
