"""Calls of a front end: methods of `FrontEnd` and of its parts in the engine process, which are `offered`.

A method that is a coroutine function is a question, whose answer or error comes back with the number of the call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import GenericAlias
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, get_type_hints

from msgspec.msgpack import Decoder

from oaiserve.errors import Unavailable
from oaiserve.scale.front_ends.link import Link
from oaiserve.scale.front_ends.messages import Answered, AskFailed, Call, decoder_of, framed, packed

P = ParamSpec("P")
T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class Offered(NamedTuple):
    """A method that front ends may call, with the types that its arguments are checked against, and of its answer."""

    method: Callable[..., Any]
    owner: Callable[[Any], Any]  # takes the `FrontEnd`, and returns what has the method
    arguments: Decoder[Any]
    answer: Decoder[Any]


OFFERED: dict[str, Offered] = {}  # by the name of the class and of the method


def offered(method: Method, owner: Callable[[Any], Any] = lambda front_end: front_end) -> Method:
    """Let front ends call a method. The types of its arguments and of its answer are those of its signature."""
    kinds = get_type_hints(method)
    answer = decoder_of(kinds.pop("return"))
    arguments = decoder_of(GenericAlias(tuple, tuple(kinds.values())))
    OFFERED[method.__qualname__] = Offered(method, owner, arguments, answer)
    return method


class EngineProcess:
    """The engine process for a front end. Any thread may call it; answers arrive on the event loop."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[Future[Any], Decoder[Any]]] = {}

    def tell(self, method: Callable[Concatenate[Any, P], None], *arguments: P.args, **_: P.kwargs) -> None:
        """Call a method. Raises UnicodeEncodeError for half of a surrogate pair, which has no bytes."""
        self.link.send(framed(Call(method.__qualname__, packed(arguments), 0)))

    def ask(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *arguments: P.args, **_: P.kwargs
    ) -> Future[T]:
        """Call a method that is a question. The future gets its answer, or the error that it has led to."""
        number, future = next(self._numbers), Future[T]()
        frame = framed(Call(method.__qualname__, packed(arguments), number))
        self._asked[number] = future, OFFERED[method.__qualname__].answer
        if self.link.is_lost:
            self._fail(number)
        else:
            self.link.send(frame)
        return future

    def settle(self, reply: Answered | AskFailed) -> None:
        """Pass an answer on to the waiting question."""
        future, kind = self._asked.pop(reply.number)
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(reply, AskFailed):
            future.set_exception(reply.error)
        else:
            future.set_result(kind.decode(reply.value))

    def fail_all(self) -> None:
        """Fail all open questions: the engine process is gone."""
        for number in list(self._asked):
            self._fail(number)

    def _fail(self, number: int) -> None:
        future, _ = self._asked.pop(number, (None, None))
        if future is not None and future.set_running_or_notify_cancel():
            future.set_exception(Unavailable("The server is shutting down.", retry_after_seconds=5))
