"""`EngineRelay` passes requests to foreign engines, and their answers back, byte for byte.

A request goes to another engine only as long as its client has no byte of an answer. A stream that breaks off is not
continued: another engine's bytes could differ.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from oaiserve.errors import APIError, BadGateway, Forbidden, LoopDetected, Unavailable
from oaiserve.explain.reuse.recent_prompts import RecentPrompts
from oaiserve.facts.trace import TraceContext
from oaiserve.http.connections import CONNECTION, part_writer
from oaiserve.http.keys import Key
from oaiserve.http.shared_limit import SharedLimit
from oaiserve.plugins.gateway.attempts import MOVES_ON
from oaiserve.plugins.gateway.client_request import (
    LARGE_BYTES,
    OF_CONNECTION,
    SESSION_HEADER,
    TRACEPARENT,
    checked_path,
    num_hops_of,
    passed_headers,
    without_trace,
)
from oaiserve.plugins.gateway.engines.body import Body, body_of
from oaiserve.plugins.gateway.engines.engine import EngineRequest, ForeignEngine, without_keys
from oaiserve.plugins.gateway.engines.fleet import Fleet
from oaiserve.plugins.gateway.engines.passed import NamedModel, Passed
from oaiserve.plugins.gateway.engines.read_again import PromptReader
from oaiserve.plugins.gateway.engines.reading import Reading, is_comment
from oaiserve.plugins.gateway.engines.times import PassedTimes
from oaiserve.plugins.gateway.gateway import MOST_HOPS
from oaiserve.plugins.gateway.relay import NO_BODY, last_events
from oaiserve.plugins.gateway.upstream import BadAnswer, CutOff, Unreachable, UpstreamAnswer
from oaiserve.routes.answer.respond import OPEN_ANSWER_TOKENS
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.intake.receive import HeldBytes
from oaiserve.routes.intake.receive import receive as receive_parts
from oaiserve.routes.intake.turns import client_left, unless_left
from oaiserve.wire.prefix_keys import BYTES_PER_TOKEN, prompt_of_body

log = logging.getLogger(__name__)

_NOT_ANSWERED = OF_CONNECTION | {b"date", b"x-content-type-options", b"x-request-id"}
_PAGE = b'; rel="describedby"; type="text/html"'  # The end of a `link` by which oaiserve names its page of a request
_KEY_REFUSED = (401, 403)
BROKEN_OFF = "The engine that wrote this answer has ended, so the answer is not complete. Please try again."
SHUTS_DOWN = "The server is shutting down. Please try again."


class BegunAnswer(NamedTuple):
    engine: ForeignEngine
    answer: UpstreamAnswer
    passed: Passed

    def give_up(self) -> None:
        """Leave the answer unread, as if the request had not been there."""
        self.answer.close()
        self.engine.presences.drop(self.passed)


@dataclass(frozen=True, slots=True)
class EngineRelay:
    """The ASGI app for all paths of engines. The routes that generate have an account."""

    fleet: Fleet
    received: SharedLimit  # bytes of bodies that are held
    body_limit: int
    has_keys: bool  # Clients need keys of the gateway, which no engine may see.
    is_sampled: Callable[[TraceContext], bool]
    has_tracing: bool
    clock_ns: Callable[[], int]
    recent_prompts: RecentPrompts  # prompts that later ones are compared with

    async def route(self, request: Request) -> ASGIApp:
        """Answer a request that has an account."""
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises an APIError before the status line, and ClientDisconnect."""
        exchange: Exchange | None = scope["state"].get("exchange")
        passed = Passed(scope["state"]["client"], scope["state"]["key_name"])
        if exchange is not None:
            exchange.stream = passed  # type: ignore[assignment]
            exchange.routing = {}
        if self.fleet.is_draining:
            raise Unavailable(SHUTS_DOWN, retry_after_seconds=5)
        key: Key | None = scope["state"]["key"]
        if exchange is None and scope["method"] == "POST" and key is not None and key.new_use() is not None:
            raise Forbidden("This API key has limits, and may use only the routes that count what they use.")
        if (num_hops := num_hops_of(scope)) >= MOST_HOPS:
            raise LoopDetected(f"The request has passed {num_hops} gateways. Does an --engine of this one lead back?")

        async def stamped_receive() -> dict[str, object]:
            message = await receive()
            if exchange is not None:
                passed.times.received = exchange.received_ns
            return message  # type: ignore[return-value]

        body = bytearray()
        with HeldBytes(self.received, scope["state"]["client"]) as held:
            await receive_parts(Request(scope, stamped_receive), self.body_limit, partial(held.keep, body))
            passed.times.submitted = self.clock_ns()
            left = asyncio.create_task(client_left(receive))
            try:
                request = await self._request(scope, body, num_hops, exchange, passed)
                in_background = exchange is not None and exchange.is_background
                async with self.fleet.in_background if in_background else nullcontext():
                    begun = await self._begin(request, passed, left)
                    request.body = body = bytearray()  # It is no longer needed. Some of it may still be on its way.
                    held.give_back(held.number)
                    await self._pass_on(scope, send, begun, exchange, left)
            finally:
                left.cancel()

    async def _request(
        self, scope: Scope, body: bytearray, num_hops: int, exchange: Exchange | None, passed: Passed
    ) -> EngineRequest:
        """Return the request for engines, and note in its account what it asks for."""
        wanted = Body() if exchange is None else body_of(body)
        model = wanted.model_name
        prompt = None
        if exchange is not None:
            passed.account.num_choices = wanted.num_choices
            passed.tokens = len(body) // BYTES_PER_TOKEN
            exchange.is_streaming = wanted.stream is True
            exchange.requested_model = model
            exchange.params = wanted.params
            if exchange.use is not None:
                exchange.use.key.check_model(model or next(iter(self.fleet.models), ""))
                most = OPEN_ANSWER_TOKENS if wanted.max_answer_tokens is None else wanted.max_answer_tokens
                await exchange.use.reserve(passed.tokens + wanted.num_choices * most)
            if models := self.fleet.models:  # Never a name that only a client has sent
                exchange.adapter = NamedModel(model if model in models else models[0])  # type: ignore[assignment]
            if len(self.fleet.engines) > 1:
                is_large = len(body) > LARGE_BYTES
                prompt = await asyncio.to_thread(prompt_of_body, body) if is_large else prompt_of_body(body)
        headers = passed_headers(scope, num_hops)
        if self.has_keys:
            headers = without_keys(headers)
        if self.has_tracing:
            trace: TraceContext = scope["state"]["trace"]
            parent = trace.traceparent(trace.span_id, is_sampled=self.is_sampled(trace))
            headers = [*without_trace(headers, trace), (TRACEPARENT, parent.encode())]
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        query = scope["query_string"]
        target = checked_path(scope).encode() + (b"?" + query if query else b"")
        session = Headers(scope=scope).get(SESSION_HEADER)
        return EngineRequest(method, target, headers, body, model, prompt, session, exchange is not None)

    async def _begin(self, request: EngineRequest, passed: Passed, left: asyncio.Task[None]) -> BegunAnswer:
        """Let one engine after the other begin an answer, until one does not refuse. Raises BadGateway, Unavailable and
        ClientDisconnect."""
        tried: set[str] = set()
        begun: BegunAnswer | None = None
        with ExitStack() as unused:  # gives up the last answer, unless it is returned
            while (engine := self.fleet.choose(request.prompt, request.model, request.session, tried)) is not None:
                tried.add(engine.name)
                passed.times.begin_attempt(self.clock_ns())
                try:
                    answered = await self._ask(engine, request, passed, left)
                except Unreachable as error:
                    self.fleet.lost(engine, str(error))
                    continue
                unused.close()
                begun = answered
                unused.callback(begun.give_up)
                if begun.answer.status not in MOVES_ON or len(tried) == len(self.fleet.engines):
                    break
                engine.presences.drop(passed)  # This engine has refused the request, so another one gets it.
            if begun is None:
                raise Unavailable("No engine can be reached. Please try again later.", retry_after_seconds=5)
            begun.engine.presences.enter(passed)
            unused.pop_all()
            return begun

    async def _ask(
        self, engine: ForeignEngine, request: EngineRequest, passed: Passed, left: asyncio.Task[None]
    ) -> BegunAnswer:
        """Let an engine begin an answer. Raises Unreachable, BadGateway and ClientDisconnect."""

        def sent() -> None:
            passed.times.sent = self.clock_ns()
            if passed.prompt is None and request.has_account:
                passed.prompt = PromptReader(request.body, request.model or "")

        engine.presences.enter(passed)
        answer: UpstreamAnswer | None = None
        try:
            answer = await unless_left(engine.ask(request, sent), left)
        except BadAnswer as error:
            log.warning("Engine %s has answered what is no HTTP: %s", engine.name, error)
            raise BadGateway("The engine's answer could not be read. Please try again.") from None
        finally:
            if answer is None:
                engine.presences.drop(passed)
        begun = BegunAnswer(engine, answer, passed)
        if engine.has_key and answer.status in _KEY_REFUSED:  # Its text may quote the key.
            begun.give_up()
            log.error("Engine %s refuses the key of --engine-key with a %d", engine.name, answer.status)
            raise BadGateway("The engine refuses the key of this gateway. Its operator can mend that.")
        return begun

    async def _pass_on(
        self, scope: Scope, send: Send, begun: BegunAnswer, exchange: Exchange | None, left: asyncio.Task[None]
    ) -> None:
        """Send an answer as it arrives, until its end. Raises ClientDisconnect."""
        engine, answer, passed = begun
        dropped = _NOT_ANSWERED | {b"content-length"} if answer.status in NO_BODY else _NOT_ANSWERED
        headers = [
            (name, value)
            for name, value in answer.headers
            if name not in dropped and not (name == b"link" and value.endswith(_PAGE))  # The page here replaces it.
        ]
        is_coded = answer.header(b"content-encoding") not in (b"", b"identity")
        reading = Reading(answer.header(b"content-type"), is_coded=is_coded)
        if exchange is None:
            reading.unread = "it has no account"
        elif answer.status == 200:
            exchange.is_streaming = reading.is_stream  # Ollama streams unless a request says otherwise.
        left.add_done_callback(lambda _: answer.close())
        try:
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            rest = b""
            error: APIError | None = None
            try:
                await self._send_parts(scope, answer, reading, passed.times)
            except CutOff as cut:
                if left.done():
                    raise ClientDisconnect from None
                if _has_length(answer):
                    log.warning("Engine %s has cut off an answer: %s", engine.name, cut)
                    error = BadGateway(BROKEN_OFF)
            except asyncio.CancelledError:  # The shutdown cuts off running requests.
                if not reading.is_stream:
                    raise
                error = Unavailable(SHUTS_DOWN)
            if error is not None:
                if exchange is not None:
                    exchange.error = error
                if not reading.is_stream or is_coded:
                    scope["extensions"][CONNECTION]["cut"]()  # It is too late for another status.
                    return
                rest = _ending(scope, reading, error.message)
            await scope["state"]["send"]({"type": "http.response.body", "body": rest, "more_body": False})
        finally:
            answer.close()
            now_ns = self.clock_ns()
            passed.times.responded = now_ns
            if passed.times.first_byte is not None:
                passed.times.last_token = passed.times.last_token or now_ns
            reading.end(now_ns)
            engine.presences.leave(passed, now_ns)
            if exchange is not None:
                engine.num_unread += bool(reading.unread)
                passed.note(exchange, engine, reading.told, reading.unread, self.recent_prompts)

    async def _send_parts(self, scope: Scope, answer: UpstreamAnswer, reading: Reading, times: PassedTimes) -> None:
        """Send each part, and read it after that. Raises CutOff."""
        send_part: Send = scope["state"]["send"]  # The layers around this would slow each part down.
        clock_ns = self.clock_ns
        write = part_writer(scope)
        push = reading.push

        def write_at_once(part: bytes) -> bool:
            now_ns = clock_ns()
            if write is None or not write(part):
                return False
            push(part, now_ns)
            return True

        while part := await answer.read(None if times.first_byte is None else write_at_once):
            now_ns = clock_ns()
            if times.first_byte is None and not is_comment(part):
                times.first_byte = now_ns
            await send_part({"type": "http.response.body", "body": part, "more_body": True})
            push(part, now_ns)
        times.last_token = clock_ns()
        times.first_byte = times.first_byte or times.last_token


def _has_length(answer: UpstreamAnswer) -> bool:
    """Return whether an answer says how long it is. Otherwise it ends with the connection, as in HTTP/1.0."""
    return bool(answer.header(b"content-length") or answer.header(b"transfer-encoding"))


def _ending(scope: Scope, reading: Reading, message: str) -> bytes:
    """Return the end of a stream that broke off, in the form of its API. An event that was cut off ends first."""
    if not reading.is_events:
        return b"\n" + msgspec.json.encode({"error": message}) + b"\n"
    return (b"" if reading.is_between else b"\n\n") + last_events(scope, message)
