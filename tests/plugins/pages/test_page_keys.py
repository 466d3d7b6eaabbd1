"""Tests how the pages ask for an API key in a real Chromium: a missing, a wrong one, and one that lacks a right."""

from __future__ import annotations

import pytest

from tests.e2e.browser import OpenPage, weak_contrasts
from tests.e2e.live import API_KEY, LiveServer

pytestmark = pytest.mark.browser


def test_the_page_asks_for_a_missing_api_key_until_one_is_right(live: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{live.url}/dashboard", may_log=True)
    page.wait_for_selector("#key-form:visible")
    assert page.locator("label[for=key]").inner_text() == "This server requires an API key."
    assert page.inner_text("#status") == "Waiting for an API key"
    assert page.evaluate("() => document.activeElement.id") == "key"
    assert page.is_hidden("#problem")  # a missing key is no error
    assert page.is_hidden("#main")
    for key, message in (
        ("wrong", "The API key is not known to this server. Please enter another key."),
        ("schlüssel", "An API key has only ASCII letters, digits and punctuation, and no spaces."),
    ):
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#problem:text-is('{message}')")
        assert page.get_attribute("#problem", "role") == "alert"
        assert weak_contrasts(page) == []
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#status[data-state=live]")
    assert page.is_hidden("#key-form")
    assert page.is_hidden("#problem")
    assert page.is_visible("#main")


def test_the_page_asks_for_the_key_when_any_request_finds_it_invalid(live: LiveServer, open_page: OpenPage) -> None:
    with live.http() as http:
        http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
    for path, needs_key in (("/requests", "[name=outcome]"), ("/", "#send")):
        visitor = open_page(f"{live.url}{path}", may_log=True)
        visitor.fill("#key", API_KEY)
        visitor.keyboard.press("Enter")
        if needs_key == "#send":
            visitor.fill("#prompt", "Hi")
        visitor.wait_for_selector(needs_key)
        visitor.evaluate("() => sessionStorage.setItem('oaiserve-api-key', 'old')")
        if needs_key == "#send":
            visitor.click(needs_key)
        else:
            visitor.select_option(needs_key, "failed")
        visitor.wait_for_selector("#key-form:visible")
        assert visitor.inner_text("#problem").startswith("The API key is not known")


@pytest.mark.parametrize(("path", "route"), [("/requests", "**/debug/requests*"), ("/dashboard", "**/feed")])
def test_page_asks_for_another_key_if_this_one_lacks_the_right(
    live: LiveServer, open_page: OpenPage, path: str, route: str
) -> None:
    page = open_page(f"{live.url}{path}", may_log=True)
    message = "The role of the key 'a' does not permit this."
    page.route(route, lambda call: call.fulfill(status=403, json={"error": {"message": message}}))
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector(f'#problem:text-is("{message} Please enter another key.")')
    page.unroute(route)
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#status[data-state=live]")
    assert page.is_hidden("#problem")


def test_right_key_after_a_wrong_one_leaves_no_message_in_the_chat(live: LiveServer, open_page: OpenPage) -> None:
    page = open_page(f"{live.url}/", may_log=True)
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#problem:visible")
    assert page.locator("#key").evaluate("box => box.clientHeight") < 50
    page.fill("#key", API_KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#status[data-state=live]")
    assert page.is_hidden("#problem")
