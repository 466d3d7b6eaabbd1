"""The tokens of a request on its page, in a real Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pytest

from tests.e2e.browser import DESK, PHONE, OpenPage, check_texts_and_controls, walk_to
from tests.e2e.live import LiveServer, answers_are_as_published, serve_process  # noqa: F401 - a fixture
from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page, ViewportSize

pytestmark = [pytest.mark.browser, pytest.mark.plugin("pages")]

HELLO = {"role": "user", "content": "Hello <b>there</b>\nand again"}


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log_file = tmp_path_factory.mktemp("inspector") / "log"
    flags = ("--served-model-name", "small", "--kv-cache-memory", "30MiB", "--inspect", "20")
    with serve_process(str(small_model), log_file, *flags) as server:
        yield server


def chat(server: LiveServer, request_id: str, clock: str, *more: dict[str, str], **fields: Any) -> None:
    messages = [{"role": "system", "content": f"It is {clock}.\nBe brief."}, HELLO, *more]
    body = {"messages": messages, "max_tokens": 12, "ignore_eos": True, **fields}
    headers = {"x-request-id": request_id, "x-session-id": "a-run"}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    account = f"{server.url}/debug/requests/{request_id}"
    wait_until(lambda: "outcome" in httpx.get(account).json())


def page_of(server: LiveServer, request_id: str, open_page: OpenPage, **options: Any) -> Page:
    page = open_page(f"{server.url}/requests", **options)
    page.goto(f"{server.url}/requests/{request_id}")
    page.wait_for_selector("#account .tiles")
    return page


def opened(page: Page) -> Page:
    page.click("#sent summary")
    page.wait_for_selector("#sent .flow span")
    return page


def test_the_page_shows_the_tokens_and_the_difference_to_the_earlier_prompt(
    server: LiveServer, open_page: OpenPage
) -> None:
    chat(server, "before", "12:01")
    chat(server, "after", "12:02", {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"})
    page = opened(page_of(server, "after", open_page))
    prompt, answer = page.locator(".flow").all()
    assert "Hello <b>there</b>" in (prompt.text_content() or "")
    assert prompt.locator(".kind-system").all_text_contents() == [*"It is 12:02.\nBe brief."]
    assert prompt.locator("del").all_text_contents() == ["1"]
    assert prompt.locator(".added").first.text_content() == "2"
    assert re.search(r" tokens? left, and \d+ tokens came. The differences are in 2 places.", page.inner_text("#sent"))
    gap = "node => node.nextSibling.getBoundingClientRect().left - node.getBoundingClientRect().right"
    assert prompt.locator("del").first.evaluate(gap) > 2  # so that they don't read as one number
    assert answer.locator("span").count() == 12
    page.click("text=Show the next difference")
    assert page.text_content(".flow .marked") == "2"
    assert "not in the earlier prompt" in page.locator(".token-line").first.inner_text()


def test_the_sign_of_a_line_is_at_its_end_and_a_removed_end_is_shown(server: LiveServer, open_page: OpenPage) -> None:
    for request_id, prompt in (("whole", "One.\n\nTwo. Three"), ("cut", "One.\n\nTwo.")):
        body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        headers = {"x-request-id": request_id, "x-session-id": "texts"}
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        wait_until(lambda of=request_id: "outcome" in httpx.get(f"{server.url}/debug/requests/{of}").json())
    page = opened(page_of(server, "cut", open_page))
    flow = page.locator(".flow").first
    assert flow.text_content() == "One.\n\nTwo. Three"
    assert flow.locator("del").all_text_contents() == [" Three"]
    follow = flow.locator(".end").evaluate_all("signs => signs.map((sign) => sign.nextSibling.data)")
    assert [text[0] for text in follow] == ["\n", "\n"]


def test_the_tokens_can_be_read_with_the_keyboard_alone(server: LiveServer, open_page: OpenPage) -> None:
    chat(server, "keys", "12:03")
    page = page_of(server, "keys", open_page)
    walk_to(page, "#sent summary")
    page.keyboard.press("Enter")
    page.wait_for_selector("#sent .flow span")
    walk_to(page, ".flow")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token-line").first.inner_text().startswith('"|" · token 2 · ')
    walk_to(page, "button[value='cost']")
    page.keyboard.press("Enter")
    walk_to(page, ".token-list:last-child .flow")
    page.keyboard.press("End")
    line = page.locator(".token-line").last.inner_text()
    # A draft that came true is in one step with the token before it.
    assert " after the token before it" in line or " in one step with the token before it" in line


@pytest.mark.parametrize("viewport", [DESK, PHONE, {"width": 390, "height": 844}])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_and_fit(
    server: LiveServer, open_page: OpenPage, viewport: ViewportSize, scheme: Literal["light", "dark"]
) -> None:
    chat(server, "seen-before", "12:04", n=2)
    chat(server, "seen", "12:05", n=2)
    page = opened(page_of(server, "seen", open_page, viewport=viewport, color_scheme=scheme))
    assert page.locator("#sent select").count() == 1
    check_texts_and_controls(page, least_texts=40)


def test_walking_among_thousands_of_tokens_changes_only_two(server: LiveServer, open_page: OpenPage) -> None:
    chat(server, "long", "12:06", {"role": "user", "content": "some words in a line\n" * 390})
    page = opened(page_of(server, "long", open_page))
    assert page.locator(".flow").first.locator("span").count() > 8000
    page.locator(".flow").first.focus()
    page.keyboard.press("End")
    num_changed = page.evaluate("""() => {
      const flow = document.querySelector(".flow");
      const changes = new MutationObserver(() => {});
      changes.observe(flow, { subtree: true, childList: true, attributes: true });
      flow.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
      return new Set(changes.takeRecords().map((change) => change.target)).size;
    }""")
    assert num_changed == 2


def test_without_inspect_the_page_says_how_to_turn_it_on(
    small_model: Path, tmp_path: Path, open_page: OpenPage
) -> None:
    with serve_process(str(small_model), tmp_path / "log", "--kv-cache-memory", "30MiB") as server:
        chat(server, "off", "12:07")
        page = page_of(server, "off", open_page, may_log=True)
        page.click("#sent summary")
        page.wait_for_selector("#tokens .card")
        assert "Start it with --inspect 20" in page.inner_text("#tokens")
