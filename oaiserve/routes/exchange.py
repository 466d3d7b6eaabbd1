"""Keeps the account of one request to a generation route, from before its first byte is read until its one record.

This file knows neither the shapes of the API nor the record's readers. Routes read a request's stamps here.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oaiserve.engine.adapters import ServedAdapter
from oaiserve.engine.request import TokenChunk, Usage
from oaiserve.engine.streams import LoopStream
from oaiserve.errors import APIError, DeadlineMissed, DeadlineRefused, SlowReader, Unavailable
from oaiserve.facts.continuation import StreamIds
from oaiserve.facts.record import DeadlineOutcome, EngineAccount, Outcome, RequestRecord, ToolCallOutcome
from oaiserve.facts.times import WAITED_HEADER, RequestTimes, monotonic_ns, waited
from oaiserve.facts.trace import TraceContext
from oaiserve.http.key_table import Use
from oaiserve.http.keys import Key
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.middleware import as_api_error, error_response
from oaiserve.routes.serving import serving_of

COST_HEADER = "x-include-cost"  # true: the usage says what the request costs


class RequestTimings(msgspec.Struct):
    """The phases of a streamed answer, in nanoseconds, without `respond`, which has not ended."""

    phases_ns: dict[str, int]
    time_to_first_token_ns: int | None
    queue_waits_ns: dict[str, int]
    causes_ns: dict[str, dict[str, int]]
    stalled_ns: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    trace_id: str


@dataclass(slots=True)
class Exchange:
    """The facts about one request so far. The route fills them in, and `Accounting` turns them into the record."""

    request_id: str  # as in the header x-request-id; the client may have chosen it
    unique_id: str  # our own
    trace: TraceContext
    client: str  # with whom others share the server: the name of its API key, or else its address
    key_name: str | None = None
    owner: str = ""  # a digest of the key; "" without keys
    use: Use | None = None  # of its key, if that is a stored one
    operation: str = ""
    http_route: str = ""
    ids: StreamIds | None = None  # that a gateway gives it
    received_ns: int | None = None
    deadline_ns: int | None = None  # since it was received, of its end
    ttft_deadline_ns: int | None = None  # the same of its first token
    model_load_ns: int = 0  # which it waited for, before this process had it
    http_status: int | None = None
    error: APIError | None = None  # as reported to the client, where it could be
    client_left: bool = False  # before it had the whole answer
    adapter: ServedAdapter | None = None  # that the request names as its model
    stream: LoopStream | None = None  # the engine's events, once the request was accepted
    is_streaming: bool = False
    is_background: bool = False  # it can wait
    wants_cost: bool = False  # in the usage
    max_tokens_cut_to: int | None = None  # the least of all prompts; None: what was asked for fits
    finish_reasons: dict[int, str] = field(default_factory=dict)  # by index of the choice
    tool_calls: dict[ToolCallOutcome, int] = field(default_factory=dict)  # by outcome, as in the record
    params: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    sampling: Mapping[str, int | float] = field(default_factory=dict)
    adaptations: Adaptations = field(default_factory=Adaptations)
    response_id: str | None = None  # as in the answer's `id`
    engine_id: str | None = None  # by which the engine knows it
    conversation_id: str | None = None  # the same of the first answer of its conversation, if there may be several
    routing: Mapping[str, str | int | float] = field(default_factory=dict)  # the decision of the router in front
    event_tokens: array[int] = field(default_factory=lambda: array("q"))  # as in the record, like the next
    event_gaps_ns: array[int] = field(default_factory=lambda: array("q"))
    last_sign_ns: int = 0  # when the client of a stream last got an event that its idle timeout counts
    num_signs: int = 0  # numbered signs of life that another server has sent of this stream
    _last_event_ns: dict[int, int] = field(default_factory=dict)  # by choice
    _num_unseen: dict[int, int] = field(default_factory=dict)  # the tokens of a choice since its last event

    @property
    def times(self) -> RequestTimes:
        """Return the stamps so far, as the engine's events carry them."""
        if self.stream is None or self.stream.times is None:
            return RequestTimes(received=self.received_ns)
        return self.stream.times

    @property
    def account(self) -> EngineAccount:
        """Return the engine's account, which comes with the terminal event."""
        terminal = None if self.stream is None else self.stream.terminal
        return EngineAccount() if terminal is None else terminal.account

    def streamed(self, chunk: TokenChunk, *, is_seen: bool) -> None:
        """Note tokens of a stream as they are written. Where nothing shows of them yet, the next event has them."""
        choice = chunk.index
        num_tokens = self._num_unseen.pop(choice, 0) + len(chunk.token_ids)
        if not is_seen:
            self._num_unseen[choice] = num_tokens
            return
        now_ns = monotonic_ns()
        last_ns = self._last_event_ns.get(choice)
        if last_ns is not None:
            self.event_gaps_ns.append(now_ns - last_ns)
        self._last_event_ns[choice] = now_ns
        self.last_sign_ns = now_ns
        self.event_tokens.append(num_tokens)

    def server_timing(self) -> str:
        """Return the value of the header `server-timing`: the phases that are over, in milliseconds."""
        return ", ".join(f"{phase};dur={phase_ns / 1e6:.3f}" for phase, phase_ns in self._phases_ns().items())

    def timings(self, usage: Usage) -> RequestTimings:
        """Return the timings for the end of a stream: the same integers as in the record. The engine's account is
        complete by then."""
        # The causes are known of phases that ended with the last step.
        known = {"prefill": self.account.prefill_causes_ns, "decode": self.account.decode_causes_ns}
        causes_ns = {
            phase: {str(cause): ns for cause, ns in causes.items()} for phase, causes in known.items() if causes
        }
        return RequestTimings(
            self._phases_ns(),
            self.times.time_to_first_token_ns,
            {str(reason): wait_ns for reason, wait_ns in self.account.waits_ns.items()},
            causes_ns,
            self.account.stalled_ns,
            usage.cached_tokens,
            self.account.num_draft_tokens,
            self.account.num_accepted_tokens,
            self.trace.trace_id_hex,
        )

    def _phases_ns(self) -> dict[str, int]:
        """Return the past phases, computed from the same stamps as those of the record."""
        return {phase.name: phase.duration_ns for phase in self.times.ended().phases()[:-1]}

    @property
    def outcome(self) -> Outcome:
        if self.client_left or isinstance(self.error, SlowReader):
            return Outcome.CANCELLED
        if self.error is None:
            return Outcome.FINISHED
        is_refused = self.http_status != 200 and (self.error.status < 500 or isinstance(self.error, Unavailable))
        is_refused |= isinstance(self.error, DeadlineMissed)  # which is no fault of the server in a stream, either
        return Outcome.REJECTED if is_refused else Outcome.FAILED

    def deadline_outcome(self, times: RequestTimes) -> DeadlineOutcome | None:
        """Return whether an ended request kept its deadlines, or None if that is not known, or it had none."""
        limits_ns = (self.deadline_ns, times.duration_ns), (self.ttft_deadline_ns, times.time_to_first_token_ns)
        if limits_ns[0][0] is limits_ns[1][0] is None or self.outcome is Outcome.CANCELLED:
            return None
        if isinstance(self.error, DeadlineRefused):
            return DeadlineOutcome.REFUSED
        in_time = all(limit is None or (took is not None and took <= limit) for limit, took in limits_ns)
        return DeadlineOutcome.MET if self.outcome is Outcome.FINISHED and in_time else DeadlineOutcome.MISSED


def _link_to_page(scope: Scope, request_id: str) -> bytes:
    """Return the value of the header `link`. Its address is relative to that of the request, before which a proxy may
    have put a path."""
    up = "../" * (scope["raw_path"].count(b"/") - 1)
    return f'<{up}requests/{request_id}>; rel="describedby"; type="text/html"'.encode()


_SHARED = [each.name for each in fields(RequestRecord) if hasattr(Exchange, each.name)]  # by the same names in both


class Accounting:
    """ASGI middleware around a generation route, which makes exactly one record per request, however the request ends.

    It renders the errors of its route itself, so that an error, too, is sent before `responded` is stamped.
    """

    def __init__(self, app: ASGIApp, *, operation: str, http_route: str) -> None:
        self.app = app
        self._operation = operation
        self._http_route = http_route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        ids, client = (state["request_id"], state["unique_id"], state["trace"]), (state["client"], state["key_name"])
        key: Key | None = state["key"]
        serving = serving_of(Request(scope))
        use, store = None if key is None or key.number is None else Use(key), serving.key_store
        exchange = Exchange(*ids, *client, state["owner"], use, self._operation, self._http_route)
        exchange.routing = state.get("routing", exchange.routing)
        exchange.is_background = state.get("is_background", False)
        state["exchange"] = serving.exchanges[exchange.unique_id] = exchange
        if (given := waited(Headers(scope=scope).get(WAITED_HEADER, ""), monotonic_ns())) is not None:
            exchange.received_ns, exchange.model_load_ns = given

        async def stamped_receive() -> Message:
            message = await receive()
            if exchange.received_ns is None:
                exchange.received_ns = monotonic_ns()
            return message

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.http_status = message["status"]
                if serving.config.server.shows_dashboard:
                    message["headers"] = [*message["headers"], (b"link", _link_to_page(scope, exchange.request_id))]
                if use is not None and store is not None:
                    if not use.headers:
                        with suppress(Unavailable):
                            await store.look(use)
                    limits = [(name.encode(), value.encode()) for name, value in use.headers.items()]
                    message["headers"] = [*message["headers"], *limits]
            await send(message)

        try:
            await self.app(scope, stamped_receive, watched_send)
        except ClientDisconnect:
            exchange.client_left = True
        except (Exception, asyncio.CancelledError) as error:
            exchange.error = as_api_error(error, scope)
            if exchange.http_status is not None:
                raise
            await error_response(exchange.error, scope)(scope, receive, watched_send)
        finally:
            if exchange.error is not None:
                exchange.error.__traceback__ = None  # its frames hold the exchange and the body: a circle
            if exchange.stream is None:
                self._record(scope, exchange, Usage(0, 0, 0))
            else:
                # The terminal event carries the stamps, so a request that is being aborted ends with that event.
                exchange.stream.on_end(lambda terminal: self._record(scope, exchange, terminal.usage))

    def _record(self, scope: Scope, exchange: Exchange, usage: Usage) -> None:
        times = exchange.times.ended()
        if times.received is None:  # it was answered or cancelled before its body began
            times.received = times.responded
        serving = serving_of(Request(scope))
        serving.exchanges.pop(exchange.unique_id, None)
        address, port = scope.get("server") or (None, None)
        if exchange.use is not None and serving.key_store is not None:
            core_ns, price = exchange.account.core_ns, exchange.account.price
            cost = (core_ns or 0) / 1e9 if price is None else price
            serving.key_store.settle(exchange.use, usage.prompt_tokens + usage.completion_tokens, cost)
        shared = {name: getattr(exchange, name) for name in _SHARED}
        own = {
            "times": times,
            "http_method": scope["method"],
            "model": serving.name_of(exchange.adapter),
            "adapter": None if exchange.adapter is None else exchange.adapter.name,
            "client": exchange.key_name,
            "http_scheme": scope["scheme"],
            "server_address": address,
            "server_port": port,
            "error_type": type(exchange.error).__name__ if exchange.error is not None else None,
            "error_param": exchange.error.param if exchange.error is not None else None,
            "stream": exchange.is_streaming,
            "background": exchange.is_background,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reasons": tuple(exchange.finish_reasons[index] for index in sorted(exchange.finish_reasons)),
            "deadline": exchange.deadline_outcome(times),
            "adapted": exchange.adaptations.notes,
        }
        serving.telemetry.record(RequestRecord(**{**shared, **own}))
        # A connection that is kept open keeps the scope of its last request, which must not keep the prompts.
        scope.get("state", {}).pop("exchange", None)
