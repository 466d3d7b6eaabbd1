"""/debug/requests/ID/tokens: a prompt and an answer of one of the last requests as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import isnan
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.engine.request import ChatPrompt, TooManyTokens
from oaiserve.errors import InvalidRequest, NotFound, invalid
from oaiserve.http.fair_turns import Work
from oaiserve.plugins.inspector.access import check_owner, may_read
from oaiserve.plugins.inspector.changes import changes_of
from oaiserve.plugins.inspector.kept import (
    BYTES_PER_TOKEN,
    MAX_TOKENS,
    KeptChoice,
    KeptPrompt,
    KeptRequest,
    KeptRequests,
)
from oaiserve.plugins.inspector.parts import TEXT, Runs, kinds_of
from oaiserve.plugins.inspector.streams import InspectedStreams
from oaiserve.routes.intake.turns import in_turns
from oaiserve.routes.operation import Operation, Parameter, read_query
from oaiserve.routes.serving import Serving, serving_of

PAGE_TOKENS = 32_768  # maximum tokens of one list per answer
PIECE_TOKENS = 4096  # tokens decoded per turn
SHOWN_CHANGE = 200  # maximum tokens shown of a removed part


class Tokens(msgspec.Struct):
    """A part of a list of tokens: the texts, ids and log-probabilities of the tokens from `start` on. A character that
    is split over several tokens is part of the last of them. A log-probability is null if it was never computed, as for
    a token that a grammar forced."""

    num_tokens: int  # length of the whole list
    start: int
    texts: list[str]
    ids: list[int]
    logprobs: list[float | None] | None = None


class Medium(msgspec.Struct):
    """An image or a sound of a prompt, without its content. `bytes` is the size of the file or its base64 encoding."""

    kind: str
    bytes: int


class ShownPrompt(Tokens, kw_only=True):
    """A prompt. `runs` has the origins of all its tokens in order, each with its number of tokens: the chat template,
    the tools, media, the role of a message, or other text; null if the origins are unknown."""

    cached_tokens: int
    runs: list[Runs] | None
    media: list[Medium]


class ShownAnswer(Tokens, kw_only=True):
    """An answer. `gaps_ns` has the time from each token to the next one in the engine; null if it is not known, because
    the request is open or has several choices."""

    gaps_ns: list[int] | None
    finish_reason: str | None


class ShownChange(msgspec.Struct):
    """A part of the prompt that differs from the earlier prompt: `added_tokens` tokens from `start` on replaced
    `removed_tokens` tokens, the first of which are in `removed`."""

    start: int
    added_tokens: int
    removed_tokens: int
    removed: list[str]  # texts of tokens


class Comparison(msgspec.Struct):
    """The earlier prompt with which this one was compared. `changes` lists the differences; null if the earlier one
    is no longer stored."""

    request_id: str
    age_ns: int | None
    common_tokens: int | None  # length of the common prefix
    changes: list[ShownChange] | None = None


class InspectedRequest(msgspec.Struct):
    """A prompt and an answer of a request as tokens."""

    request_id: str
    is_open: bool
    num_prompts: int
    num_choices: int  # choices per prompt; 0: no answer so far, as for embeddings
    prompt_index: int
    choice_index: int  # index among the choices of this prompt
    prompt: ShownPrompt | None  # null: its tokens aren't known, or tokenization failed
    answer: ShownAnswer | None  # null: it has not begun, or it is not streamed and not complete
    compared: Comparison | None


_QUERY = (
    Parameter("prompt", "The index of the prompt, if there are several.", is_integer=True, least=0),
    Parameter("choice", "The index of the choice of this prompt.", is_integer=True, least=0),
    Parameter("prompt_start", "The first token of the prompt to show.", is_integer=True, least=0),
    Parameter("answer_start", "The first token of the answer to show.", is_integer=True, least=0),
)


@Operation(
    summary="A prompt and an answer of one of the last requests as tokens, with --inspect.",
    group="Debugging",
    answer=InspectedRequest,
    query=_QUERY,
    errors=(NotFound,),
)
async def tokens(request: Request) -> Response:
    """Answer with the tokens that the model read and wrote. Raises Forbidden and NotFound."""
    serving = serving_of(request)
    streams = serving.streams
    kept_requests = streams.kept if isinstance(streams, InspectedStreams) else None
    if kept_requests is None:
        raise NotFound(
            "This server keeps no prompts and answers. Start it with --inspect 20, for those of the last 20 requests, "
            "which are in memory only."
        )
    check_owner(request)
    query = {name: value or 0 for name, value in read_query(request.query_params, _QUERY).items()}
    request_id = request.path_params["request_id"]
    kept = kept_requests.find(request_id)
    if kept is None:
        raise NotFound(
            f"The prompt and the answer of '{request_id[:128]}' are not kept here. This server keeps those of the last "
            f"{kept_requests.number:,} requests (--inspect), up to {kept_requests.max_tokens:,} tokens in all, and "
            "none from before its start."
        )
    if query["prompt"] >= len(kept.prompts):
        raise invalid("prompt", f"must be < {len(kept.prompts)}, got {query['prompt']}")
    if query["choice"] >= max(1, kept.num_choices):
        raise invalid("choice", f"must be < {kept.num_choices}, got {query['choice']}")
    earlier = _earlier(serving, kept_requests, kept) if query["prompt"] == 0 else None
    # The event loop continues writing into an open request, so the work gets copies.
    prompt = kept.prompts[query["prompt"]]
    choice = kept.choices.get(query["prompt"] * kept.num_choices + query["choice"])
    work = _shown(serving, kept, prompt, None if choice is None else _copied(choice), earlier, query)
    content = await in_turns(request, work, BYTES_PER_TOKEN * kept.num_tokens)
    return Response(content, media_type="application/json", headers={"cache-control": "no-store"})


def first_words(request: Request) -> dict[str, str]:
    """Return the first words of the stored conversations, keyed by request id. The result is empty unless the server's
    owner requests it. Plug-ins that show requests call this in the event loop, as `app.state.first_words`."""
    streams = serving_of(request).streams
    kept_requests = streams.kept if isinstance(streams, InspectedStreams) else None
    if kept_requests is None or not may_read(request):
        return {}
    return kept_requests.first_words()


class _Earlier(NamedTuple):
    request_id: str
    age_ns: int | None
    common_tokens: int | None
    token_ids: Sequence[int] | None  # None: the ids aren't stored


def _earlier(serving: Serving, kept_requests: KeptRequests, kept: KeptRequest) -> _Earlier | None:
    """Return the prompt that the first prompt of a request was compared with, or None, as for a request that hasn't
    ended."""
    entry = serving.telemetry.recent.get(kept.request_id)
    reuse: dict[str, Any] = {} if entry is None else entry["reuse"]
    if "compared_with" not in reuse:
        return None
    other = kept_requests.find(reuse["compared_with"])
    ids = None if other is None or other is kept else other.prompts[0].token_ids
    return _Earlier(reuse["compared_with"], reuse.get("age_ns"), reuse.get("common_tokens"), ids)


def _copied(choice: KeptChoice) -> KeptChoice:
    return KeptChoice(choice.token_ids[:], choice.logprobs[:], choice.finish_reason)


def _shown(
    serving: Serving,
    kept: KeptRequest,
    prompt: KeptPrompt,
    choice: KeptChoice | None,
    earlier: _Earlier | None,
    query: dict[str, int],
) -> Work[bytes]:
    token_ids: Sequence[int] | None = prompt.token_ids
    if token_ids is None and not kept.is_open and not prompt.media:  # Embedded or rejected prompts report no tokens.
        with suppress(InvalidRequest, TooManyTokens):
            token_ids = yield from serving.engine.encode(prompt.prompt, MAX_TOKENS)
    shown = None
    if token_ids is not None:
        runs: list[Runs] | None = [Runs(TEXT, len(token_ids))]
        if isinstance(prompt.prompt, ChatPrompt):
            runs = yield from kinds_of(serving.engine.tokenizer, prompt.prompt, token_ids)
        of_prompt = yield from _tokens(serving, token_ids, prompt.logprobs, query["prompt_start"])
        media = [Medium(medium.kind, medium.num_bytes) for medium in prompt.media]
        shown = ShownPrompt(**of_prompt, cached_tokens=prompt.cached_tokens, runs=runs, media=media)
    answer = None
    if choice is not None:
        start = query["answer_start"]
        of_answer = yield from _tokens(serving, choice.token_ids, choice.logprobs, start)
        gaps_ns = None
        if kept.gaps_ns is not None and len(kept.gaps_ns) == len(choice.token_ids) - 1:
            gaps_ns = [*kept.gaps_ns[start : start + PAGE_TOKENS]]
        answer = ShownAnswer(**of_answer, gaps_ns=gaps_ns, finish_reason=choice.finish_reason)
    compared = None
    if earlier is not None:
        compared = yield from _comparison(serving, earlier, token_ids)
    return msgspec.json.encode(
        InspectedRequest(
            kept.request_id,
            kept.is_open,
            len(kept.prompts),
            kept.num_choices if kept.choices else 0,
            query["prompt"],
            query["choice"],
            shown,
            answer,
            compared,
        )
    )


def _comparison(serving: Serving, earlier: _Earlier, token_ids: Sequence[int] | None) -> Work[Comparison]:
    before = earlier.token_ids
    if before is None or token_ids is None:
        return Comparison(earlier.request_id, earlier.age_ns, earlier.common_tokens)
    tokenizer = serving.engine.tokenizer
    yield None
    distinct = [*{*before, *token_ids}]
    texts = tokenizer.lone_texts(distinct)
    line_ends = {token_id for token_id, text in zip(distinct, texts, strict=True) if "\n" in text}
    found = changes_of(before, token_ids, line_ends.__contains__)
    yield None
    shown = []
    for start, added, removed_start, removed in found:
        ids = before[removed_start : removed_start + min(removed, SHOWN_CHANGE)]
        shown.append(ShownChange(start, added, removed, [*tokenizer.token_texts(ids)]))
    common = found[0].start if found else len(token_ids)
    return Comparison(earlier.request_id, earlier.age_ns, common, shown)


def _tokens(
    serving: Serving, token_ids: Sequence[int], logprobs: Sequence[float] | None, start: int
) -> Work[dict[str, Any]]:
    """Return the fields of `Tokens` for the part of a list that begins at `start`."""
    tokenizer = serving.engine.tokenizer
    ids = [*token_ids[start : start + PAGE_TOKENS]]
    texts: list[str] = []
    for number, text in enumerate(tokenizer.token_texts(ids)):
        if number and number % PIECE_TOKENS == 0:
            yield None
        texts.append(text)
    shown = None
    if logprobs is not None:
        shown = [None if isnan(value) else round(value, 4) for value in logprobs[start : start + PAGE_TOKENS]]
    return {"num_tokens": len(token_ids), "start": start, "texts": texts, "ids": ids, "logprobs": shown}
