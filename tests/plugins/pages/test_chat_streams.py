"""Tests the chat page with scripted streams: long prompts, streams that move, failures, reasoning, shades."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.browser import PHONE, OpenPage, fits_the_width
from tests.plugins.pages.chat_page import LAST, MODEL, Script, ask, ended, ready

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser


@pytest.fixture
def page(scripted_page: Page) -> Page:
    return scripted_page


def test_long_prompt_shows_its_progress_and_comments_are_not_events(page: Page, script: Script) -> None:
    ask(page)
    page.wait_for_selector(".progress:has-text('Waiting for the first token')")
    script.pieces.put(": 16 of 3582 prompt tokens\n\n")
    script.chunk(choices=[], prompt_progress={"total": 3582, "cache": 0, "processed": 16, "time_ms": 900})
    page.wait_for_selector(".progress:has-text('Reading the prompt: 16 of 3,582 tokens')")
    progress = {"total": 3582, "cache": 0, "processed": 1536, "time_ms": 4000, "rest_ms": 600_000}
    script.chunk(choices=[], prompt_progress=progress)
    page.wait_for_selector(".progress:has-text('1,536 of 3,582 tokens, about 10 min left')")
    assert page.locator("progress").evaluate("bar => bar.value / bar.max") == pytest.approx(1536 / 3582)
    script.say(content="Hello.")
    page.wait_for_selector(f"{LAST} .markdown:has-text('Hello.')")
    assert page.is_hidden(".progress")
    script.end()
    ended(page)
    assert page.locator(".error:visible").count() == 0
    assert script.bodies[0]["return_progress"]


def test_an_answer_that_repeats_itself_is_stopped_and_can_go_on(page: Page, script: Script) -> None:
    ask(page)
    script.say(content="ha ha")
    script.chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "repetition"}])
    script.end()
    ended(page)
    assert page.locator(f"{LAST} .end p").inner_text().startswith("Stopped, because this answer repeats itself.")
    assert script.bodies[0]["repetition_detection"] is True
    page.click(f"{LAST} .end button:text-is('Continue')")
    script.say(content=" ho")
    script.end()
    ended(page)
    assert page.locator(f"{LAST} .markdown").inner_text() == "ha ha ho"
    assert page.locator(f"{LAST} .end").inner_text() == ""
    assert script.bodies[1]["continue_final_message"]


def test_a_stream_that_moves_to_another_server_says_so_and_goes_on(page: Page, script: Script) -> None:
    ask(page)
    script.say(content="One, ")
    page.wait_for_selector(f"{LAST} .markdown:has-text('One,')")
    for _ in range(2):
        script.pieces.put(": the answer is about to go on\n\n")
    page.wait_for_selector(".progress:has-text('Another one is about to continue this answer')")
    script.say(content="two.")
    page.wait_for_selector(f"{LAST} .markdown:has-text('One, two.')")
    assert page.is_hidden(".progress")
    script.end()
    ended(page)
    assert page.locator(".error:visible").count() == 0


def test_a_lost_connection_is_one_state_with_a_button_that_tries_again(
    script: Script, scripted_url: str, open_page: OpenPage
) -> None:
    page = ready(open_page(scripted_url, may_log=True))
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page)
    page.wait_for_selector(f"{LAST} .error:has-text('The server cannot be reached.')")
    assert page.inner_text("#status") == "No connection; trying again"
    page.unroute("**/v1/chat/completions")
    script.answer("Hello.")
    page.click(f"{LAST} .end button:text-is('Try again')")
    page.wait_for_selector(f"{LAST} .markdown:has-text('Hello.')")
    ended(page)
    page.wait_for_selector("#status[data-state=live]")


def test_a_server_that_is_gone_is_noticed_without_a_message(scripted_url: str, open_page: OpenPage) -> None:
    page = ready(open_page(scripted_url, may_log=True))
    page.route("**/health", lambda route: route.abort())
    page.wait_for_selector("#status[data-state=lost]")


def test_failure_while_reading_stops_the_request(page: Page, script: Script) -> None:
    ask(page)
    script.say(content="One")
    script.pieces.put("data: {broken\n\n")
    page.wait_for_selector(f"{LAST} .error:visible")
    script.is_abandoned.wait()
    assert page.get_attribute("#send", "aria-label") == "Send"


def test_reasoning_is_folded_with_its_time(page: Page, script: Script) -> None:
    ask(page)
    script.say(reasoning="Hmm.")
    page.wait_for_selector(".reasoning[open] summary:text-is('Thinking…')")
    script.say(content="Yes.")
    page.wait_for_selector(".reasoning:not([open]) summary:text('Thought for')")
    page.click(".reasoning summary")
    assert page.inner_text(".reasoning .text") == "Hmm."
    script.end()
    ended(page)
    assert page.is_visible(".reasoning .text")  # as the user has chosen


def test_shaded_tokens_keep_the_markdown_around_them(page: Page, script: Script) -> None:
    ask(page)
    for text in ("A **bo", "ld** word:\n\n", "```py\nif ", "x: pass\n```\n", "- one\n- two"):
        script.say(content=text)
    script.end()
    ended(page)
    page.wait_for_selector(f"{LAST} .hljs-keyword")
    before = page.text_content(f"{LAST} .markdown")
    page.click(".account summary")
    page.click(".views [value=certainty]")
    tokens = page.locator(f"{LAST} .markdown [data-token]").evaluate_all("spans => spans.map((s) => s.dataset.token)")
    assert sorted(set(tokens)) == ["0", "1", "2", "3", "4"]
    assert page.locator(f"{LAST} strong .shade-2").all_text_contents() == ["bo", "ld"]
    assert page.locator(f"{LAST} .hljs-keyword .shade-2").first.text_content() == "if"
    assert page.locator(f"{LAST} .markdown li").all_text_contents() == ["one", "two"]
    assert page.text_content(f"{LAST} .markdown") == before
    page.click(".views [value=text]")
    assert page.locator(f"{LAST} [data-token]").count() == 0
    assert page.text_content(f"{LAST} .markdown") == before


def test_an_empty_field_shows_the_default_of_the_model_and_is_not_sent(page: Page, script: Script) -> None:
    page.click("#settings-button")
    names = ("temperature", "top_p", "min_p", "top_k", "max_completion_tokens")
    shown = [page.get_attribute(f"[name={name}]", "placeholder") for name in names]
    assert shown == ["0.2", "1", "0.05", "off", "512"]
    page.fill("[name=top_k]", "40")
    page.fill("[name=stop]", "END\n\\n\\n")
    ask(page)
    ours = {"model", "messages", "logprobs", "stream", "stream_options", "return_progress", "repetition_detection"}
    page.wait_for_selector("#turns.busy")
    script.end()
    ended(page)
    (body,) = script.bodies
    assert body.keys() - ours == {"top_k", "stop"}
    assert (body["top_k"], body["stop"]) == (40, ["END", "\n\n"])


def test_the_page_follows_an_answer_only_while_its_end_is_in_sight(page: Page, script: Script) -> None:
    ask(page)
    script.say(content="line\n\n" * 100)
    page.wait_for_selector(f"{LAST} .block >> nth=99")
    at_end = """() => {
      const { scrollTop, clientHeight, scrollHeight } = document.getElementById("scroll");
      return scrollTop + clientHeight > scrollHeight - 5;
    }"""
    page.wait_for_function(at_end)
    page.locator("#scroll").evaluate("all => all.scrollTo(0, 100)")
    page.wait_for_selector("#to-end:visible")
    script.say(content="more\n\n" * 20)
    page.wait_for_selector(f"{LAST} .block >> nth=119")
    assert page.locator("#scroll").evaluate("all => all.scrollTop") == 100
    page.click("#to-end")
    page.wait_for_function(at_end)
    assert page.is_hidden("#to-end")
    script.end()
    ended(page)


def test_what_is_wide_or_high_leaves_the_controls_in_sight_on_a_phone(page: Page, script: Script) -> None:
    page.set_viewport_size(PHONE)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [MODEL, MODEL | {"id": "long-name-" * 9}]}))
    page.reload()
    ready(page).click("#model-button")
    right = "node => node.getBoundingClientRect().right"
    assert page.locator("#picker").evaluate(right) <= PHONE["width"]
    page.keyboard.press("Escape")
    files = [{"name": f"{'x' * 90}{n}.txt", "mimeType": "text/plain", "buffer": b"Hi"} for n in range(9)]
    page.set_input_files("#attach", files)
    page.wait_for_selector("#attached li >> nth=8")
    page.fill("#prompt", "line\n" * 30)
    bottom = "node => node.getBoundingClientRect().bottom"
    assert page.locator("#send").evaluate(bottom) <= PHONE["height"]
    page.click("#send")
    script.say(content=f"| Number | Text |\n| --- | --- |\n| 3.50 | {'words ' * 30}|")
    script.end()
    ended(page)
    heights = page.locator(f"{LAST} th").evaluate_all("cells => cells.map((cell) => cell.clientHeight)")
    assert max(heights) < 40  # no word is broken
    assert fits_the_width(page)
