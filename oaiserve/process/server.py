"""`EngineServer`: serves an engine to the front, in the process of the engine."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from threading import Lock
from time import process_time_ns
from typing import Any, TypeVar

from oaiserve.engine.boundary import AnyEngine
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Event
from oaiserve.errors import APIError
from oaiserve.http.fair_turns import Work
from oaiserve.process.link import Link
from oaiserve.process.messages import (
    Abort,
    Answer,
    AskOpenRows,
    AskReport,
    AskTokenizer,
    AskTokens,
    Begun,
    Ended,
    Health,
    LoadAdapter,
    Ready,
    Step,
    Stop,
    Submit,
    ToEngine,
    UnloadAdapter,
)
from oaiserve.process.remote_tokenizer import TokenizerFacts
from oaiserve.runtime import ENDED, Executor, Runtime, When, Worker

log = logging.getLogger(__name__)

BEAT_NS = 1_000_000_000  # interval of `Health` messages

Item = TypeVar("Item")


class Questions:
    """Answers questions to the tokenizer of an engine."""

    def __init__(self, engine: AnyEngine, link: Link) -> None:
        self._engine = engine
        self._link = link

    def received(self, question: AskTokens | AskTokenizer) -> None:
        number = question.number
        if isinstance(question, AskTokens):
            work = self._engine.encode(question.the_prompt(), question.most_tokens)
            self._in_turns(number, work, lambda ids: Answer(number, token_ids=ids))
        else:
            self._in_turns(number, self._called(question), lambda result: Answer(number, result=result))

    def answer(self, number: int, answer: Callable[[], Answer]) -> None:
        try:
            self._link.send(answer())
        except Exception as error:  # The front raises it to its caller.
            self._link.send(Answer(number, error=error))

    def _in_turns(self, number: int, work: Work[Any], answer: Callable[[Any], Answer]) -> None:
        """Answer a question with the result of work with the tokenizer."""

        def done(result: Future[Any]) -> None:
            self.answer(number, lambda: answer(result.result()))

        try:
            self._engine.run_in_turns(work, client="", num_bytes=0).add_done_callback(done)
        except APIError as error:
            self._link.send(Answer(number, error=error))

    def _called(self, question: AskTokenizer) -> Work[Any]:
        yield from ()
        return question.call(self._engine.tokenizer)


class EngineServer:
    """Handles the front's messages, and sends it the events of its requests, until `Stop` arrives or the front ends.

    `on_stop` is called once, with the number of seconds that open requests have to end.
    """

    def __init__(
        self,
        engine: Engine,
        link: Link,
        on_stop: Callable[[float], None],
        runtime: Runtime,
        cores_ns: Callable[[], int] = process_time_ns,
    ) -> None:
        self._engine = engine
        self._link = link
        self._questions = Questions(engine, link)
        self._on_stop = on_stop
        self._runtime = runtime
        self._cores_ns = cores_ns
        self._left_waiting: deque[tuple[str, int]] = deque()
        self._tokenized_bytes: deque[tuple[str, int]] = deque()
        engine.admission.waiting.on_give_back = lambda *left: self._left_waiting.append(left)
        engine.admission.body_bytes.on_give_back = lambda *left: self._tokenized_bytes.append(left)
        engine.tell_first_steps(lambda request_ids: link.send_now(Begun(request_ids)))
        self._lock = Lock()  # The engine thread and the beats both fill and send messages.
        self._has_ended = False
        self._beats: Worker[None] = runtime.worker("beats", self._beat)
        self._next_beat_ns = 0
        self._loads: Executor = runtime.executor("adapters")  # loads of adapters, which take a while

    def start(self) -> None:
        """Start the engine, and report that it is ready."""
        self._engine.start()
        engine = self._engine
        self._link.send(Ready.of(engine, TokenizerFacts.of(engine.tokenizer), engine.numbers))
        self._beats.start()

    def stop(self, drain_timeout_seconds: float) -> None:
        """End the open requests, send their events, and close the link."""
        self._engine.stop(drain_timeout_seconds)
        self._has_ended = True
        self._beats.post(None)
        self._loads.shutdown(wait=False)
        self._link.close()

    def received(self, message: ToEngine) -> None:
        """Handle a message from the front."""
        match message:
            case Submit():
                self._engine.take_over(message.request(), self._deliver, message.submitted_ns)
            case Abort(request_id):
                self._engine.abort(request_id)
            case Stop(seconds):
                self._on_stop(seconds)
            case AskReport(number, replica):
                self._questions.answer(number, lambda: Answer(number, report=self._engine.report(replica)))
            case AskOpenRows(number, offset_ns, request_id):
                rows = partial(self._engine.open_requests, offset_ns, request_id)
                self._questions.answer(number, lambda: Answer(number, rows=rows()))
            case AskTokens() | AskTokenizer():
                self._questions.received(message)
            case LoadAdapter(number, name, path, in_place):
                load = partial(self._engine.load_adapter, name, path, in_place=in_place)
                self._loads.submit(self._questions.answer, number, lambda: Answer(number, adapter=load()))
            case UnloadAdapter(number, name):
                self._questions.answer(number, lambda: Answer(number, adapter=self._engine.unload_adapter(name)))

    def front_ended(self) -> None:
        """Stop at once, because the front process is gone."""
        self._on_stop(0.0)

    def _deliver(self, events: list[Event]) -> None:
        """Send the events of a step. The engine thread calls this."""
        if self._engine.failure is not None:
            self._fail()  # The requests have not failed: another engine continues them.
            return
        self._send(Step.of(events))

    def _send(self, step: Step) -> None:
        with self._lock:
            step.numbers = self._engine.numbers
            step.steps = self._engine.take_steps()
            step.left_waiting = _taken(self._left_waiting)
            step.tokenized_bytes = _taken(self._tokenized_bytes)
            self._link.send(step)

    def _beat(self) -> When:
        """Measure energy and send the slowly changing numbers, both once a second."""
        if self._has_ended:
            return ENDED
        now_ns = self._runtime.clock_ns()
        if now_ns < self._next_beat_ns:
            return self._next_beat_ns
        if self._engine.failure is not None:
            self._fail()
            return ENDED
        self._engine.energy.read()
        now = self._engine.snapshot()
        cost = self._engine.step_cost
        health = Health(self._cores_ns(), now.num_tokenizing, now.num_hangs, self._engine.hang, cost)
        self._send(Step(health=health))
        self._next_beat_ns = now_ns + BEAT_NS
        return self._next_beat_ns

    def _fail(self) -> None:
        """Send the reason why the engine has ended, and stop. Only the first call does anything."""
        if not self._has_ended:
            self._has_ended = True
            failure: Any = self._engine.failure
            self._link.send(Ended(f"{type(failure).__name__}: {failure}"))
            self._on_stop(0.0)


def _taken(items: deque[Item]) -> list[Item]:
    return [items.popleft() for _ in range(len(items))]
