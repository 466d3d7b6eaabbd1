"""Tests the chat page with scripted streams: long prompts, streams that move, failures, reasoning, shades."""

from __future__ import annotations

import asyncio
import json
import math
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from oaiserve.config import ServerOptions
from oaiserve.routes.dashboard import answer_root, page_routes
from tests.e2e.browser import PHONE, OpenPage, fits_the_width
from tests.routes.conftest import RunningServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser

OPTIONS = ServerOptions(drain_timeout_seconds=0)
MODEL = {
    "id": "/models/tiny-coder-Q4_K_M.gguf",
    "root": "/models/tiny-coder-Q4_K_M.gguf",
    "max_model_len": 8192,
    "task": "generate",
    "input_modalities": ["text"],
    "default_sampling": {"temperature": 0.2, "min_p": 0.05},
}
LAST = "#turns > li:last-child .answered"
DONE = "data: [DONE]\n\n"


class Script:
    """A server whose streams get their text from a test, piece by piece. None ends a stream."""

    def __init__(self) -> None:
        self.pieces: queue.Queue[str | None] = queue.Queue()
        self.bodies: list[dict[str, Any]] = []
        self.is_abandoned = threading.Event()

    async def chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        try:
            while (piece := await asyncio.to_thread(self.pieces.get)) is not None:
                yield piece
        except asyncio.CancelledError:
            self.is_abandoned.set()
            self.pieces.put(None)  # for the thread that waits
            raise

    def say(self, **delta: Any) -> None:
        """Send a chunk with this delta, whose text is one token."""
        text = "".join(delta.values())
        token = {"token": text, "bytes": [*text.encode()], "logprob": math.log(0.6)}
        self.chunk(choices=[{"index": 0, "delta": delta, "logprobs": {"content": [token]}}])

    def chunk(self, **chunk: Any) -> None:
        self.pieces.put(f"data: {json.dumps(chunk)}\n\n")

    def end(self) -> None:
        self.pieces.put(DONE)
        self.pieces.put(None)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def page(script: Script, open_page: OpenPage) -> Iterator[Page]:
    async def root(request: Request) -> Response:
        return await answer_root(request, OPTIONS, "1")

    async def models(_request: Request) -> Response:
        return JSONResponse({"data": [MODEL]})

    routes = [
        *(Route("/", root), Route("/v1/models", models)),
        *(Route("/v1/chat/completions", script.chat, methods=["POST"]), *page_routes(None)),
    ]
    with RunningServer(Starlette(routes=routes), OPTIONS) as server:
        page = ready(open_page(f"{server.url}/"))
        yield page
        script.pieces.put(None)
        page.goto("about:blank")


def ready(page: Page) -> Page:
    page.wait_for_selector("#model-name:text-is('tiny-coder')")
    return page


def send(page: Page, text: str = "Hi") -> None:
    page.fill("#prompt", text)
    page.click("#send")


def ended(page: Page) -> None:
    page.wait_for_selector("#turns:not(.busy)")


def test_long_prompt_shows_its_progress_and_comments_are_not_events(page: Page, script: Script) -> None:
    send(page)
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


def test_a_stream_that_moves_to_another_server_says_so_and_goes_on(page: Page, script: Script) -> None:
    send(page)
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


def test_failure_while_reading_stops_the_request(page: Page, script: Script) -> None:
    send(page)
    script.say(content="One")
    script.pieces.put("data: {broken\n\n")
    page.wait_for_selector(f"{LAST} .error:visible")
    assert script.is_abandoned.wait(60)
    assert page.get_attribute("#send", "aria-label") == "Send"


def test_reasoning_is_folded_with_its_time(page: Page, script: Script) -> None:
    send(page)
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
    send(page)
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
    assert page.inner_text("#model-details") == "Q4_K_M"
    page.click("#settings-button")
    names = ("temperature", "top_p", "min_p", "top_k")
    shown = [page.get_attribute(f"[name={name}]", "placeholder") for name in names]
    assert shown == ["0.2", "1", "0.05", "off"]
    page.fill("[name=top_k]", "40")
    page.fill("[name=stop]", "END\n\\n\\n")
    send(page)
    ours = {"model", "messages", "logprobs", "stream", "stream_options", "return_progress"}
    page.wait_for_selector("#turns.busy")
    script.end()
    ended(page)
    (body,) = script.bodies
    assert body.keys() - ours == {"top_k", "stop"}
    assert (body["top_k"], body["stop"]) == (40, ["END", "\n\n"])


def test_the_page_follows_an_answer_only_while_its_end_is_in_sight(page: Page, script: Script) -> None:
    send(page)
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


def test_answer_survives_its_page_and_grows_in_other_tabs(page: Page, script: Script) -> None:
    send(page)
    script.say(content="One, ")
    other = page.context.new_page()
    other.goto(page.url)
    ready(other).click(".talk")
    other.wait_for_selector(f"{LAST} .markdown:has-text('One,')")  # stored while the stream is open
    assert other.inner_text(f"{LAST} .end").startswith("Not complete:")
    other.fill("#prompt", "A draft")
    script.say(content="two.")
    page.wait_for_selector(f"{LAST} .markdown:has-text('One, two.')")
    page.reload()
    ready(page).click(".talk")
    for tab in (page, other):
        tab.wait_for_selector(f"{LAST} .markdown:has-text('One, two.')")
        assert tab.inner_text(f"{LAST} .end").startswith("Not complete:")
    assert other.input_value("#prompt") == "A draft"


def test_page_works_without_storage_and_says_that_chats_are_lost(page: Page, script: Script) -> None:
    page.add_init_script("""for (const name of ["localStorage", "sessionStorage"]) {
      Object.defineProperty(window, name, { get() { throw new DOMException("No", "SecurityError"); } });
    }""")
    page.reload()
    assert "does not allow this page to store anything" in ready(page).inner_text("#problem")
    send(page)
    script.say(content="Yes.")
    script.end()
    ended(page)
    assert page.locator(".talk").all_inner_texts() == ["Hi"]


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


def test_a_conversation_of_an_earlier_version_is_readable(page: Page) -> None:
    message = {"content": "**Yes**", "reasoning": "", "calls": []}
    step = {"message": message, "tokens": [["**Yes**", 0, -0.1]], "eventsMs": [9], "phases": [["decode", 9]], "why": []}
    answers = [{"model": name, "asked": "temperature 0.7", "steps": [step]} for name in ("a", "b")]
    settings = {"system": "", "temperature": "0.7", "max_completion_tokens": "512", "kind": "text", "models": ["a"]}
    turns = [{"text": "Old?", "files": [], "answers": answers}]
    old = {"id": "1", "title": "An old one", "changedMs": 0, "turns": turns, "settings": settings}
    page.evaluate("old => localStorage.setItem('oaiserve-chat-1', JSON.stringify(old))", old)
    page.reload()
    page.click("text=An old one")
    assert page.locator("#turns strong").all_inner_texts() == ["Yes", "Yes"]
    assert page.locator("#turns .answered h2").all_text_contents() == ["a temperature 0.7", "b temperature 0.7"]
    assert page.input_value("[name=max_completion_tokens]") == "512"
