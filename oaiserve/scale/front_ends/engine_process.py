"""`EngineProcess` is the engine process for a front end: its messages and its questions."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from oaiserve.errors import Unavailable
from oaiserve.scale.front_ends.link import Link
from oaiserve.scale.front_ends.messages import Answered, Ask, AskFailed, Message, framed, value_of

T = TypeVar("T")


class _Asked(NamedTuple):
    future: Future[Any]
    kind: Any  # of the answer's value


class EngineProcess:
    """Sends messages and asks questions. Any thread may do both; answers arrive on the event loop."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}

    def send(self, message: Message) -> None:
        """Send a message. Raises UnicodeEncodeError for half of a surrogate pair, which has no bytes."""
        self.link.send(framed(message))

    def ask(self, kind: type[Ask[T]], *fields: object) -> tuple[int, Future[T]]:
        """Ask a question, with these fields behind its number. The future gets the answer, or the error that the
        question has led to."""
        number = next(self._numbers)
        future: Future[T] = Future()
        self._asked[number] = _Asked(future, kind.type_of_answer())
        if self.link.is_lost:
            self._fail(number)
        else:
            self.send(kind(number, *fields))
        return number, future

    def answer(self, kind: type[Ask[T]], *fields: object) -> T:
        """Ask a question and wait for its answer. Raises the error that it has led to."""
        return self.ask(kind, *fields)[1].result()

    def settle(self, reply: Answered | AskFailed) -> None:
        """Pass an answer on to the waiting question."""
        asked = self._asked.pop(reply.number)
        if not asked.future.set_running_or_notify_cancel():
            return
        if isinstance(reply, AskFailed):
            asked.future.set_exception(reply.error)
        else:
            asked.future.set_result(value_of(reply, asked.kind))

    def fail_all(self) -> None:
        """Fail all open questions: the engine process is gone."""
        for number in list(self._asked):
            self._fail(number)

    def _fail(self, number: int) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None and asked.future.set_running_or_notify_cancel():
            asked.future.set_exception(Unavailable("The server is shutting down.", retry_after_seconds=5))
