"""`RemoteEngine` is the engine for the routes of a front end: prompts are tokenized here, and computed elsewhere.

It has the same face as `Engine`. The events of a step come in one message, on the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event as Flag
from typing import TypeVar

from oaiserve.engine.adapters import AdapterTable, ServedAdapter
from oaiserve.engine.media import MediaKind
from oaiserve.engine.request import TERMINAL, Deliver, Event, Failed, Prompt, Request, Usage
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.engine.tokenize import REST, GrammarCompiled, Tokenized, TokenizeFailed, TokenizeStage, TokenizeStarted
from oaiserve.engine.turn_workers import Work
from oaiserve.errors import InternalError, InvalidRequest, Unavailable
from oaiserve.facts.record import EngineAccount
from oaiserve.facts.report import ReplicaReport
from oaiserve.facts.times import RequestTimes, monotonic_ns
from oaiserve.scale.front_ends import messages
from oaiserve.scale.front_ends.calls import EngineProcess
from oaiserve.scale.front_ends.front_end import FrontEnd

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class EngineGone(Exception):
    """The engine of the other process has failed, or that process is gone, by the message."""


@dataclass(slots=True)
class _Open:
    """An open request."""

    request: Request
    deliver: Deliver
    submitted_ns: int
    is_encoding: bool = True


class RemoteEngine:
    """The engine of the other process. Any thread may call its methods, `start` apart.

    `on_shutdown` is called when the shutdown is to begin, and once more when it is not to wait for running requests;
    `on_lost` when the other process is gone, after all streams have got an error.
    """

    def __init__(
        self,
        process: EngineProcess,
        tokenizer: Tokenizer,
        model: messages.Model,
        *,
        num_workers: int,
        on_shutdown: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._process = process
        self._on_shutdown, self._on_lost = on_shutdown, on_lost
        self.tokenizer = tokenizer
        self.max_model_len, self.vocab_size = model.max_model_len, model.vocab_size
        self.default_params, self.capacity = model.default_params, model.capacity
        self.step_cost: None = None  # the other process learns it
        self.pooling = model.pooling
        self.is_on_cpu = model.is_on_cpu
        self.media: frozenset[MediaKind] = frozenset()  # front ends pass on prompts as tokens alone
        self.adapters = AdapterTable()
        self.failure: Exception | None = None
        self.is_ready = self.is_reporting = False
        self.hang = ""
        self._open: dict[str, _Open] = {}
        self._is_stopping = False
        self._all_ended = Flag()
        self._tokenize = TokenizeStage(
            tokenizer,
            None,
            self._post,
            num_workers=num_workers,
            encode_rest=REST if model.is_on_cpu and model.pooling is None else 0.0,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        )

    def start(self) -> None:
        """Take messages on the running event loop, and become ready for requests."""
        self._process.link.start(self._take, self._lost)
        self.is_ready = True
        self._process.tell(FrontEnd.up)

    def drain(self) -> None:
        """Welcome no more requests. The other process refuses them."""
        self.is_ready = False

    def stop(self, drain_timeout_seconds: float) -> None:
        """End all threads and all requests, and wait for the requests' ends."""
        self.drain()
        self._tokenize.stop()
        self._is_stopping = True
        for request_id in list(self._open):
            self.abort(request_id)
        while self._open and not self._process.link.is_lost:
            self._all_ended.wait(1.0)

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Accept a request. `deliver` gets its events on the event loop.

        A request refused by the other process ends with the event `Failed`, before any other. Raises Unavailable if
        that process is gone, and InvalidRequest for text that cannot be sent.
        """
        if self._process.link.is_lost:
            raise Unavailable("The server is shutting down. Please try again.", retry_after_seconds=5)
        opened = _Open(request, deliver, monotonic_ns())
        self._open[request.request_id] = opened
        try:
            self._process.tell(FrontEnd.submit, messages.Submit.of(request, opened.submitted_ns))
        except UnicodeEncodeError as error:
            del self._open[request.request_id]
            raise InvalidRequest(
                f"A text of this request has half of a surrogate pair (U+{ord(error.object[error.start]):04X}), which "
                "is no character. Send valid Unicode text."
            ) from None
        self._tokenize.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request early, in any phase. This does nothing if it has ended."""
        self._process.tell(FrontEnd.abort, request_id)
        self._tokenize.abort(request_id)

    def encode(self, prompt: Prompt, most_tokens: int) -> Work[list[int]]:
        """Return the token ids of a prompt, as `Engine.encode` does."""
        return self._tokenize.encode(prompt, most_tokens)

    def run_in_turns(self, work: Work[Result], *, client: str, num_bytes: int) -> Future[Result]:
        """Run work with the tokenizer, as `Engine.run_in_turns` does, once the other process has room for it."""
        future: Future[Result] = Future()

        def begin(room: Future[int]) -> None:
            if (error := room.exception()) is None:
                on_end = partial(self._process.tell, FrontEnd.give_room_back, room.result())
                self._tokenize.run(work, client=client, num_bytes=num_bytes, on_end=on_end, future=future)
            elif future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._process.ask(FrontEnd.take_room, client, num_bytes).add_done_callback(begin)
        return future

    def give_back_later(self) -> None:
        """Give memory back to the system in a moment: a large body has been dropped before it was any work."""
        self._tokenize.give_back_later()

    def _post(self, event: TokenizeStarted | GrammarCompiled | Tokenized | TokenizeFailed) -> None:
        """Send a tokenize worker's message about a request."""
        request_id = event.request.request_id
        match event:
            case TokenizeStarted():
                self._process.tell(FrontEnd.encoding_started, request_id, event.at_ns)
            case Tokenized():
                self._end_encoding(event.request)
                ids, starts, words = event.token_ids, event.second_starts, event.bad_words
                self._process.tell(FrontEnd.encoded, request_id, ids, starts, words, event.closing_ids, event.at_ns)
            case TokenizeFailed():
                self._end_encoding(event.request)
                self._process.tell(FrontEnd.not_encoded, request_id, event.error)

    def _end_encoding(self, request: Request) -> None:
        if (opened := self._open.get(request.request_id)) is not None:
            opened.is_encoding = False

    # -- adapters and reports ------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: Path) -> ServedAdapter:
        """Load an adapter, for all front ends. This takes a while. Raises the errors of `AdapterTable.load`."""
        return self._process.ask(FrontEnd.load_adapter, name, str(path)).result()

    def unload_adapter(self, name: str) -> ServedAdapter:
        """Let no further request name an adapter, at any front end. Raises NotFound."""
        return self._process.ask(FrontEnd.unload_adapter, name).result()

    def report(self) -> ReplicaReport:
        """Return the engine's report for routers. This blocks."""
        return self._process.ask(FrontEnd.report).result()

    # -- messages of the other process, on the event loop --------------------------------------------------------------

    def _take(self, body: bytes) -> None:
        match message := messages.of_engine(body):
            case messages.Events():
                self._hand_out(message.in_order())
            case messages.Answered() | messages.AskFailed():
                self._process.settle(message)
            case messages.State():
                self._learn(message)
            case messages.Shutdown():
                self._on_shutdown()

    def _learn(self, state: messages.State) -> None:
        self.adapters.replace(state.adapters)
        self.is_reporting, self.hang = state.is_reporting, state.hang
        if state.failure:
            self.failure = EngineGone(state.failure)
            self.drain()

    def _hand_out(self, events: list[Event]) -> None:
        outbox: dict[Deliver, list[Event]] = {}
        for event in events:
            opened = self._open[event.request_id]
            outbox.setdefault(opened.deliver, []).append(event)
            if isinstance(event, TERMINAL):
                del self._open[event.request_id]
                if opened.is_encoding:
                    self._tokenize.abort(event.request_id)
        for deliver, delivered in outbox.items():
            deliver(delivered)
        if self._is_stopping and not self._open:
            self._all_ended.set()

    def _lost(self) -> None:
        """End all requests with an error: the other process is gone."""
        self.failure = EngineGone("its process is gone")
        self.drain()
        self._process.fail_all()
        error = InternalError("The engine's process is gone; the server must be restarted.")
        ends: list[Event] = []
        for request_id, opened in self._open.items():
            times = RequestTimes(received=opened.request.received_ns, submitted=opened.submitted_ns)
            ends.append(Failed(request_id, error, Usage(0, 0, 0), times, EngineAccount()))
        self._hand_out(ends)
        self._all_ended.set()
        self._on_lost()
