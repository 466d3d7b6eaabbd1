"""`Edge` is between Ray's HTTP server in a replica and the server's own app, which it leaves unchanged."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = b"x-request-id"


class Edge:
    """Calls the app as its own HTTP server would.

    - When a client leaves, Ray cancels the request, and the app would record a shutdown. So the app runs in a task of
      its own, which goes on until it has seen the client leave.
    - Ray puts the request's id into the headers of the answer, so the app's own is taken out if it is the same.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._left: set[asyncio.Task[None]] = set()  # requests that go on although Ray has cancelled them

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        has_left = asyncio.get_running_loop().create_future()
        given_id = next((value for name, value in scope["headers"] if name == REQUEST_ID), None)

        async def receive_until_left() -> Message:
            if not has_left.done():
                message = asyncio.ensure_future(receive())
                try:
                    await asyncio.wait({message, has_left}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not message.done():
                        message.cancel()
                if not has_left.done():
                    return message.result()
            return {"type": "http.disconnect"}

        async def send_with_one_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    header for header in message["headers"] if header[0] != REQUEST_ID or header[1] != given_id
                ]
            await send(message)

        answer = asyncio.ensure_future(self._app(scope, receive_until_left, send_with_one_id))
        try:
            await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not answer.done():
                self._left.add(answer)
                answer.add_done_callback(self._ended)
                has_left.set_result(None)
                await asyncio.wait({answer})
            raise

    def _ended(self, answer: asyncio.Task[None]) -> None:
        self._left.discard(answer)
        if not answer.cancelled():
            answer.exception()  # it has been recorded, and there is no client who could be told
