"""`Server`: a running server as its plug-ins see it, and requests to it that stay in the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from oaiserve.errors import APIError, NotFound

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.types import Message

    from oaiserve.config import Config
    from oaiserve.facts.metric import Metric
    from oaiserve.routes.serving import Serving

PLUGINS_CLIENT = "plug-ins"  # the client of requests that no client has caused
_DONE = b"[DONE]"


class Server:
    """A running server. A route makes one by `Server(request.app)`, and a lifespan from the application that it gets.

    With several models, there is a server for each, and one in front of them, which has no model of its own: there
    only `config`, `ask`, `stream` and `client_of` can be used.
    """

    def __init__(self, app: Starlette) -> None:
        self._app = app

    @property
    def config(self) -> Config:
        """The settings of `oaiserve serve`. `config.of(TYPE)` returns those of a plug-in."""
        config: Config = self._app.state.backend.config
        return config

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the model, the first of which is in answers. Adapters have further names."""
        return self._serving.config.model_names

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt with its answer."""
        return self._serving.engine.max_model_len

    @staticmethod
    def client_of(request: Request) -> str:
        """Return whose a request is: the name of its API key, or else its address."""
        client: str = request.state.client
        return client

    async def ask(self, path: str, body: Mapping[str, Any], *, request: Request | None = None) -> dict[str, Any]:
        """Return the answer of a route such as /v1/chat/completions to a POST of this JSON body.

        The model answers it in turns with all other requests, and it has an account of its own. With `request`, it is
        on behalf of that request's client: with its API key, the limits of the key, and its share. If that client
        leaves, it is aborted, so read the body of `request` before.

        Raises APIError as the route does, which the server renders if nothing catches it, and starlette's
        ClientDisconnect.
        """
        async with aclosing(self._parts(path, body, request)) as parts:
            content = b"".join([part async for part in parts])
        answer: dict[str, Any] = msgspec.json.decode(content)
        return answer

    async def stream(
        self, path: str, body: Mapping[str, Any], *, request: Request | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of a streamed answer, as `ask` returns a whole one. The end of the loop aborts the rest."""
        rest = b""
        async with aclosing(self._parts(path, {**body, "stream": True}, request)) as parts:
            async for part in parts:
                *events, rest = (rest + part).split(b"\n\n")
                for event in events:
                    data = event.rpartition(b"data: ")[2] if b"data: " in event else _DONE  # or else a comment
                    if data != _DONE:
                        yield _raised_if_error(msgspec.json.decode(data))

    async def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text's tokens, without those that begin or end a prompt. Raises APIError."""
        ids: list[int] = (await self.ask("/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"]
        return ids

    async def detokenize(self, ids: list[int]) -> str:
        """Return the text of tokens. Raises APIError."""
        text: str = (await self.ask("/detokenize", {"tokens": ids}))["prompt"]
        return text

    def show(self, metric: Metric, read: Callable[[], Mapping[tuple[str, ...], float]]) -> None:
        """Add a metric to /metrics, from a lifespan. `read` returns its numbers by the values of its labels. It is
        called for each page, in a worker thread."""
        self._serving.telemetry.show(metric, read)

    @property
    def _serving(self) -> Serving:
        serving: Serving = self._app.state.serving
        return serving

    async def _parts(self, path: str, body: Mapping[str, Any], request: Request | None) -> AsyncGenerator[bytes]:
        """Yield the answer as the route sends it. Raises its errors, and ClientDisconnect."""
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect

        from oaiserve.routes.door.own_requests import own_scope  # with an HTTP server, like the next import
        from oaiserve.routes.intake.turns import client_left

        content = msgspec.json.encode(body)
        messages: asyncio.Queue[Message] = asyncio.Queue()
        has_left = asyncio.Event()
        received: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> Message:
            if received:
                return received.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        scope = own_scope(self._app, path, self._app.state.runtime.token_hex)
        if request is None:
            scope["state"] |= {"client": PLUGINS_CLIENT, "key_name": PLUGINS_CLIENT, "owner": ""}
        else:
            scope["state"] |= {name: request.scope["state"][name] for name in ("client", "key_name", "owner", "key")}
        scope["state"]["send"] = messages.put
        answering = asyncio.create_task(self._app.router(scope, receive, messages.put))

        def end(task: asyncio.Task[None]) -> None:
            messages.put_nowait({"type": ""})
            task.cancelled() or task.exception()  # Nobody else looks at the error of a request that was aborted.

        answering.add_done_callback(end)
        watching = None if request is None else asyncio.create_task(client_left(request.receive))
        if watching is not None:
            watching.add_done_callback(lambda _: has_left.set())
        try:
            status = 0
            refusal = b""
            while (message := await messages.get())["type"]:
                status = message.get("status", status)
                if status >= 400:
                    refusal += message.get("body", b"")
                elif part := message.get("body"):
                    yield part
            try:
                await answering
            except HTTPException as error:
                raise NotFound(f"This server has no route POST {path}.") from error
            if not status:
                raise ClientDisconnect
            if status >= 400:
                raise _error_in(status, refusal)
        finally:
            has_left.set()
            if watching is not None:
                watching.cancel()
            await asyncio.wait([answering])


def _raised_if_error(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event of a stream. Raises the APIError of one that ends it."""
    if isinstance(error := event.get("error"), dict):
        raise _error_of(error, APIError.status)
    return event


def _error_in(status: int, content: bytes) -> APIError:
    """Return the error that a route has sent."""
    return _error_of(msgspec.json.decode(content)["error"], status)


def _error_of(sent: dict[str, Any], status: int) -> APIError:
    error = APIError(sent["message"], param=sent["param"], code=sent["code"])
    error.status = status
    error.type = sent["type"]
    return error
