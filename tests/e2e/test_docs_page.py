"""Tests /docs, the page about the API, in a real Chromium."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, EngineOptions, ServerOptions
from tests.published import published
from tests.routes.conftest import run_server
from tests.routes.doubles import FakeEngine, FakeTelemetry

# These tests are skipped without Chromium, and then playwright need not be installed either.
playwright = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.browser

CONTRASTS = (Path(__file__).parent / "contrast.js").read_text()
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1280, "height": 900}
KEY = "a-key-of-the-tests"
OpenPage = Callable[..., "playwright.Page"]


def serve(**options: Any) -> Any:
    server_options = ServerOptions(drain_timeout_seconds=5, **options)
    config = Config("demo", server_options, EngineOptions(lora_dir=Path("adapters")))
    return run_server(create_app(config, FakeEngine(), FakeTelemetry()), server_options)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(tokenizer_info=True) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as running:
        # The sandbox does not start for root, as in a container. All pages are our own.
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: playwright.Browser) -> Iterator[OpenPage]:
    """Give a function that opens the page in its own context. In the end, check that no page had a problem: an error in
    its console, or a request to another server."""
    contexts, problems = [], []

    def open_page(url: str, viewport: dict[str, int] = DESK, **options: str) -> playwright.Page:
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if line.type == "warning" else None)
        page.on("request", lambda sent: problems.append(sent.url) if not sent.url.startswith(url) else None)
        page.goto(f"{url}/docs")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def unfold_all(page: playwright.Page) -> None:
    """Unfold everything, also what appears when something else is unfolded."""
    while page.locator("details:not([open])").count():
        page.evaluate("() => document.querySelectorAll('details:not([open])').forEach((one) => (one.open = true))")
        page.wait_for_selector("details[open] > summary:only-child", state="detached")


def test_the_page_has_every_route_with_all_its_fields(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    page.wait_for_selector("#main section")
    shown = page.locator("#main section > h2").all_text_contents()
    assert sorted(shown) == sorted(
        method.upper() + path for path, methods in published()["paths"].items() for method in methods
    )
    unfold_all(page)
    fields = set(page.locator("#main dt").all_text_contents())
    for schema in published()["components"]["schemas"].values():
        assert schema.get("properties", {}).keys() <= fields
    assert page.locator("#live-link:visible").count() == 1


def test_a_call_with_curl_is_answered(url: str, open_page: OpenPage) -> None:
    page = open_page(url)
    text = page.text_content("#post_v1_chat_completions pre")
    assert text.startswith(f"curl {url}/v1/chat/completions")
    body = json.loads(text.split("-d '")[1].rstrip("'"))
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(url: str, open_page: OpenPage, scheme: str) -> None:
    page = open_page(url, color_scheme=scheme)
    page.wait_for_selector("#main section")
    page.locator("#post_v1_chat_completions summary").first.click()
    found = page.evaluate(CONTRASTS)
    assert len(found) > 100
    assert [named for ratio, named in found if ratio < 4.5] == []


def test_the_page_needs_no_horizontal_scrolling_on_a_phone(url: str, open_page: OpenPage) -> None:
    page = open_page(url, PHONE)
    page.wait_for_selector("#main section")
    unfold_all(page)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]


def test_with_guard_all_the_page_asks_for_the_key(open_page: OpenPage) -> None:
    with serve(api_key=(KEY,), guard_all=True) as url:
        page = open_page(url)
        page.wait_for_selector("#key:visible")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#main section")
        assert "$API_KEY" in page.text_content("#get_v1_models pre")
