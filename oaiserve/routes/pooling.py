"""The routes for vectors and scores have this in common: parameters, prompts, and how they are submitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.pooling import Pooling, Task
from oaiserve.engine.request import Pooled, Prompt, Request, SamplingParams, TextPrompt, Usage
from oaiserve.errors import InvalidRequest
from oaiserve.routes import protocol
from oaiserve.routes.bodies import MAX_INT64
from oaiserve.routes.body import read_body
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.invalid import invalid
from oaiserve.routes.objects import Integer, described
from oaiserve.routes.off_loop import in_turns_if_large
from oaiserve.routes.parameters import integer, traced_prompts
from oaiserve.routes.respond import Answer, WholeShape
from oaiserve.routes.serving import Serving, serving_of

MAX_TEXTS = 2048  # of one request: OpenAI's limit
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
encode = msgspec.json.Encoder().encode


class PoolingBody(msgspec.Struct, kw_only=True):
    """The parameters that all of these routes accept. None means that the client did not set it."""

    model: Annotated[str | None, described("Name of the model; the one that is served, if left out.")] = None
    # How many it may be at most depends on the model.
    truncate_prompt_tokens: Annotated[
        Integer | None, described("Cut texts to this many tokens; -1 to as many as there can be.", -1)
    ] = None
    priority: Annotated[
        Integer | None,
        described("Lower is earlier, under --policy priority.", -MAX_INT64 - 1, MAX_INT64),
    ] = None


Body = TypeVar("Body", bound=PoolingBody)


@dataclass(frozen=True, slots=True)
class PoolingHead:
    """The values that identify an answer."""

    id: str
    created: int  # Unix seconds
    model: str


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """A route makes this of its body."""

    prompts: tuple[Prompt, ...]
    shape: WholeShape
    params: dict[str, str | int | float | bool]  # for the record


async def prepare_pooled(
    http: HTTPRequest,
    decoder: msgspec.json.Decoder[Body],
    *,
    tasks: tuple[Task, ...],
    id_prefix: str,
    prepared: Callable[[Body, Serving, Pooling, PoolingHead], PreparedPrompts],
) -> Answer:
    """Read and check the request, and return the answer that is ready to be submitted to the engine.

    The last of `tasks` is the one that is advised to a client whose model is for another one. Raises an APIError.
    """
    serving = serving_of(http)
    exchange: Exchange = http.state.exchange
    content = await read_body(http, serving)

    def check() -> Generator[None, None, Answer]:
        body = yield from protocol.parse(decoder, content, serving.unknown_names)
        serving.check_model(body.model)
        serving.check_task(*tasks)
        pooling = serving.engine.pooling
        assert pooling is not None
        response_id = exchange.response_id = f"{id_prefix}{exchange.unique_id}"
        own = prepared(body, serving, pooling, PoolingHead(response_id, int(time.time()), serving.model_name))
        exchange.params = own.params | {"num_inputs": len(own.prompts)}
        exchange.prompt_text = traced_prompts(own.prompts, serving.trace_prompt_characters)
        request = Request(
            response_id,
            own.prompts,
            SamplingParams(max_tokens=0),
            priority=integer(body, "priority") or 0,
            client=exchange.client,
            num_bytes=len(content),
            received_ns=exchange.received_ns,
        )
        return Answer(serving, exchange, request, own.shape, stream=False)

    return await in_turns_if_large(http, check(), len(content))


def most_tokens(body: PoolingBody, serving: Serving) -> int | None:
    """Return the length to which texts are cut, or None if they are not. -1 asks for as many tokens as there can be."""
    limit = serving.engine.max_model_len
    given = integer(body, "truncate_prompt_tokens", -1, limit)
    if given == 0:
        raise invalid("truncate_prompt_tokens", f"must be -1, or from 1 to {limit}, got 0")
    return limit if given == -1 else given


def text_prompts(
    texts: Sequence[str], before: str, param: str, limit: int | None, special: bool = True
) -> tuple[Prompt, ...]:
    """Return a prompt for each text, with the text `before` in front of it."""
    return tuple(TextPrompt(before + text, special, param, limit) for text in texts)


def strings(value: str | list[str] | None, param: str) -> list[str]:
    """Return the texts of a field that is a string or a list of strings. Raises InvalidRequest."""
    if value is None:
        raise InvalidRequest(f"Missing required parameter: '{param}'.", param=param)
    texts = [value] if isinstance(value, str) else value
    check_number(texts, param)
    return texts


def check_number(inputs: Sequence[object], param: str) -> None:
    if not inputs:
        raise invalid(param, "must not be an empty list")
    if len(inputs) > MAX_TEXTS:
        raise invalid(param, f"must have at most {MAX_TEXTS} entries, got {len(inputs)}")


def values_of(pooled: Pooled, size: int | None = None) -> Vector:
    """Return the vector of a prompt, or its first numbers."""
    return np.frombuffer(pooled.vector, dtype=np.float32)[:size]


def unit(vector: Vector) -> Vector:
    """Return the vector at length 1. A vector of zeros stays as it is."""
    length = np.linalg.norm(vector)
    return vector / length if length else vector


class PoolingUsage(msgspec.Struct):
    """The texts have this many tokens."""

    prompt_tokens: int
    total_tokens: int


def parts(head: dict[str, Any], name: str, items: Iterator[bytes], usage: Usage) -> Iterator[bytes]:
    """Yield an answer in JSON while its items are rendered: its head, the list `name`, and its usage."""
    yield encode(head)[:-1] + b',"' + name.encode() + b'":'
    separator = b"["
    for item in items:
        yield separator + item
        separator = b","
    yield b'],"usage":' + encode(PoolingUsage(usage.prompt_tokens, usage.prompt_tokens)) + b"}"
