"""Tests /docs, the page about the API, in a real Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, EngineOptions, ServerOptions
from tests.e2e.browser import PHONE, OpenPage, fits_the_width, weak_contrasts
from tests.published import published
from tests.routes.conftest import run_server
from tests.routes.doubles import FakeEngine, FakeTelemetry

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

KEY = "a-key-of-the-tests"


def serve(**options: Any) -> Any:
    server_options = ServerOptions(drain_timeout_seconds=5, **options)
    config = Config("demo", server_options, EngineOptions(lora_dir=Path("adapters")))
    return run_server(create_app(config, FakeEngine(), FakeTelemetry()), server_options)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve(tokenizer_info=True) as url:
        yield f"{url}/docs"


def unfold_all(page: Page) -> None:
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
    route = f"{url.removesuffix('/docs')}/v1/chat/completions"
    assert text.startswith(f"curl {route}")
    body = json.loads(text.split("-d '")[1].rstrip("'"))
    assert httpx.post(route, json=body, timeout=60).status_code == 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(url: str, open_page: OpenPage, scheme: str) -> None:
    page = open_page(url, color_scheme=scheme)
    page.wait_for_selector("#main section")
    page.locator("#post_v1_chat_completions summary").first.click()
    assert weak_contrasts(page, least_texts=100) == []


def test_the_page_needs_no_horizontal_scrolling_on_a_phone(url: str, open_page: OpenPage) -> None:
    page = open_page(url, PHONE)
    page.wait_for_selector("#main section")
    unfold_all(page)
    assert fits_the_width(page)


def test_with_guard_all_the_page_asks_for_the_key(open_page: OpenPage) -> None:
    with serve(api_key=(KEY,), guard_all=True) as url:
        page = open_page(f"{url}/docs", may_log=True)
        page.wait_for_selector("#key:visible")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#main section")
        assert "$API_KEY" in page.text_content("#get_v1_models pre")
