"""Turns the body of a generation request into an `Answer`, in the same way for every generation route.

A route passes in what it has of its own: the type of its body, its own parameters, its prompts, and its shape.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import Grammar, Prompt, Request, Usage
from oaiserve.facts.prefix_keys import beginnings_of, prompt_of_body
from oaiserve.routes import constraints, parameters, protocol
from oaiserve.routes.bodies import MAX_CHOICES_PER_REQUEST, SamplingBody
from oaiserve.routes.body import read_body
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.invalid import invalid
from oaiserve.routes.off_loop import in_turns_if_large
from oaiserve.routes.parameters import Wanted, integer
from oaiserve.routes.respond import Answer, Shape
from oaiserve.routes.serving import serving_of
from oaiserve.routes.shapes import Head

Body = TypeVar("Body", bound=SamplingBody)


@dataclass(frozen=True, slots=True)
class OwnParams:
    """The parameters that each route names or limits in its own way."""

    max_tokens: int | None  # None: the rest of the context
    num_logprobs: int | None  # alternatives per generated token; None: no logprobs
    best_of: int | None = None  # candidates per prompt, of which the client gets the best n; None: n
    echo: bool = False
    asked: Grammar | None = None  # a constraint that the client asks for by a name of this route's own
    grammar: Grammar | None = None  # that the route itself needs: forced calls of tools
    # Makes a client's constraint one that also lets through what may come instead: calls that are not forced.
    or_calls: Callable[[Grammar], Grammar] | None = None
    answer_begins_after: str = ""  # the text with which reasoning ends, for which neither grammars nor stops count
    visible_special_ids: frozenset[int] = frozenset()
    text_lengths: bool = False


def _grammar(body: SamplingBody, own: OwnParams) -> Grammar | None:
    """Return the constraint on the answer, which the client asks for or the route needs."""
    grammar = constraints.grammar(body, own.asked)
    if grammar is not None and own.grammar is not None:
        if grammar.param in constraints.TEXT_FORMATS:  # of which a forced call has no text; clients send both
            return replace(own.grammar, after=own.answer_begins_after)
        raise invalid(grammar.param, f"is not allowed together with '{own.grammar.param}' of which one must be called")
    if grammar is not None and own.or_calls is not None:
        grammar = own.or_calls(grammar)
    grammar = grammar or own.grammar
    return None if grammar is None else replace(grammar, after=own.answer_begins_after)


async def prepare(
    http: HTTPRequest,
    decoder: msgspec.json.Decoder[Body],
    *,
    id_prefix: str,
    own_params: Callable[[Body], OwnParams],
    prompts: Callable[[Body], tuple[Prompt, ...]],
    shape: Callable[[Body, Head, Wanted], Shape],
    check_given: Callable[[Mapping[str, msgspec.Raw]], None] | None = None,
    recall: Callable[[Body], Awaitable[int]] | None = None,
    before_end: Callable[[Usage], Awaitable[None]] | None = None,
) -> Answer:
    """Read and check the request, and return the answer that is ready to be submitted to the engine.

    The exchange learns each fact as soon as it is known, so that the record of a refused request has it too. The
    callables are called in the order in which they stand here, after `check_given`, which `protocol.parse` calls. Large
    bodies are checked in a worker thread, so they must not touch the event loop. The last two are for that: `recall` is
    called when the body is parsed, and returns the bytes that it has added to the request; `before_end` when the answer
    is complete, before the client gets its end. Raises an APIError.
    """
    serving = serving_of(http)
    exchange: Exchange = http.state.exchange
    content = await read_body(http, serving)

    def parse() -> Generator[None, None, Body]:
        body = yield from protocol.parse(decoder, content, serving.unknown_names, check_given)
        exchange.is_streaming = bool(body.stream)
        exchange.adapter = serving.check_model(body.model)
        serving.check_task("generate")
        return body

    def check(body: Body, num_bytes: int) -> Answer:
        own = own_params(body)
        num_prompt_logprobs = parameters.prompt_logprobs(body)
        # With echo, the logprobs of the prompt are part of the same lists as those of the answer.
        echoed = own.num_logprobs if own.echo else None
        params = parameters.sampling_params(
            body,
            serving.engine.default_params,
            max_tokens=own.max_tokens,
            logprobs=own.num_logprobs,
            prompt_logprobs=max((k for k in (echoed, num_prompt_logprobs) if k is not None), default=None),
            grammar=_grammar(body, own),
        )
        if own.visible_special_ids or own.text_lengths or own.answer_begins_after:
            params = replace(
                params,
                visible_special_ids=own.visible_special_ids,
                text_lengths=own.text_lengths,
                stop_after=own.answer_begins_after,
            )
        exchange.params = parameters.recorded_params(body, params)
        wanted = parameters.wanted(body, params, own.num_logprobs, num_prompt_logprobs)
        if own.best_of is not None and own.best_of > params.n:
            exchange.params["best_of"] = own.best_of
            # The candidates are ranked by their log-probabilities, so the engine must return these.
            params = replace(params, n=own.best_of, logprobs=own.num_logprobs or 0)

        all_prompts = prompts(body)
        if len(all_prompts) * params.n > MAX_CHOICES_PER_REQUEST:
            limit, name = MAX_CHOICES_PER_REQUEST, "n" if params.n == wanted.n else "best_of"
            raise invalid("prompt", f"prompts times {name} must be <= {limit}, got {len(all_prompts)} times {params.n}")
        exchange.prompt_text = parameters.traced_prompts(all_prompts, serving.trace_prompt_characters)

        beginnings: tuple[tuple[int, float], ...] = ()
        # What a request goes on from is not in its body, and routers know bodies only.
        if serving.engine.is_reporting and len(all_prompts) == 1 and num_bytes == len(content):
            beginnings = beginnings_of(prompt_of_body(content))
        response_id = exchange.response_id = f"{id_prefix}{exchange.unique_id}"
        head = Head(response_id, int(time.time()), serving.name_of(exchange.adapter), serving.fingerprint)
        request = Request(
            response_id,
            all_prompts,
            params,
            echo=own.echo,
            priority=integer(body, "priority") or 0,
            cache_salt=parameters.cache_salt(body),
            adapter=0 if exchange.adapter is None else exchange.adapter.number,
            stream_interval=parameters.stream_interval(body, serving.stream_interval),
            client=exchange.client,
            num_bytes=num_bytes,
            received_ns=exchange.received_ns,
            beginnings=beginnings,
        )
        return Answer(
            serving,
            exchange,
            request,
            shape(body, head, wanted),
            stream=exchange.is_streaming,
            before_end=before_end,
        )

    def parse_and_check() -> Generator[None, None, Answer]:
        return check((yield from parse()), len(content))

    def check_in_turn(body: Body, num_bytes: int) -> Generator[None, None, Answer]:
        yield
        return check(body, num_bytes)

    if recall is None:
        return await in_turns_if_large(http, parse_and_check(), len(content))
    body = await in_turns_if_large(http, parse(), len(content))
    num_bytes = len(content) + await recall(body)
    return await in_turns_if_large(http, check_in_turn(body, num_bytes), num_bytes)
