"""The tokenize stage: worker threads turn the prompts of a request into token ids, compile its grammar, and check
lengths and ids.

Clients take turns, and a turn is one piece of work, so a long prompt only keeps others waiting for milliseconds. The
stage depends on the length of the context and the model's ids, but not on HTTP, torch, the scheduler, or how a
tokenizer works.
The engine submits and aborts requests, and passes a callable for the results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from oaiserve.engine.request import ChatPrompt, Grammar, PairPrompt, Prompt, Request, TokenPrompt, TooManyTokens
from oaiserve.engine.text.template_text import by_template, is_written, joined
from oaiserve.engine.types.media import MediaReader, Prepared, PromptMedia
from oaiserve.errors import APIError, ContextLengthExceeded, invalid
from oaiserve.http.fair_turns import LONG, CpuTime, Task, TurnWorkers, Work
from oaiserve.runtime import Runtime
from oaiserve.wire.continuation import SENT_HEADER

if TYPE_CHECKING:
    from oaiserve.engine.grammars.grammar import CompiledGrammar
    from oaiserve.engine.text.tokenizer import Expand, Tokenizer

Result = TypeVar("Result")

PIECE_TOKENS = 2**12  # tokens whose texts are found in one turn


@dataclass(frozen=True, slots=True)
class TokenizeStarted:
    request: Request
    at_ns: int


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """The grammar of a request is ready. Its prompts are encoded next, which may fail."""

    request: Request
    grammar: CompiledGrammar
    at_ns: int


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The token ids of each prompt, in order; none if the request was aborted before all were known."""

    request: Request
    token_ids: list[list[int]]
    second_starts: list[int | None] = field(default_factory=list)  # where the second text of each pair begins
    bad_words: list[list[int]] = field(default_factory=list)
    closing_ids: list[int] = field(default_factory=list)  # tokens that close the reasoning, if it has a budget
    grammar: CompiledGrammar | None = None
    at_ns: int | None = None  # None if it wasn't encoded
    media: list[PromptMedia | None] = field(default_factory=list)  # media of each prompt; empty if none has any
    # The part of each prompt's text for each token; None if not needed.
    texts: Sequence[list[str] | None] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.token_ids))


@dataclass(frozen=True, slots=True)
class TokenizeFailed:
    """The prompts of a request cannot be encoded, or the model does not support the request."""

    request: Request
    error: APIError


Compile = Callable[[Grammar, str], "CompiledGrammar"]  # may raise an APIError
TokenizeEvent = TokenizeStarted | GrammarCompiled | Tokenized | TokenizeFailed
Post = Callable[[TokenizeEvent], None]

OnEnd = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Place:
    """The place of a request in the stage. It isn't a `threading.Event`, because making one would take a third of the
    time of `submit`."""

    is_aborted: bool = False


class TokenizeStage:
    """The worker threads that tokenize prompts, in turns by client.

    For each submitted request, the stage posts exactly one `Tokenized` or `TokenizeFailed`, even if the request is
    aborted or the stage stops. Before that, it posts `TokenizeStarted` once a worker has begun with the request, and
    `GrammarCompiled` once its grammar has been compiled.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        compile_grammar: Compile,
        post: Post,
        *,
        max_model_len: int,
        vocab_size: int,
        num_workers: int = 2,
        encode_rest: float = 0.0,
        media: MediaReader | None = None,
        runtime: Runtime,
    ) -> None:
        """Start the workers, which call `post`. `max_model_len` is in tokens, and `vocab_size` is that of the model.
        After a piece of a large prompt, its worker rests for `encode_rest` times the CPU time of the piece. Without
        workers, `submit` encodes on the caller's thread, for comparisons."""
        self._tokenizer = tokenizer
        self._compile_grammar = compile_grammar
        self._post = post
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._clock = runtime.clock_ns
        self._cpu_ns = runtime.thread_cpu_ns
        self._media = media
        self._encode_rest = encode_rest
        self._lock = Lock()
        self._places: dict[str, _Place] = {}  # keyed by request id
        self._workers = TurnWorkers(num_workers, "tokenize", has_long=media is not None, runtime=runtime)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests and other work not yet begun."""
        return self._workers.num_waiting

    def submit(self, request: Request, on_end: OnEnd = lambda: None) -> None:
        """Add a request, without blocking. `on_end` is called before the result is posted."""
        place = _Place()
        with self._lock:
            self._places[request.request_id] = place

        def ended(event: Tokenized | TokenizeFailed) -> None:
            with self._lock:
                if self._places.get(request.request_id) is place:
                    del self._places[request.request_id]
            on_end()
            self._post(event)

        cpu = CpuTime(self._cpu_ns)

        def failed(error: APIError) -> None:
            error.worker_ns = cpu.ns
            ended(TokenizeFailed(request, error))

        self._workers.add(
            Task(
                request.client,
                request.num_bytes,
                cpu.of(self._tokenize(request)),
                done=ended,
                failed=failed,
                dropped=lambda: ended(Tokenized(request, [])),
                is_unwanted=lambda: place.is_aborted,
                name=request.request_id,
                rest=self._encode_rest,
            )
        )

    def run(
        self,
        work: Work[Result],
        *,
        client: str,
        num_bytes: int,
        on_end: OnEnd = lambda: None,
    ) -> Future[Result]:
        """Run other work for a client, alternating with requests: each turn continues to the next `yield`.

        The work ends early if the future is cancelled. Any error other than an APIError becomes an InternalError.
        `on_end` is called when the stage has finished with the work.
        """
        return self._workers.run(work, client=client, num_bytes=num_bytes, on_end=on_end)

    def encode(self, prompt: Prompt, most_tokens: int | None) -> Work[list[int]]:
        """Return work for `run` that encodes a prompt, including the ids in place of its images. It raises what
        `Tokenizer.encode_in_pieces` does."""
        prepared = yield from self._prepare(prompt, "", only_text=True)
        return (yield from self._tokenizer.encode_in_pieces(prompt, most_tokens, self._expand(prompt, prepared)))

    def give_back_later(self) -> None:
        """Return freed memory to the system in a moment, after large bodies were dropped without having become work."""
        self._workers.give_back_later()

    def abort(self, request_id: str) -> None:
        """Abort a request: encoding stops after the current piece. Its result is still posted, in its turn."""
        with self._lock:
            if (place := self._places.get(request_id)) is not None:
                place.is_aborted = True

    def stop(self) -> None:
        """Fail all waiting work, and the current work unless its last piece is running, and join the threads."""
        self._workers.stop()

    def _tokenize(self, request: Request) -> Work[Tokenized]:
        self._post(TokenizeStarted(request, self._clock()))
        params = request.params
        grammar = None
        self._check_ids(params.logit_bias, "logit_bias")
        self._check_ids(params.stop_token_ids, "stop_token_ids")
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        for piece in request.sent:
            self._check_ids(piece.token_ids, SENT_HEADER)
        if params.bad_words:
            bad_words = self._tokenizer.encode_bad_words(params.bad_words)
        else:
            bad_words = []
        # A tokenizer may know more ids than its model, which can't generate them anyway.
        bad_words = [token_ids for token_ids in bad_words if max(token_ids) < self._vocab_size]
        closing_ids: list[int] = []
        if params.reasoning is not None and params.reasoning.budget is not None:
            closing_ids = self._tokenizer.encode_plain(params.reasoning.closing)
        if params.grammar is not None:
            grammar = self._compile_grammar(params.grammar, request.client)
            self._post(GrammarCompiled(request, grammar, self._clock()))
            yield None  # Compiling may have taken long, so end the turn.
        token_ids: list[list[int]] = []
        second_starts: list[int | None] = []
        media: list[PromptMedia | None] = []
        texts: list[list[str] | None] = []
        for index, prompt in enumerate(request.prompts):
            if token_ids:
                yield None
            prepared = yield from self._prepare(prompt, request.cache_salt)
            ids, second_start = yield from self._encode(request, index, prepared)
            token_ids.append(ids)
            second_starts.append(second_start)
            media.append(self._media.placed(ids, prepared) if self._media is not None and prepared else None)
            texts.append((yield from self._texts(prompt, ids)) if params.prompt_texts else None)
        return Tokenized(
            *(request, token_ids, second_starts, bad_words, closing_ids, grammar, self._clock()),
            media=media if any(media) else [],
            texts=texts,
        )

    def _texts(self, prompt: Prompt, token_ids: list[int]) -> Work[list[str]]:
        texts: list[str] = []
        for number, text in enumerate(self._tokenizer.text_parts(prompt, token_ids)):
            if number % PIECE_TOKENS == 0:
                yield None
            texts.append(text)
        return texts

    def _prepare(self, prompt: Prompt, salt: str, *, only_text: bool = False) -> Work[list[Prepared]]:
        """Prepare the images and sounds of a prompt, using a long turn for each."""
        prepared: list[Prepared] = []
        if isinstance(prompt, ChatPrompt | TokenPrompt) and prompt.media:
            if self._media is None:
                raise invalid(prompt.param, "this model reads text alone")
            yield LONG
            for file in self._media.checked(prompt.media):
                yield LONG
                prepared.append(self._media.prepare(file, salt, only_text=only_text))
            yield None
        return prepared

    def _encode(self, request: Request, index: int, prepared: list[Prepared]) -> Work[tuple[list[int], int | None]]:
        """Return the token ids of a prompt, which must leave room for an answer if one is to be generated. For a pair,
        also return where its second text begins."""
        prompt = request.prompts[index]
        expand = self._expand(prompt, prepared)
        has_answer = request.params.max_tokens != 0
        most_tokens = self._max_model_len - has_answer
        second_start: int | None = None
        try:
            if isinstance(prompt, PairPrompt):
                token_ids, second_start = self._tokenizer.encode_pair(prompt, most_tokens)
            else:
                token_ids = yield from self._tokenizer.encode_in_pieces(prompt, most_tokens, expand)
        except TooManyTokens as error:
            raise ContextLengthExceeded(
                self._max_model_len,
                error.num_tokens,
                param=prompt.param,
                where=_place_of(request, index),
                is_exact=error.is_exact,
                has_answer=has_answer,
            ) from error
        if not token_ids:
            raise invalid(prompt.param, "it has no tokens, so there is nothing to continue")
        self._check_ids(token_ids, prompt.param)
        return token_ids, second_start

    def _expand(self, prompt: Prompt, prepared: list[Prepared]) -> Expand | None:
        """Return the function that puts the texts of prepared media into a rendered text."""
        media = self._media
        if media is None or not prepared:
            return None
        kinds = {placeholder: kind for kind, placeholder in media.placeholders.items()}
        any_of = re.compile(f"({'|'.join(map(re.escape, kinds))})")

        def expand(text: str) -> str:
            found = [match for match in any_of.finditer(text) if is_written(text, *match.span())]
            places = [kinds[match[0]] for match in found]
            wanted_kinds = [one.medium.kind for one in prepared]
            if places != wanted_kinds:
                raise invalid(
                    prompt.param,
                    f"its files are [{', '.join(wanted_kinds)}], for which the model's chat template has places "
                    f"[{', '.join(places)}]",
                )
            parts = []
            at = 0
            for match, one in zip(found, prepared, strict=True):
                parts += [text[at : match.start()], by_template(one.text)]
                at = match.end()
            return joined([*parts, text[at:]])

        return expand

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        lowest = min(token_ids, default=0)
        highest = max(token_ids, default=0)
        if lowest < 0 or highest >= self._vocab_size:
            reason = f"token id {lowest if lowest < 0 else highest} is outside the model's vocabulary"
            raise invalid(param, f"{reason}. Ids of this model's tokenizer are from 0 to {self._vocab_size - 1}")


def _place_of(request: Request, index: int) -> str:
    """Return the field that a prompt came from, with its index among the prompts of that field if there are several."""
    param = request.prompts[index].param
    others = [prompt.param == param for prompt in request.prompts]
    if others.count(True) == 1:
        return param
    return f"{param}[{others[:index].count(True)}]"
