"""`Front` finds the model that a request names, waits until it is loaded, and lets its routes answer the request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from oaiserve.config import Config
from oaiserve.errors import APIError, Unavailable
from oaiserve.http.fair_turns import TurnWorkers, Work
from oaiserve.http.keys import Key
from oaiserve.http.shared_limit import SharedLimit
from oaiserve.plugins.gateway.client_request import ADAPTER_PATHS, FORM_PATHS, INSIDE, LARGE_BYTES
from oaiserve.plugins.gateway.several.loaded import LoadedModel, answer_by
from oaiserve.plugins.gateway.several.models import Models
from oaiserve.plugins.gateway.sources import UNREADABLE
from oaiserve.plugins.shared.forms import model_in_form
from oaiserve.routes.intake.bodies import Bodies
from oaiserve.routes.intake.receive import HeldBytes, read_into
from oaiserve.routes.intake.turns import client_left, unless_left
from oaiserve.routes.serving import MEDIA_BODY_BYTES, MOST_RECEIVED_BYTES
from oaiserve.runtime import Runtime
from oaiserve.wire.report import ROUTER_HEADER

# Paths whose query names the model, and those whose routes don't know this part of the query.
_WITHOUT_MODEL = (*INSIDE, *ADAPTER_PATHS)
_BY_QUERY = (*_WITHOUT_MODEL, "/tokenizer_info")
# Paths of objects that belong to no model. While an object is being made, only the process that makes it knows it.
_OF_ANY = ("/v1/responses/resp_", "/v1/conversations", "/debug/requests/")
_OF_BODY = (b"content-length", b"content-encoding")


class _Named(msgspec.Struct):
    model: str = ""
    lora_name: str = ""


_decode = msgspec.json.Decoder(_Named).decode


class Front:
    """The ASGI app. The layers around it have put `client`, `key` and more into `scope["state"]`."""

    def __init__(self, models: Models, config: Config, unloaded: Starlette, runtime: Runtime) -> None:
        """`unloaded` has the routes of a model that is not loaded."""
        self.models = models
        self._unloaded = unloaded
        self._runtime = runtime
        self.bodies = Bodies(
            config.server.body_limit or MEDIA_BODY_BYTES, SharedLimit(MOST_RECEIVED_BYTES), self._run_in_turns
        )
        self._workers: TurnWorkers | None = None
        self.is_draining = False

    def drain(self) -> None:
        """Accept no further requests. A signal handler may call this."""
        self.is_draining = self.models.is_draining = True
        for loaded in self.models.loaded_by_name.values():
            loaded.engine.drain()

    def has_others(self, client: str) -> bool:
        """Return whether clients other than this one have open requests."""
        return any(loaded.serving.has_others(client) for loaded in self.models.loaded_by_name.values())

    async def stop(self) -> None:
        """End the threads that read large bodies."""
        if self._workers is not None:
            await asyncio.to_thread(self._workers.stop)

    def _run_in_turns(self, work: Work[Any], *, client: str, num_bytes: int) -> Future[Any]:
        """Read a large body for a part of this process that has no engine. Most servers never need the threads."""
        if self._workers is None:
            self._workers = TurnWorkers(1, "intake", runtime=self._runtime)
        return self._workers.run(work, client=client, num_bytes=num_bytes)

    async def ask(self, request: Request, target: str) -> Mapping[int, bytes] | Response:
        """Send a GET request on behalf of another request to the routes of all loaded models, and return the bodies of
        the successful answers by the models' numbers. If all refuse, return a refusal."""
        header = (ROUTER_HEADER.encode(), b"1")
        loaded = self.models.loaded_by_name
        answers = {
            number: await loaded[name].get(request.scope, target, [header])
            for number, name in enumerate(self.models.by_name, start=1)
            if name in loaded
        }
        bodies = {number: body for number, (status, body) in answers.items() if status == 200}
        if answers and not bodies:
            status, body = next(iter(answers.values()))
            return Response(body, status, media_type="application/json")
        return bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises APIError before the status line, and ClientDisconnect."""
        if self.is_draining:
            raise Unavailable("The server is shutting down. Please try again.", retry_after_seconds=5)
        received_ns = 0

        async def stamped_receive() -> Message:
            nonlocal received_ns
            message = await receive()
            received_ns = received_ns or self._runtime.clock_ns()
            return message

        with HeldBytes(self.bodies.received, scope["state"]["client"]) as held:
            body = bytearray()
            if scope["method"] in ("POST", "PUT", "PATCH"):
                await read_into(body, Request(scope, stamped_receive), held, self.bodies.limit_bytes)
                headers = [header for header in scope["headers"] if header[0] not in _OF_BODY]
                scope = {**scope, "headers": headers}
            requested = await self._requested(scope, body)
            if not (self.models.is_loaded(requested) or self._has_route(scope)):
                await answer_by(self._unloaded, scope, receive, send)
                return
            if scope["path"].startswith(_WITHOUT_MODEL):
                fields = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
                query = urlencode([(name, value) for name, value in fields if name != "model"])
                scope = {**scope, "query_string": query.encode()}
            left = asyncio.create_task(client_left(receive))
            try:
                async with AsyncExitStack() as stack:
                    load = self._loaded(scope, requested, received_ns or self._runtime.clock_ns(), stack)
                    loaded = await unless_left(load, left)
                    await self._answer(loaded, scope, body, held, left, send)
            finally:
                left.cancel()

    def _has_route(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in self._unloaded.routes)

    async def _requested(self, scope: Scope, body: bytearray) -> str:
        """Return the name that a request has for its model, or "". Raises InvalidRequest and ModelNotFound."""
        path = scope["path"]
        query = ""
        if path.startswith(_BY_QUERY):
            fields: dict[str, str] = dict(parse_qsl(scope["query_string"].decode("latin-1")))
            query = fields.get("model", "")
            if path not in ADAPTER_PATHS:
                return query
        named = _Named()
        if path.startswith(FORM_PATHS):
            return await asyncio.to_thread(model_in_form, Headers(scope=scope).get("content-type", ""), body)
        with suppress(*UNREADABLE):  # The route refuses it.
            named = await asyncio.to_thread(_decode, body) if len(body) > LARGE_BYTES else _decode(body)
        if path not in ADAPTER_PATHS:
            return named.model
        return self.models.name_for_adapter(query, named.lora_name, is_new=path == ADAPTER_PATHS[0])

    async def _loaded(self, scope: Scope, requested: str, received_ns: int, stack: AsyncExitStack) -> list[LoadedModel]:
        """Wait until the model of a request is loaded, and keep it loaded as long as `stack` is open. Return it, or all
        that may have the object of the request. Raises Forbidden, ModelNotFound and Unavailable."""
        path = scope["path"]
        if path.startswith(INSIDE):
            if not (requested or self.models.loaded_by_name):  # Reports and pages need no model.
                raise Unavailable("No model is loaded; try again later.", retry_after_seconds=5)
            first = await self.models.loaded(requested)
        else:
            accepted = self.models.names_for(requested)
            key: Key | None = scope["state"]["key"]
            if key is not None and not path.startswith(_OF_ANY):
                key.check_model(*accepted)
            first, waited_ns = await stack.enter_async_context(self.models.in_use(accepted[0]))
            scope["state"]["model_load"] = (received_ns, waited_ns)
        if requested or not path.startswith(_OF_ANY):
            return [first]
        return [first, *(other for other in self.models.loaded_by_name.values() if other is not first)]

    async def _answer(
        self,
        models: list[LoadedModel],
        scope: Scope,
        body: bytearray,
        held: HeldBytes,
        left: asyncio.Task[None],
        send: Send,
    ) -> None:
        """Let the routes of these models answer a request, one after the other until one has its object."""
        content = bytes(body)
        body.clear()
        *others, last = models
        for model in others:
            if await _has_answered(model, scope, _replayed(content, left), send):
                return
        held.give_back(held.number)  # The route counts the bytes, too.
        receive = _replayed(content, left)
        del content
        await last.answer(scope, receive, send)


def _replayed(content: bytes, left: asyncio.Task[None]) -> Receive:
    """Return an ASGI `receive` for a body that was read already. Then it waits for the client to leave."""
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.wait({left})
        return {"type": "http.disconnect"}

    return receive


async def _has_answered(model: LoadedModel, scope: Scope, receive: Receive, send: Send) -> bool:
    """Let the routes of a model answer a request, unless the answer is a 404."""
    is_missing = False

    async def send_unless_missing(message: Message) -> None:
        nonlocal is_missing
        is_missing = is_missing or message.get("status") == 404
        if not is_missing:
            await send(message)

    try:
        await model.answer(scope, receive, send_unless_missing)
    except APIError as error:
        if error.status != 404:
            raise
        return False
    return not is_missing
