"""/v1/completions: prompt forms, limits and shapes of the text route."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import Prompt, PromptDone, Request, TextPrompt, TokenChunk, TokenPrompt, Usage
from oaiserve.errors import InvalidRequest
from oaiserve.routes import protocol
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.protocol import CompletionBody, Wanted, integer, invalid
from oaiserve.routes.respond import Answer, off_loop_if_large, read_body
from oaiserve.routes.serving import Serving, serving_of
from oaiserve.routes.shapes import (
    ChunkFrame,
    Head,
    Timings,
    completion_logprobs,
    encode,
    prompt_logprobs_object,
    usage_object,
)

_decoder = msgspec.json.Decoder(CompletionBody)


async def completions(http: HTTPRequest) -> Answer:
    serving = serving_of(http)
    exchange: Exchange = http.state.exchange
    content = await read_body(http, serving)
    return await off_loop_if_large(content, lambda: _answer(content, serving, exchange))


def _answer(content: bytes, serving: Serving, exchange: Exchange) -> Answer:
    body = protocol.parse(_decoder, content, serving.unknown_names)
    exchange.is_streaming = bool(body.stream)
    serving.check_model(body.model)

    num_logprobs = _num_logprobs(body)
    asked_prompt_logprobs = protocol.prompt_logprobs(body)
    # With echo, the prompt's logprobs are part of the same lists as the answer's.
    echoed = num_logprobs if body.echo else None
    params = protocol.sampling_params(
        body,
        serving.engine.default_params,
        max_tokens=_max_tokens(body),
        logprobs=num_logprobs,
        prompt_logprobs=max((k for k in (echoed, asked_prompt_logprobs) if k is not None), default=None),
    )
    exchange.params = protocol.recorded_params(body, params)
    best_of = _best_of(body, params.n)
    prompts = build_prompts(body)
    if len(prompts) * best_of > protocol.MAX_CHOICES_PER_REQUEST:
        limit, name = protocol.MAX_CHOICES_PER_REQUEST, "n" if best_of == params.n else "best_of"
        raise invalid("prompt", f"prompts times {name} must be <= {limit}, got {len(prompts)} times {best_of}")
    exchange.prompt_text = protocol.traced_prompts(prompts, serving.trace_prompt_characters)
    response_id = exchange.response_id = f"cmpl-{exchange.unique_id}"
    head = Head(response_id, "text_completion", int(time.time()), serving.model_name, serving.fingerprint)
    wanted = protocol.wanted(body, params, num_logprobs, asked_prompt_logprobs)
    shape = CompletionShape(head, wanted, echo=bool(body.echo), best_of=best_of)
    if best_of > params.n:
        exchange.params["best_of"] = best_of
        params = replace(params, n=best_of, logprobs=num_logprobs or 0)  # which are what they are judged by
    request = Request(
        response_id,
        prompts,
        params,
        echo=bool(body.echo),
        priority=protocol.priority(body),
        cache_salt=protocol.cache_salt(body),
        stream_interval=protocol.stream_interval(body, serving.stream_interval),
        times=exchange.times,
        account=exchange.account,
    )
    return Answer(serving, exchange, request, shape, stream=bool(body.stream))


def _num_logprobs(body: CompletionBody) -> int | None:
    if isinstance(body.logprobs, bool):
        return 1 if body.logprobs else None
    return integer(body, "logprobs", 0, protocol.MAX_LOGPROBS)


def _best_of(body: CompletionBody, n: int) -> int:
    """Candidates per prompt, of which the client gets n."""
    best_of = integer(body, "best_of", 0, protocol.MAX_BEST_OF)
    if best_of in (None, 1):  # 1 is OpenAI's default, whatever n is
        return n
    if best_of < n:
        raise invalid("best_of", f"must be >= n ({n}), got {best_of}")
    if best_of > n and body.stream:
        raise invalid("best_of", f"must be equal to n ({n}) with 'stream': true, got {best_of}")
    return best_of


def _max_tokens(body: CompletionBody) -> int:
    max_tokens = integer(body, "max_tokens", 0, protocol.MAX_INT32)
    newer = integer(body, "max_completion_tokens", 0, protocol.MAX_INT32)
    if newer is not None:
        return newer
    return 16 if max_tokens is None else max_tokens


def build_prompts(body: CompletionBody) -> tuple[Prompt, ...]:
    """A string, a list of strings, one list of token ids, or a list of such lists."""
    prompt = body.prompt
    special = body.add_special_tokens is not False
    if prompt is None:
        raise InvalidRequest("Missing required parameter: 'prompt'.", param="prompt")
    if isinstance(prompt, str):
        return (TextPrompt(prompt, special),)
    if not prompt:
        raise invalid("prompt", "must not be an empty list")
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return tuple(TextPrompt(text, special) for text in prompt)
    if kinds == {int}:
        return (_token_prompt(prompt),)
    if kinds == {list}:
        return tuple(map(_token_prompt, prompt))
    raise invalid("prompt", "must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _token_prompt(ids: list[Any]) -> TokenPrompt:
    if not ids:
        raise invalid("prompt", "a list of token ids must not be empty")
    if set(map(type, ids)) != {int}:
        raise invalid("prompt", "a list of token ids must hold integers only")
    if (least := min(ids)) < 0:
        raise invalid("prompt", f"a token id must be >= 0, got {protocol.show(least)}")
    return TokenPrompt(ids)


class CompletionShape:
    """Choices of /v1/completions, streamed or whole. Choice `i` belongs to prompt `i // n`."""

    def __init__(self, head: Head, wanted: Wanted, *, echo: bool, best_of: int) -> None:
        """The engine makes `best_of` choices per prompt: `wanted.n` for a stream, or more."""
        self._head = head
        self._wanted = wanted
        self._echo = echo
        self._best_of = best_of
        self._frame = ChunkFrame(head, wanted)
        self._offsets: dict[int, int] = {}  # by choice: characters of the tokens whose logprobs were sent

    def prompt(self, event: PromptDone) -> bytes:
        """The first chunk of each choice, where there is something to say about the prompt."""
        self._frame.usage.prompt_tokens += len(event.token_ids)
        if not (self._echo or self._wanted.with_token_ids):
            return b""
        text = encode(event.text or "" if self._echo else "")
        ids = b',"prompt_token_ids":' + encode(list(event.token_ids)) if self._wanted.with_token_ids else b""
        parts = []
        for index in range(event.prompt_index * self._wanted.n, (event.prompt_index + 1) * self._wanted.n):
            logprobs = self._logprobs(index, event.logprobs if self._echo else None)
            parts.append(self._delta(index, text, logprobs, ids))
        return b"".join(parts)

    def delta(self, chunk: TokenChunk) -> bytes:
        self._frame.usage.completion_tokens += len(chunk.token_ids)
        event = b""
        if chunk.text or chunk.logprobs or (self._wanted.with_token_ids and chunk.token_ids):
            ids = b',"token_ids":' + encode(chunk.token_ids) if self._wanted.with_token_ids else b""
            event = self._delta(chunk.index, encode(chunk.text), self._logprobs(chunk.index, chunk.logprobs), ids)
        if chunk.finish_reason is not None:
            # A chunk of its own: clients drop the text of a chunk that has a finish reason.
            end = (chunk.index, encode(chunk.finish_reason), encode(chunk.stop_reason))
            choice = b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b,"stop_reason":%b}' % end
            event += self._frame.chunk(choice)
        return event

    def closing(self, usage: Usage, timings: Timings) -> bytes:
        return self._frame.closing(usage, timings)

    def whole(self, prompts: list[PromptDone], choices: list[TokenChunk], usage: Usage) -> dict[str, Any]:
        if self._best_of > self._wanted.n:
            choices = best_choices(choices, self._best_of, self._wanted.n)
        rendered = [self._choice(prompts[chunk.index // self._wanted.n], chunk) for chunk in choices]
        return self._head.fields() | {"choices": rendered, "usage": usage_object(usage)}

    def _choice(self, prompt: PromptDone, chunk: TokenChunk) -> dict[str, Any]:
        echoed = (prompt.text or "") if self._echo else ""
        logprobs = None
        if self._wanted.num_logprobs is not None:
            tokens = [*((prompt.logprobs or []) if self._echo else []), *(chunk.logprobs or [])]
            logprobs = completion_logprobs(tokens, self._wanted.num_logprobs, self._wanted.as_token_ids)
        choice: dict[str, Any] = {
            "index": chunk.index,
            "text": echoed + chunk.text,
            "logprobs": logprobs,
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        }
        if self._wanted.num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_object(prompt.logprobs or [], self._wanted.num_prompt_logprobs)
        if self._wanted.with_token_ids:
            choice["prompt_token_ids"] = list(prompt.token_ids)
            choice["token_ids"] = chunk.token_ids
        return choice

    def _delta(self, index: int, text: bytes, logprobs: bytes, more: bytes) -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null%b}' % (index, text, logprobs, more)
        return self._frame.chunk(choice)

    def _logprobs(self, index: int, tokens: list[Any] | None) -> bytes:
        if tokens is None or self._wanted.num_logprobs is None:
            return b"null"
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(token.token) for token in tokens)
        return encode(completion_logprobs(tokens, self._wanted.num_logprobs, self._wanted.as_token_ids, offset))


def best_choices(candidates: list[TokenChunk], best_of: int, n: int) -> list[TokenChunk]:
    """The n best of each prompt's `best_of` candidates, best first, with the indices of the answer.

    Judged by mean log-probability per generated token, as OpenAI does
    (https://platform.openai.com/docs/api-reference/completions/create). Of equal ones the first.
    """
    best: list[TokenChunk] = []
    for start in range(0, len(candidates), best_of):
        best += sorted(candidates[start : start + best_of], key=_mean_logprob, reverse=True)[:n]
    return [replace(chunk, index=index) for index, chunk in enumerate(best)]


def _mean_logprob(chunk: TokenChunk) -> float:
    logprobs = [token.logprob for token in chunk.logprobs or []]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0  # no tokens were asked for
