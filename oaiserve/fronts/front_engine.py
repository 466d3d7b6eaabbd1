"""Lets a front process generate with the main process, as a front does with an engine process.

`FrontEngine` is the front process's end, and `ServedFront` the main process's.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress

from oaiserve.config import EngineOptions
from oaiserve.engine.boundary import AnyEngine
from oaiserve.engine.request import Deliver, Event, Failed, Request, Usage
from oaiserve.errors import APIError
from oaiserve.facts.record import EngineAccount
from oaiserve.facts.times import RequestTimes
from oaiserve.fronts.messages import Facts
from oaiserve.process.link import Link
from oaiserve.process.messages import Abort, AskTokenizer, AskTokens, Step, Submit
from oaiserve.process.open_answer import OpenAnswer
from oaiserve.process.remote_engine import STOP_SECONDS, RemoteEngine
from oaiserve.process.replica import EngineProcess, Replica
from oaiserve.process.server import Questions
from oaiserve.runtime import Runtime


class PassedAnswer(OpenAnswer):
    """An open request of a front process. The main process keeps the state that a restart needs, and joins the chunks
    of answers that are not streamed."""

    def take(self, event: Event) -> Event:
        return event


class FrontEngine(RemoteEngine):
    """The main process's engine, which decides which requests may wait, and continues them after a restart."""

    def __init__(self, main: EngineProcess, options: EngineOptions, runtime: Runtime) -> None:
        super().__init__([lambda: main], options, runtime, cores_ns=lambda: 0)
        self._is_empty: Future[None] = runtime.future()  # set after `stop`, once no request is open

    def become(self, facts: Facts) -> None:
        self._is_reporting = facts.is_reporting
        self.adapters.become(facts.adapters)

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Submit a request. If the main process refuses it, the consumer gets `Failed`."""
        self._check_open()
        answer = PassedAnswer.of(request, deliver, self._clock_ns)
        answer.is_sent = True
        (replica,) = self._replicas.values()
        answer.replica = replica.name
        with self._lock:
            self._open[request.request_id] = answer
            replica.send(Submit.of(answer.request, answer.submitted_ns))

    def took_step(self, replica: Replica, step: Step) -> None:
        super().took_step(replica, step)
        if self._is_stopping:
            self._note_if_empty()

    def stop(self, drain_timeout_seconds: float = 0.0) -> None:
        """Abort the open requests, and wait for their last events. The link stays open to send their records."""
        self.drain()
        self._is_stopping = True
        for replica in self._replicas.values():
            replica.is_stopping = True
        for request_id in self._open.copy():
            self.abort(request_id)
        self._note_if_empty()
        with suppress(TimeoutError):
            self._is_empty.result(drain_timeout_seconds + STOP_SECONDS)
        self._workers.stop()

    def _note_if_empty(self) -> None:
        with self._lock:
            if not self._open and not self._is_empty.done():
                self._is_empty.set_result(None)


class ServedFront:
    """Runs the requests of one front process on this process's engine. Only one thread at a time may call the
    methods."""

    def __init__(self, engine: AnyEngine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._questions = Questions(engine, link)
        self._open: set[str] = set()

    def received(self, message: Submit | Abort | AskTokens | AskTokenizer) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id):
                self._engine.abort(request_id)
            case AskTokens() | AskTokenizer():
                self._questions.received(message)

    def closed(self) -> None:
        """Abort the requests of a front process that has ended."""
        for request_id in self._open.copy():
            self._engine.abort(request_id)

    def _submit(self, message: Submit) -> None:
        request = message.request()
        self._open.add(request.request_id)
        try:
            self._engine.submit(request, self._deliver)
        except APIError as error:
            times = RequestTimes(received=request.received_ns or message.submitted_ns, submitted=message.submitted_ns)
            account = EngineAccount(num_choices=request.num_choices)
            self._deliver([Failed(request.request_id, error, Usage(0, 0, 0), times, account)])

    def _deliver(self, events: list[Event]) -> None:
        step = Step.of(events)
        self._open.difference_update(end.request_id for end in step.ends())
        self._link.send(step)
