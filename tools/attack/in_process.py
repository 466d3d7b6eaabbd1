"""The server's app in this process, with an engine that computes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx

from oaiserve.app import create_app
from oaiserve.checkpoints import demo as demo_files
from oaiserve.config import Config
from oaiserve.engine.grammars.grammar import Grammars
from oaiserve.engine.request import Prompt, Request
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.http.fair_turns import at_once
from tests.routes.doubles import FakeEngine, FakeTelemetry

JSON = {"content-type": "application/json"}


class EncodingEngine(FakeEngine):
    """An engine that renders, encodes and compiles as the real one does, and answers by its script."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        super().__init__()
        self.tokenizer: Any = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.max_model_len = 1 << 20
        self._grammars = grammars
        self.prompt = ""  # the text of the last prompt

    def _check(self, request: Request) -> None:
        if request.params.grammar is not None:
            self._grammars.compile(request.params.grammar, request.client)
        for prompt in request.prompts:
            self._read(prompt)
        self.submitted.queue.clear()

    def encode(self, prompt: Prompt, most_tokens: int) -> Any:
        self._read(prompt)
        return super().encode(prompt, most_tokens)

    def _read(self, prompt: Prompt) -> None:
        self.prompt = self.tokenizer.decode(at_once(self.tokenizer.encode_in_pieces(prompt)))


@cache
def demo() -> tuple[Tokenizer, Grammars]:
    tokenizer = Tokenizer.from_pretrained(demo_files.fetched())
    return tokenizer, Grammars(
        tokenizer.backend, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids
    )


def encoding_engine(template: str | None = None) -> EncodingEngine:
    """Return an engine with the demo model's tokenizer, maybe with another chat template."""
    tokenizer, grammars = demo()
    return EncodingEngine(tokenizer if template is None else Tokenizer(tokenizer.stored, template), grammars)


class App:
    """The app around an engine, until it is closed."""

    def __init__(self, engine: FakeEngine) -> None:
        app = create_app(Config("demo"), engine, FakeTelemetry())  # type: ignore[arg-type]
        self._loop = asyncio.new_event_loop()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        self._lifespan = app.router.lifespan_context(app)
        self._loop.run_until_complete(self._lifespan.__aenter__())

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = JSON) -> httpx.Response:
        """Send a body. A path with `{conversation_id}` gets that of a new conversation."""
        if "{conversation_id}" in path:
            path = path.replace("{conversation_id}", self.post("/v1/conversations", b"{}").json()["id"])
        return self._loop.run_until_complete(self._http.post(path, content=body, headers=headers))

    def close(self) -> None:
        self._loop.run_until_complete(self._http.aclose())
        self._loop.run_until_complete(self._lifespan.__aexit__(None, None, None))
        self._loop.close()
