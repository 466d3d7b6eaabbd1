"""`Relay` passes answers on as they arrive, and lets another replica continue a stream that its replica does not
end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Scope, Send

from oaiserve.errors import ANTHROPIC_PATH, REASON_HEADER, BadGateway, Unavailable
from oaiserve.http.connections import CONNECTION, part_writer
from oaiserve.plugins.gateway.attempts import ROUTE_HEADER, Attempts, BegunAnswer
from oaiserve.plugins.gateway.client_request import OF_CONNECTION, ClientRequest
from oaiserve.plugins.gateway.metrics import Ending
from oaiserve.plugins.gateway.options import ContinueStreams
from oaiserve.plugins.gateway.upstream import CutOff, Upstream
from oaiserve.routes.answer import sse
from oaiserve.routes.intake.turns import unless_left
from oaiserve.wire.continuation import KIND_HEADER, StreamSplitter
from oaiserve.wire.router import NoReplica
from oaiserve.wire.routing_decision import as_text

log = logging.getLogger(__name__)

NO_BODY = (204, 304)  # statuses of answers without a body, whatever their length says
GO_ON_SECONDS = 60.0  # time to find a replica for a stream that was cut off
PAUSE_SECONDS = 0.2
UNLIKE = b": the answer goes on at a server of another kind\n\n"
SIGN_OF_LIFE = b": the answer is about to go on\n\n"
SIGN_OF_LIFE_SECONDS = 2.0
MOST_EVENT_BYTES = 16 * 2**20  # size of one event of a stream: the last one of /v1/responses has the whole answer
_NOT_ANSWERED = OF_CONNECTION | {*(b"date", b"x-request-id", b"x-content-type-options", KIND_HEADER.encode())}


@dataclass(frozen=True, slots=True)
class Relay:
    attempts: Attempts
    continues: ContinueStreams
    is_draining: Callable[[], bool]
    shows_requests: bool  # Answers keep their links to the pages of requests.

    def _warn_of_unmarked(self, upstream: Upstream) -> None:
        """Warn once about a replica whose streams have no marks."""
        if self.continues != "never" and not upstream.has_warned_of_marks:
            upstream.has_warned_of_marks = True
            text = "If replica %s fails, its streams end. To continue them, give it --trusted-proxy with our address"
            log.warning(text, upstream.shown)

    async def pass_on(
        self, scope: Scope, send: Send, request: ClientRequest, begun: BegunAnswer, left: asyncio.Task[None]
    ) -> Ending:
        """Send an answer as it arrives, until its end. Raises ClientDisconnect."""
        answer = begun.answer
        kind = begun.kind
        request.status = answer.status
        dropped = _NOT_ANSWERED | {b"content-length"} if answer.status in NO_BODY else _NOT_ANSWERED
        if not self.shows_requests:
            dropped = dropped | {b"link"}  # to the page of its request
        headers = [header for header in answer.headers if header[0] not in dropped]
        headers.append((ROUTE_HEADER, as_text(begun.decision, names_replica=False).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        send_part: Send = scope["state"]["send"]  # The layers around this would slow each part down.
        is_stream = begun.is_stream
        may_go_on = begun.may_go_on
        # Streams of GET, such as the live page's, are never continued.
        if is_stream and not may_go_on and request.method == "POST":
            self._warn_of_unmarked(begun.upstream)
        signs: asyncio.Task[None] | None = None  # sends signs of life in the pause of a stream that was cut off
        num_sent = -1  # pieces sent at the last cut; `num_cuts` counts the cuts since a further piece was sent
        num_cuts = 0
        give_up_ns = 0
        # These replicas have cut off the stream. If none can continue it, the stream is to blame, not the replicas.
        cutters: list[tuple[Upstream, str]] = []
        while True:
            ending = Ending.ANSWERED
            try:
                rest = await self._send_parts(begun, request, send_part, part_writer(scope), left, signs)
                self._blame(cutters)
            except CutOff as error:
                if left.done():
                    raise ClientDisconnect from None
                begun.attempt.end(self.attempts.clock_ns(), "cut off")
                num_cuts += 1
                if request.sent.number > num_sent:
                    self._blame(cutters)
                    self.attempts.watch.exclude(begun.upstream.name, f"it has cut off an answer: {error}")
                    num_sent = request.sent.number
                    num_cuts = 0
                    give_up_ns = self.attempts.clock_ns() + int(GO_ON_SECONDS * 1e9)
                cutters.append((begun.upstream, f"an answer cut off: {error}"))
                may_go_on = may_go_on and not request.sent.is_forgotten
                if not may_go_on:
                    self._blame(cutters)
                if may_go_on and (signs is None or signs.done()):
                    signs = asyncio.create_task(_show_signs_of_life(send_part, left))
                if may_go_on and (again := await self._go_on(request, begun, kind, left, num_cuts, give_up_ns)):
                    begun = again
                    if not kind or begun.kind != kind:
                        await send_part({"type": "http.response.body", "body": UNLIKE, "more_body": True})
                    continue
                if not is_stream:
                    scope["extensions"][CONNECTION]["cut"]()  # It is too late for another status.
                    return Ending.CUT_OFF
                ending = Ending.CUT_OFF
                why = "The replica that wrote this answer has ended. Please try again."
                rest = last_events(scope, why)
            except asyncio.CancelledError:  # The shutdown cuts off running requests.
                if not is_stream:
                    raise
                ending = Ending.CUT_OFF
                rest = last_events(scope, "The server is shutting down. Please try again.")
            if signs is not None:
                signs.cancel()
            await send_part({"type": "http.response.body", "body": rest, "more_body": False})
            return ending

    def _blame(self, cutters: list[tuple[Upstream, str]]) -> None:
        for upstream, why in cutters:
            self.attempts.watch.failed(upstream, why)
        cutters.clear()

    async def _send_parts(
        self,
        begun: BegunAnswer,
        request: ClientRequest,
        send_part: Send,
        write: Callable[[bytes], bool] | None,
        left: asyncio.Task[None],
        signs: asyncio.Task[None] | None,
    ) -> bytes:
        """Send the parts of a replica's answer, and return its end. Signs of life stop with the first part. Raises
        CutOff after whole pieces."""
        answer = begun.answer
        events = StreamSplitter(is_marked=begun.may_go_on)
        left.add_done_callback(lambda _: answer.close())
        begun.upstream.num_open += 1

        def whole_events(part: bytes) -> bytes:
            if begun.is_stream:
                try:
                    part, pieces = events.push(part)
                except msgspec.MsgspecError as error:
                    raise CutOff(f"a mark that is none: {error}") from None
                request.sent.add(pieces)
            if part and signs is not None:
                signs.cancel()
            return part

        def check_rest() -> None:
            if len(events.rest) > MOST_EVENT_BYTES:
                raise CutOff(f"an event of more than {MOST_EVENT_BYTES} bytes")

        def write_at_once(part: bytes) -> bool:
            if write is None or not write(b""):
                return False
            write(whole_events(part))
            check_rest()
            return True

        try:
            while part := await answer.read(write_at_once):
                if part := whole_events(part):
                    await send_part({"type": "http.response.body", "body": part, "more_body": True})
                check_rest()
            if request.method == "POST" and answer.status < 400:
                begun.upstream.num_failures = begun.upstream.num_pauses = 0
            return bytes(events.rest)
        finally:
            begun.attempt.end(self.attempts.clock_ns())
            begun.upstream.num_open -= 1
            answer.close()

    async def _go_on(
        self,
        request: ClientRequest,
        cut: BegunAnswer,
        kind: bytes,
        left: asyncio.Task[None],
        num_cuts: int,
        give_up_ns: int,
    ) -> BegunAnswer | None:
        """Have another replica go on with a stream. Return None if none does in time. Raises ClientDisconnect."""
        with suppress(asyncio.CancelledError):  # The server shuts down: the stream ends with an error.
            unlike: set[str] = set()  # replicas that turned out to be of another kind, where that must not be
            if num_cuts:  # replicas cut it off one after the other
                await unless_left(asyncio.sleep(PAUSE_SECONDS * 2 ** min(num_cuts, 5)), left)
            num_failures = 0  # Replicas have read the whole stream again, and failed.
            while self.attempts.clock_ns() < give_up_ns and not self.is_draining():
                with suppress(NoReplica, BadGateway):
                    begun = await self.attempts.begin(request, left, cut.decision.replica, kind=kind)
                    is_alike = bool(kind) and begun.kind == kind
                    if begun.answer.status == 200 and begun.may_go_on and (is_alike or self.continues == "any"):
                        self.attempts.metrics.continued.labels("alike" if is_alike else "unlike").inc()
                        return begun
                    begun.answer.close()
                    if begun.answer.status == 200 and begun.kind and begun.upstream.name not in unlike:
                        unlike.add(begun.upstream.name)
                        continue
                    is_of_store = begun.answer.header(REASON_HEADER.encode()) == b"store"
                    if is_of_store or (begun.answer.status < 500 and begun.answer.status != 429):
                        break
                    num_failures += begun.answer.status == 500
                await unless_left(asyncio.sleep(PAUSE_SECONDS * 2 ** min(num_failures, 5)), left)
        self.attempts.metrics.continued.labels("failed").inc()
        return None


async def _show_signs_of_life(send_part: Send, left: asyncio.Task[None]) -> None:
    """Write a comment now and then, until the task is cancelled or the request ends: clients give up silent streams."""
    while not (await asyncio.wait({left}, timeout=SIGN_OF_LIFE_SECONDS))[0]:
        await send_part({"type": "http.response.body", "body": SIGN_OF_LIFE, "more_body": True})


def last_events(scope: Scope, message: str) -> bytes:
    state = scope["state"]
    path = scope["path"]
    ids = {"request_id": state["request_id"], "trace_id": state["trace"].trace_id_hex}
    body = Unavailable(message).body(path, **ids)
    if path.startswith(ANTHROPIC_PATH):
        return sse.event(msgspec.json.encode(body), "error")
    if path.rstrip("/").endswith("/responses"):
        return sse.event(msgspec.json.encode({**body["error"], **body, "type": "error"}), "error") + sse.DONE
    return sse.event(msgspec.json.encode(body)) + sse.DONE
