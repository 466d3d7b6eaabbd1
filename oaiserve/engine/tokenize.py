"""The tokenize stage: worker threads turn the prompts of a request into token ids, once, and check lengths and ids.

Clients take turns, and a turn is one piece of work, so a long prompt keeps others waiting for milliseconds. It knows
the length of the context and the model's ids. It must not know HTTP, torch, the scheduler, or how a tokenizer works.
The engine submits and aborts requests, and passes a callable for the results.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from oaiserve.engine.freed_memory import give_back
from oaiserve.engine.request import ChatPrompt, Prompt, Request, TooManyTokens
from oaiserve.engine.turns import Turns
from oaiserve.errors import APIError, ContextLengthExceeded, InternalError, InvalidRequest, Unavailable
from oaiserve.times import monotonic_ns

logger = logging.getLogger(__name__)

# Of the bodies whose work waits or is under way. Parsed, a body takes up to four times its bytes, or more as ids.
MAX_BYTES = 64 * 2**20
LARGE_BYTES = 2**20  # a body after which freed memory is worth giving back
GIVE_BACK_SECONDS = 1.0  # after the last large body: by then, what has been made of it is free
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class TokenizeStarted:
    """A worker has begun to encode the prompts of a request."""

    request: Request
    at_ns: int


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The token ids of each prompt, in order. There are no lists if the request was aborted before all were known."""

    request: Request
    token_ids: list[list[int]]
    bad_words: list[list[int]] = field(default_factory=list)
    at_ns: int | None = None  # None: it was not encoded

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True, slots=True)
class TokenizeFailed:
    """The prompts of a request cannot be encoded, or the request asks for something that the model cannot do."""

    request: Request
    error: APIError


class Encoder(Protocol):
    """The methods of a tokenizer that the stage calls."""

    def encode_in_pieces(self, prompt: Prompt, most_tokens: int, /) -> Generator[None, None, list[int]]:
        """Return the token ids of a prompt, and stop after each piece.

        May raise an APIError, and TooManyTokens if there are more than `most_tokens`.
        """

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]: ...


Post = Callable[[TokenizeStarted | Tokenized | TokenizeFailed], None]


@dataclass(slots=True, eq=False)
class _Task:
    """Work that is done in turns, with exactly one of three ends."""

    client: str
    num_bytes: int
    work: Generator[None, None, Any]  # stops after each turn
    done: Callable[[Any], None]  # takes what the work has returned
    failed: Callable[[APIError], None]
    dropped: Callable[[], None]  # nobody wants it any more
    request_id: str | None = None
    future: Future[Any] | None = None  # of other work than a request's
    is_begun: bool = False
    is_aborted: bool = False

    @property
    def is_unwanted(self) -> bool:
        return self.is_aborted or (self.future is not None and self.future.cancelled())


class TokenizeStage:
    """The worker threads that encode prompts, in turns by client.

    For each request that is submitted, the stage posts exactly one `Tokenized` or `TokenizeFailed`, also when it is
    aborted or the stage stops, and `TokenizeStarted` before that if a worker has begun with it.
    """

    def __init__(
        self,
        tokenizer: Encoder,
        post: Post,
        *,
        max_model_len: int,
        vocab_size: int,
        num_workers: int = 2,
        clock: Callable[[], int] = monotonic_ns,
        give_back: Callable[[], None] = give_back,
        give_back_seconds: float = GIVE_BACK_SECONDS,
    ) -> None:
        """Start the workers, which call `post`. `max_model_len` is in tokens, `vocab_size` is the model's, and `clock`
        returns nanoseconds. Without workers, `submit` encodes on the caller's thread, for comparisons."""
        self._give_back = give_back
        self._give_back_ns = int(give_back_seconds * 1e9)
        self._tokenizer = tokenizer
        self._post = post
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._clock = clock
        # Guards all that follows. Nothing else is called while it is held.
        self._changed = threading.Condition()
        self._turns: Turns[_Task] = Turns()
        self._requests: dict[str, _Task] = {}  # by request id, while they are in the stage
        self._num_bytes = 0
        self._num_waiting = 0
        self._is_stopped = False
        self._give_back_at_ns: int | None = None  # by the true clock
        self._threads = [
            threading.Thread(target=self._work, name=f"tokenize-{i}", daemon=True) for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """The number of requests, and of other work, that no worker has begun yet."""
        return self._num_waiting

    def has_room(self, num_bytes: int) -> bool:
        """Return whether work on a body of this size may be added. If there is none, a body of any size may."""
        return self._num_bytes == 0 or self._num_bytes + num_bytes <= MAX_BYTES

    def submit(self, request: Request) -> None:
        """Add a request, without blocking. Its id must be unique among the open requests."""
        task = _Task(
            request.client,
            request.num_bytes,
            self._tokenize(request),
            done=self._post,
            failed=lambda error: self._post(TokenizeFailed(request, error)),
            dropped=lambda: self._post(Tokenized(request, [])),
            request_id=request.request_id,
        )
        with self._changed:
            self._requests[request.request_id] = task
        self._add(task)

    def run(self, work: Generator[None, None, Result], *, client: str, num_bytes: int) -> Future[Result]:
        """Run other work of a client between the requests: a turn goes on to its next `yield`.

        It ends early if the future is cancelled. An error that is no APIError becomes an InternalError.
        """
        future: Future[Result] = Future()

        def settle(settle: Callable[[Any], None], value: object) -> None:
            if future.set_running_or_notify_cancel():
                settle(value)

        # The future must not hold the task: a circle would keep the body until the next collection of garbage.
        task = _Task(
            client,
            num_bytes,
            work,
            done=lambda result: settle(future.set_result, result),
            failed=lambda error: settle(future.set_exception, error),
            dropped=lambda: None,
            future=future,
        )
        self._add(task)
        return future

    def abort(self, request_id: str) -> None:
        """Abort a request: it is not encoded any further than the piece under way. It is posted in its turn anyway."""
        with self._changed:
            task = self._requests.get(request_id)
            if task is not None:
                task.is_aborted = True

    def stop(self) -> None:
        """Fail all that waits, and what is under way unless its piece is the last one, and join the threads."""
        with self._changed:
            self._is_stopped = True
            waiting = self._turns.take_all()
            self._changed.notify_all()
        for task in waiting:
            self._refuse(task)
        for thread in self._threads:
            thread.join()

    def _add(self, task: _Task) -> None:
        with self._changed:
            self._num_bytes += task.num_bytes
            self._num_waiting += 1
            is_stopped = self._is_stopped
            if self._threads and not is_stopped:
                self._turns.add(task.client, task)
                self._changed.notify()
                return
        if is_stopped:
            self._refuse(task)
            return
        while not self._run_piece(task):
            pass

    def _work(self) -> None:
        while (task := self._take()) is not None:
            self._run_turn(task)
            del task  # or else its prompts would be kept until the next one comes

    def _run_turn(self, task: _Task) -> None:
        if self._run_piece(task):
            return
        with self._changed:
            is_stopped = self._is_stopped
            if not is_stopped:
                self._turns.put_back(task.client, task)
                self._changed.notify()
        if is_stopped:
            self._refuse(task)

    def _take(self) -> _Task | None:
        """Wait for the next turn. Return None once the stage has stopped."""
        while True:
            with self._changed:
                at_ns = self._give_back_at_ns
                is_due = at_ns is not None and at_ns <= monotonic_ns()
                if is_due:
                    self._give_back_at_ns = None
                elif self._turns:
                    return self._turns.take()
                elif self._is_stopped:
                    return None
                else:
                    self._changed.wait(None if at_ns is None else (at_ns - monotonic_ns()) / 1e9)
            if is_due:
                self._give_back()

    def _run_piece(self, task: _Task) -> bool:
        """Run the work of a task up to its next stop. Return whether it has ended."""
        if task.is_unwanted:
            self._end(task, task.dropped)
            return True
        self._begin(task)
        try:
            next(task.work)
        except StopIteration as stop:
            result = stop.value
            self._end(task, lambda: task.done(result))
        except APIError as error:
            # The frames of its traceback hold the prompt, and would keep it until the next collection of garbage.
            failure = error.with_traceback(None)
            failure.__cause__ = failure.__context__ = None
            self._end(task, lambda: task.failed(failure))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the Rust encoder is no Exception, and must not end the worker
            logger.exception("The work of %s failed.", task.request_id or "the tokenizer's routes")
            failed = InternalError("The server failed while it tokenized this request.")
            self._end(task, lambda: task.failed(failed))
        else:
            return False
        return True

    def _begin(self, task: _Task) -> None:
        if not task.is_begun:
            task.is_begun = True
            with self._changed:
                self._num_waiting -= 1

    def _refuse(self, task: _Task) -> None:
        self._end(task, lambda: task.failed(Unavailable("The server is shutting down.")))

    def _end(self, task: _Task, end: Callable[[], None]) -> None:
        """End a task. What it holds is counted until then, and no longer."""
        task.work.close()
        self._begin(task)
        with self._changed:
            self._num_bytes -= task.num_bytes
            if task.num_bytes >= LARGE_BYTES:
                self._give_back_at_ns = monotonic_ns() + self._give_back_ns
            if task.request_id is not None and self._requests.get(task.request_id) is task:
                del self._requests[task.request_id]
        end()

    def _tokenize(self, request: Request) -> Generator[None, None, Tokenized]:
        self._post(TokenizeStarted(request, self._clock()))
        self._check_ids(request.params.logit_bias, "logit_bias")
        self._check_ids(request.params.stop_token_ids, "stop_token_ids")
        self._check_ids(request.params.allowed_token_ids or (), "allowed_token_ids")
        bad_words = self._encode_bad_words(request.params.bad_words)
        token_ids: list[list[int]] = []
        for prompt in request.prompts:
            if token_ids:
                yield
            token_ids.append((yield from self._encode(prompt, request.params.max_tokens)))
        return Tokenized(request, token_ids, bad_words, self._clock())

    def _encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_bad_words(words) if words else []
        # A tokenizer may know more ids than its model, which cannot generate those anyway.
        return [token_ids for token_ids in encoded if max(token_ids) < self._vocab_size]

    def _encode(self, prompt: Prompt, max_tokens: int | None) -> Generator[None, None, list[int]]:
        is_chat = isinstance(prompt, ChatPrompt)
        most_tokens = self._max_model_len - (1 if max_tokens is None else max_tokens)
        try:
            token_ids = yield from self._tokenizer.encode_in_pieces(prompt, most_tokens)
        except TooManyTokens as error:
            raise ContextLengthExceeded(
                self._max_model_len, error.num_tokens, max_tokens, chat=is_chat, is_exact=error.is_exact
            ) from error
        self._check_ids(token_ids, "messages" if is_chat else "prompt")
        return token_ids

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= self._vocab_size:
            raise InvalidRequest(
                f"Invalid '{param}': token id {lowest if lowest < 0 else highest} is outside the model's vocabulary. "
                f"Ids are from 0 to {self._vocab_size - 1}.",
                param=param,
            )
