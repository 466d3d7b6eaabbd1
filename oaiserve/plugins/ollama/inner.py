"""Sends a request to one of this app's own routes instead of the client's, and translates the answer.

It passes the same router as any request, that of a server or of a gateway, with the client's key, ids and account. So
the door is passed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import Message, Send

from oaiserve.errors import APIError
from oaiserve.plugins.ollama.answers import error_in
from oaiserve.plugins.ollama.options import in_their_names
from oaiserve.plugins.ollama.requests import COMPLETIONS, LATEST, Inner
from oaiserve.routes import adaptations
from oaiserve.routes.adaptations import Adaptations

NDJSON = "application/x-ndjson"
_OF_BODY = (b"content-type", b"content-length", b"content-encoding", b"transfer-encoding", b"accept")
_OF_REFUSAL = ("retry-after", "x-should-retry", "www-authenticate", "x-ratelimit-")  # beginnings of headers

Whole = Callable[[bytes, str], bytes]  # translates a whole answer, with its header `server-timing`


class Stream(Protocol):
    def lines(self, part: bytes, /) -> Iterable[bytes]:
        """Translate the next part of a stream of server-sent events."""


class Refused(APIError):
    """One of the server's own routes refuses a request, with this status and these headers."""

    def __init__(self, status: int, message: str, code: str | None, headers: dict[str, str]) -> None:
        super().__init__(message, code=code)
        self.status = status
        self._headers = headers

    def headers(self) -> dict[str, str]:
        return self._headers


async def answer_by(
    request: Request, send: Send, inner: Inner, adapted: Adaptations, whole: Whole, stream: Stream | None = None
) -> None:
    """Answer a request by one of OpenAI's routes. A name of a model that ends with :latest also stands for the name
    without it, and a model without a chat template continues the plain prompt. Raises APIError."""
    name = str(inner.body["model"])
    without_tag = name.removesuffix(LATEST)
    attempts = [inner.named(name) for name in dict.fromkeys((without_tag, name))]
    while attempts:
        attempt = attempts.pop(0)
        try:
            return await _Passing(request, send, adapted, whole, stream).post(attempt)
        except Refused as refused:
            if refused.code == "no_chat_template" and attempt.plain is not None:
                attempts = [Inner(COMPLETIONS, attempt.plain)]
            elif refused.code != "model_not_found" or not attempts:
                raise


async def asked(request: Request, path: str) -> bytes:
    """Return the answer of an own route to a GET. Raises Refused."""
    parts: list[bytes] = []

    async def take(message: Message) -> None:
        parts.append(message.get("body", b""))

    await _Passing(request, take, Adaptations(), lambda content, _: content).run("GET", path)
    return b"".join(parts)


class _Passing:
    """A request to one of the server's own routes. Its answer is translated as it comes."""

    def __init__(
        self, request: Request, send: Send, adapted: Adaptations, whole: Whole, stream: Stream | None = None
    ) -> None:
        self._request = request
        self._send = send
        self._send_part: Send = request.scope["state"]["send"]  # It bypasses the layers around this.
        self._adapted = adapted
        self._whole = whole
        self._stream = stream
        self._status = 0
        self._headers = MutableHeaders()
        self._parts: list[bytes] = []
        self._is_streaming = False

    async def post(self, inner: Inner) -> None:
        await self.run("POST", inner.path, msgspec.json.encode(inner.body))

    async def run(self, method: str, path: str, content: bytes = b"") -> None:
        """Send the request, and the answer. Raises Refused before the status line."""
        outer = self._request.scope
        headers = [header for header in outer["headers"] if header[0] not in _OF_BODY]
        if content:
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        scope: dict[str, Any] = {name: outer[name] for name in outer if name not in ("endpoint", "path_params")}
        # The link to the page of a request is relative to the client's path.
        raw_path = outer["raw_path"] if content else quote(path, safe="/:").encode()
        scope |= {"method": method, "path": path, "raw_path": raw_path, "query_string": b"", "headers": headers}
        received: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> Message:
            return received.pop() if received else await self._request.receive()

        state = scope["state"]
        state["send"] = self._take
        try:
            await outer["app"].router(scope, receive, self._take)
        except APIError as error:
            raise Refused(error.status, in_their_names(error.message), error.code, error.headers()) from error
        finally:
            state["send"] = self._send_part
        if self._status >= 400:
            raise self._refusal()
        if self._status and not self._is_streaming:
            answer = self._whole(b"".join(self._parts), self._headers.get("server-timing", ""))
            await self._start("application/json", {"content-length": str(len(answer))})
            await self._send({"type": "http.response.body", "body": answer, "more_body": False})

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = MutableHeaders(raw=[*message.get("headers", ())])
            is_stream = self._headers.get("content-type", "").startswith("text/event-stream")
            self._is_streaming = self._stream is not None and is_stream
            if self._is_streaming:
                await self._start(NDJSON, {})
        elif self._stream is None or not self._is_streaming:
            self._parts.append(message.get("body", b""))
        else:
            lines = b"".join(self._stream.lines(message.get("body", b"")))
            has_more = message.get("more_body", False)
            if lines or not has_more:
                await self._send_part({"type": "http.response.body", "body": lines, "more_body": has_more})

    async def _start(self, content_type: str, more: dict[str, str]) -> None:
        headers = self._headers
        del headers["content-length"]
        notes = [*self._adapted.headers().values(), *headers.getlist(adaptations.HEADER)]
        if notes:
            more = {**more, adaptations.HEADER: in_their_names("; ".join(notes))}
        headers.update({"content-type": content_type, **more})
        await self._send({"type": "http.response.start", "status": self._status, "headers": headers.raw})

    def _refusal(self) -> Refused:
        error = error_in(b"".join(self._parts))
        message = in_their_names(error.message) or f"The server answered with the status {self._status}."
        headers = {name: value for name, value in self._headers.items() if name.startswith(_OF_REFUSAL)}
        return Refused(self._status, message, error.code, headers)
