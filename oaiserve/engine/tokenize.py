"""The tokenize stage: worker threads turn the prompts of a request into token ids, once, and check lengths and ids.

It knows the length of the context and the model's ids. It must not know HTTP, torch, the scheduler, or how a tokenizer
works. The engine submits and aborts requests, and passes a callable for the results.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from oaiserve.engine.request import ChatPrompt, Prompt, Request
from oaiserve.errors import APIError, ContextLengthExceeded, InternalError, InvalidRequest, Unavailable
from oaiserve.times import monotonic_ns

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizeStarted:
    """A worker has begun to encode the prompts of a request."""

    request: Request
    at_ns: int


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The token ids of each prompt, in order. There are no lists if the request was aborted before a worker took it."""

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

    def encode(self, prompt: Prompt) -> list[int]: ...

    def encode_bad_words(self, words: Sequence[str]) -> list[list[int]]: ...


Post = Callable[[TokenizeStarted | Tokenized | TokenizeFailed], None]


class TokenizeStage:
    """The worker threads that encode prompts, over one queue.

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
    ) -> None:
        """Start the workers, which call `post`. `max_model_len` is in tokens, `vocab_size` is the model's, and `clock`
        returns nanoseconds. Without workers, `submit` encodes on the caller's thread, for comparisons."""
        self._tokenizer = tokenizer
        self._post = post
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._clock = clock
        self._queue: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        # The requests in the queue that are not aborted. What pops one decides on it: a worker, `abort` or `stop`.
        self._waiting: dict[str, Request] = {}
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"tokenize-{i}", daemon=True) for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """The number of requests that no worker has taken yet."""
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Add a request to the queue, without blocking. Its id must be unique among the requests in the stage."""
        if not self._threads:
            self._post(self._tokenize(request))
            return
        self._waiting[request.request_id] = request
        self._queue.put(request)
        if self._stopped:
            self._fail_waiting()

    def abort(self, request_id: str) -> None:
        """Abort a request, so that it is not encoded if no worker has taken it. It is posted in its turn anyway."""
        self._waiting.pop(request_id, None)

    def stop(self) -> None:
        """Fail the requests that wait, finish those that are being encoded, and join the threads."""
        self._fail_waiting()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        # The order matters: a submit that is too late for the call below sees the flag, and fails what waits by itself.
        self._stopped = True
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        while True:
            try:
                request = self._queue.get_nowait()
            except queue.Empty:
                return
            if request is not None:
                self._waiting.pop(request.request_id, None)
                self._post(TokenizeFailed(request, Unavailable("The server is shutting down.")))

    def _work(self) -> None:
        while (request := self._queue.get()) is not None:
            if self._waiting.pop(request.request_id, None) is None:
                self._post(Tokenized(request, []))
            else:
                self._post(self._tokenize(request))
        self._queue.put(None)  # for the next worker

    def _tokenize(self, request: Request) -> Tokenized | TokenizeFailed:
        self._post(TokenizeStarted(request, self._clock()))
        try:
            self._check_ids(request.params.logit_bias, "logit_bias")
            self._check_ids(request.params.stop_token_ids, "stop_token_ids")
            self._check_ids(request.params.allowed_token_ids or (), "allowed_token_ids")
            bad_words = self._encode_bad_words(request.params.bad_words)
            token_ids = [self._encode(prompt, request.params.max_tokens) for prompt in request.prompts]
        except APIError as error:
            return TokenizeFailed(request, error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the Rust encoder is no Exception, and must not end the worker
            logger.exception("Request %s could not be tokenized.", request.request_id)
            return TokenizeFailed(request, InternalError("The server failed while it tokenized this request."))
        return Tokenized(request, token_ids, bad_words, self._clock())

    def _encode_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_bad_words(words) if words else []
        # A tokenizer may know more ids than its model, which cannot generate those anyway.
        return [token_ids for token_ids in encoded if max(token_ids) < self._vocab_size]

    def _encode(self, prompt: Prompt, max_tokens: int | None) -> list[int]:
        is_chat = isinstance(prompt, ChatPrompt)
        token_ids = self._tokenizer.encode(prompt)
        self._check_ids(token_ids, "messages" if is_chat else "prompt")
        room_for = 1 if max_tokens is None else max_tokens
        if len(token_ids) + room_for > self._max_model_len:
            raise ContextLengthExceeded(self._max_model_len, len(token_ids), max_tokens, chat=is_chat)
        return token_ids

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= self._vocab_size:
            raise InvalidRequest(
                f"Invalid '{param}': token id {lowest if lowest < 0 else highest} is outside the model's vocabulary. "
                f"Ids are from 0 to {self._vocab_size - 1}.",
                param=param,
            )
