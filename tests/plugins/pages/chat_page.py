"""The chat page: what tests do on it, and a server for it whose streams a test writes."""

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

from oaiserve.config import Config, ServerOptions
from oaiserve.plugins.pages.files import PAGES
from oaiserve.routes.root import answer_root
from tests.e2e.browser import OpenPage
from tests.serving import RunningServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

LAST = "#turns > li:last-child .answered"
OPTIONS = ServerOptions(drain_timeout_seconds=0)
MODEL = {
    "id": "tiny-coder",
    "root": "/models/tiny-coder-Q4_K_M.gguf",
    "max_model_len": 8192,
    "task": "generate",
    "input_modalities": ["text"],
    "default_sampling": {"temperature": 0.2, "min_p": 0.05},
    "default_max_tokens": 512,
}
DONE = "data: [DONE]\n\n"


def settings(page: Page, **values: str) -> None:
    if page.is_hidden("#settings"):
        page.click("#settings-button")
    for name, value in values.items():
        if name == "kind":
            page.check(f"[name=kind][value={value}]")
        else:
            page.fill(f"[name={name}]", value)
    page.keyboard.press("Tab")  # so that the last field reports its change


def bodies(page: Page) -> list[dict[str, Any]]:
    """Return a list that gets the bodies that the page sends from now on."""
    sent_bodies: list[dict[str, Any]] = []
    page.on("request", lambda sent: sent_bodies.append(sent.post_data_json) if sent.method == "POST" else None)
    return sent_bodies


def ask(page: Page, text: str = "Hi") -> None:
    """Send a message."""
    page.fill("#prompt", text)
    page.click("#send")


def send(page: Page, text: str = "Hi") -> None:
    """Send a message, and wait for the end of the answer."""
    ask(page, text)
    ended(page)


def ended(page: Page) -> None:
    page.wait_for_selector("#turns:not(.busy)")
    page.wait_for_selector(f"{LAST}[aria-busy=false]")


def stored(page: Page) -> Any:
    """Return the conversations that the browser has."""
    return page.evaluate("""() => Object.keys(localStorage).filter((key) => key.startsWith("oaiserve-chat-")).map(
      (key) => JSON.parse(localStorage.getItem(key)))""")


# -- scripted streams ------------------------------------------------------------------------------------------------


class Script:
    """A server whose streams get their text from a test, piece by piece. None ends a stream."""

    def __init__(self) -> None:
        self.pieces: queue.Queue[str | None] = queue.Queue()
        self.bodies: list[dict[str, Any]] = []
        self.is_abandoned = threading.Event()
        self._reading = asyncio.Lock()  # of the stream that gets the pieces

    async def chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        await self._reading.acquire()
        waiting = None
        try:
            while True:
                waiting = asyncio.ensure_future(asyncio.to_thread(self.pieces.get))
                piece = await asyncio.shield(waiting)
                if piece is None:
                    return
                yield piece
        except asyncio.CancelledError:
            self.pieces.put(None)  # for the thread that waits
            self.is_abandoned.set()
            raise
        finally:
            if waiting is None or waiting.done():
                self._reading.release()
            else:
                waiting.add_done_callback(lambda _: self._reading.release())

    def say(self, **delta: Any) -> None:
        """Send a chunk with this delta, whose text is one token."""
        text = "".join(delta.values())
        token = {"token": text, "bytes": [*text.encode()], "logprob": math.log(0.6)}
        self.chunk(choices=[{"index": 0, "delta": delta, "logprobs": {"content": [token]}}])

    def chunk(self, **chunk: Any) -> None:
        self.pieces.put(f"data: {json.dumps(chunk)}\n\n")

    def answer(self, *texts: str) -> None:
        """Send a whole answer of these tokens."""
        for text in texts:
            self.say(content=text)
        self.end()

    def end(self) -> None:
        self.pieces.put(DONE)
        self.pieces.put(None)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def scripted_url(script: Script) -> Iterator[str]:
    """Give the address of the chat page of a server that sends what the script says."""
    pages = PAGES.shown(None)

    async def root(request: Request) -> Response:
        return await answer_root(request, Config("demo", OPTIONS), "1", pages)

    async def models(_request: Request) -> Response:
        return JSONResponse({"data": [MODEL]})

    async def health(_request: Request) -> Response:
        return Response()

    routes = [
        *(Route("/", root), Route("/health", health), Route("/v1/models", models)),
        *(Route("/v1/chat/completions", script.chat, methods=["POST"]), *pages.routes),
    ]
    app = Starlette(routes=routes)
    app.state.pages = pages
    with RunningServer(app, OPTIONS) as server:
        yield f"{server.url}/"


@pytest.fixture
def scripted_page(script: Script, scripted_url: str, open_page: OpenPage) -> Iterator[Page]:
    page = ready(open_page(scripted_url))
    yield page
    script.pieces.put(None)
    page.goto("about:blank")


def ready(page: Page) -> Page:
    page.wait_for_selector("#model-name:text-is('tiny-coder')")
    return page
