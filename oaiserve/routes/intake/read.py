"""`read`: what all routes of the engine do with a request before they look at their own parameters.

The body is received and its codings are undone (receive.py). Then it is decoded and its types and names are checked
(decode.py), and the media that it only names are fetched (media.py). The result is an `Intake`, from which the route
makes its answer. The event loop does all this for a small body, and the tokenize stage, in turns, for a large one.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import GapPrompt, PooledAs, Prompt, Request, SamplingParams
from oaiserve.engine.types.pooling import Task
from oaiserve.errors import InvalidRequest
from oaiserve.facts.record import Origin
from oaiserve.http.fair_turns import Work
from oaiserve.routes.adaptations import Note
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.intake import parameters
from oaiserve.routes.intake.bodies import Bodies
from oaiserve.routes.intake.body_types import MAX_CHOICES_PER_REQUEST, MAX_DEADLINE_MS, SamplingBody
from oaiserve.routes.intake.decode import parse
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.media import MediaReader, named_media
from oaiserve.routes.intake.outlines import outline_of
from oaiserve.routes.intake.parameters import Wanted, integer
from oaiserve.routes.intake.receive import HeldBytes, check_type, read_body, read_into
from oaiserve.routes.intake.turns import in_turns_if_large
from oaiserve.routes.prompt_reuse import session_in
from oaiserve.routes.sampling_defaults import NEUTRAL
from oaiserve.routes.serving import Serving, serving_of
from oaiserve.wire.continuation import SENT_HEADER, Piece, take_sent

Body = TypeVar("Body", bound=msgspec.Struct)
OwnBody = TypeVar("OwnBody", bound=msgspec.Struct, covariant=True)
OtherBody = TypeVar("OtherBody", bound=msgspec.Struct)
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Head:
    """The values that identify an answer. Every JSON object of the answer repeats them."""

    id: str
    created: int  # Unix seconds
    model: str
    system_fingerprint: str

    @property
    def unique_id(self) -> str:
        """The id without its prefix. Behind a gateway, all servers of a request use the same one."""
        return self.id.rpartition("_")[2]


class Intake(Generic[OwnBody]):
    """A request with its parsed body, and its server.

    Facts are noted in the exchange as soon as possible, so that the record of a refused request has them, too. Large
    bodies are checked in a worker thread, so no method may use the event loop.
    """

    def __init__(
        self,
        serving: Serving,
        exchange: Exchange,
        content: bytes | bytearray,
        body: OwnBody,
        model: str,
        id_prefix: str,
        sent: tuple[Piece, ...] = (),
    ) -> None:
        self.serving = serving
        self.exchange = exchange
        self.body = body
        self.num_bytes = len(content)  # bytes of the body, and of stored responses that the request continues
        self.media = MediaReader(serving, exchange.adaptations.note)
        if exchange.ids is None:
            unique_id = exchange.unique_id
            created = serving.runtime.unix_ns() // 10**9
        else:
            unique_id, created = exchange.ids[:2]
        fingerprint = f"oaiserve-{serving.version}"
        self.head = Head(f"{id_prefix}{unique_id}", created, model, fingerprint)
        self._content = content
        self._sent = sent

    @property
    def content(self) -> bytes | bytearray:
        """The body as the client sent it, without its codings."""
        return self._content

    def with_body(self, body: OtherBody) -> Intake[OtherBody]:
        other = cast("Intake[OtherBody]", copy(self))
        other.body = body
        return other

    def checked(self: Intake[SamplingBody], own: SamplingParams) -> tuple[SamplingParams, Wanted]:
        """Check the common parameters of all generation routes, and join them with the route's own.

        Return the parameters for the engine, and the optional parts of the answer. With `own.n`, the engine makes that
        number of candidates for each prompt, and the client gets the best.
        """
        note = self.exchange.adaptations.note
        params = parameters.sampling_params(self.body, own, self.serving.sampling.of_request(self.body), note)
        recorded = parameters.recorded_params(self.body, params)
        wanted = parameters.wanted(self.body, params)
        if own.n > params.n:
            recorded["best_of"] = own.n
            # The candidates are ranked by log-probability, so the engine must return these.
            params = replace(params, n=own.n, logprobs=own.logprobs or 0)
        self.exchange.params = recorded
        self.exchange.stop_sequences = params.stop
        self.exchange.sampling = {name: getattr(params, name) for name in NEUTRAL}
        return params, wanted

    def request(self: Intake[SamplingBody], prompts: tuple[Prompt, ...], params: SamplingParams) -> Request:
        """Return the request to generate text after each prompt. Raises InvalidRequest for too many choices."""
        if len(prompts) * params.n > MAX_CHOICES_PER_REQUEST:
            limit = MAX_CHOICES_PER_REQUEST
            if params.n == (integer(self.body, "n") or 1):
                name = "n"
            else:
                name = "best_of"
            raise invalid("prompt", f"prompts times {name} must be <= {limit}, got {len(prompts)} times {params.n}")
        if params.seed is None and self.exchange.ids is not None:
            params = replace(params, seed=self.exchange.ids.seed)
        is_streaming = self.exchange.is_streaming
        interval = integer(self.body, "stream_interval") or self.serving.config.server.stream_interval
        # Stored responses that a request continues are not in its body, and routers know only bodies.
        is_all = self.num_bytes == len(self._content)
        is_known = is_all and len(prompts) == 1 and not isinstance(prompts[0], GapPrompt)
        return self._request(
            prompts,
            params,
            priority=self._priority(),
            cache_salt=self._cache_salt(),
            stream_interval=interval if is_streaming else 0,
            reports_progress=is_streaming and self.serving.config.server.progress_after_seconds > 0,
            sent=self._sent,
            routing=self.serving.engine.routing_of(self._content) if is_known else None,
        )

    def _cache_salt(self: Intake[SamplingBody]) -> str:
        """Return the salt of the prefix cache, so that the speed of an answer reveals nothing about another key's
        requests."""
        salt = parameters.cache_salt(self.body)
        owner = self.exchange.owner
        if owner and not self.serving.config.shares_prefix_cache:
            return f"{owner} {salt}"
        return salt

    def pooling_request(self, prompts: tuple[Prompt, ...], pooled_as: PooledAs) -> Request:
        """Return the request to pool each prompt into a vector, or into another result that the model computes."""
        return self._request(prompts, SamplingParams(max_tokens=0, pooled_as=pooled_as), priority=self._priority())

    def _priority(self) -> int:
        priority = integer(self.body, "priority")
        use = self.exchange.use
        if use is None:
            return priority or 0
        return use.key.priority_for(priority)

    def _request(self, prompts: tuple[Prompt, ...], params: SamplingParams, **more: Any) -> Request:
        exchange = self.exchange
        exchange.response_id = self.head.id
        exchange.prompt_reuse.name_run(exchange.conversation_id or session_in(getattr(self.body, "metadata", None)))
        # If the ids are a gateway's, the engine may still have another part of the request.
        if exchange.ids is None:
            own_id = self.head.id
        else:
            own_id = f"{self.head.id}-{exchange.unique_id}"
        exchange.engine_id = own_id
        adapter = exchange.adapter
        received_ns = exchange.received_ns or exchange.clock_ns()
        came = (exchange.request_id, exchange.operation, exchange.http_route, self.head.model)
        request = Request(
            own_id,
            prompts,
            params,
            adapter=0 if adapter is None else adapter.number,
            origin=Origin(*came, None if adapter is None else adapter.name, exchange.key_name),
            client=f"{exchange.client} in the background" if exchange.is_background else exchange.client,
            share=1.0 if exchange.use is None else exchange.use.key.share,
            is_background=exchange.is_background,
            background_wait_ns=exchange.background_wait_ns,
            num_bytes=self.num_bytes + self.media.num_bytes,
            received_ns=received_ns,
            session=exchange.prompt_reuse.run.id,
            deadline_ns=exchange.deadline_ns and received_ns + exchange.deadline_ns,
            first_token_deadline_ns=exchange.ttft_deadline_ns and received_ns + exchange.ttft_deadline_ns,
            **more,
        )
        exchange.prompt_reuse.outlines = [outline_of(request, prompt) for prompt in prompts]
        return request


async def read(
    http: HTTPRequest,
    kind: type[Body],
    answer: Callable[[Intake[Body]], Made],
    *,
    id_prefix: str,
    tasks: tuple[Task, ...] = ("generate",),
    check_given: Callable[[Mapping[str, msgspec.Raw]], None] | None = None,
    tokenizes: Callable[[Body], bool] | None = None,
) -> Made:
    """Read a request with a body of this kind, and return the route's `answer` to it. Raises an APIError.

    If the model is for another task, the error recommends a model for the last of `tasks`. `tokenizes` returns whether
    `answer` needs the tokenizer for a body.
    """
    serving = serving_of(http)
    exchange: Exchange = http.state.exchange
    content = await read_body(http, serving)
    sent: tuple[Piece, ...] = ()
    if exchange.ids is not None:
        sent, exchange.num_signs = take_sent(content, http.headers.get(SENT_HEADER, ""))

    def taken() -> Work[Intake[Body]]:
        body = yield from parse(kind, content, check_given, exchange.adaptations.note)
        serving.check_body(body)
        exchange.is_streaming = bool(getattr(body, "stream", None))  # Vectors and scores are never streamed.
        exchange.requested_model = model = getattr(body, "model", None)
        exchange.adapter = serving.check_model(model)
        names = serving.accepted_names_of(exchange.adapter)
        if exchange.use is not None:
            exchange.use.key.check_model(*names)
        serving.check_task(*tasks)
        exchange.deadline_ns = _deadline_ns(http.headers, body, "deadline_ms")
        if not sent:  # A continued stream has had its first token.
            exchange.ttft_deadline_ns = _deadline_ns(http.headers, body, "ttft_deadline_ms")
        intake = Intake(serving, exchange, content, body, names[0], id_prefix, sent)
        if serving.engine.media:
            intake.media.named = yield from named_media(body)
        return intake

    def answered(intake: Intake[Body] | None = None) -> Work[Made]:
        return answer((yield from taken()) if intake is None else intake)

    names_files = b'"file_id"' in content
    if serving.engine.media or tokenizes is not None or names_files:
        intake = await in_turns_if_large(http, taken(), len(content))
        if intake.media.named or names_files:
            with HeldBytes(serving.received_bytes, http.state.client) as held:
                await intake.media.fetch(http, held, intake.body if names_files else None)
        needs_tokenizer = tokenizes is not None and tokenizes(intake.body)
        num_bytes = intake.num_bytes + intake.media.num_bytes  # Fetched media are hashed, too.
        return await in_turns_if_large(http, answered(intake), num_bytes, always=needs_tokenizer)
    return await in_turns_if_large(http, answered(), len(content))


def _deadline_ns(headers: Mapping[str, str], body: msgspec.Struct, name: str) -> int | None:
    """Return the nanoseconds from the receipt of a request to one of its deadlines, by the name of its field.

    If both the header and the body set it, the earlier one counts, so that a proxy can shorten it. Raises
    InvalidRequest.
    """
    header = f"x-{name.replace('_', '-')}"
    text = headers.get(header)
    deadlines = [] if text is None else [_milliseconds(header, text)]
    if hasattr(body, name) and (in_body := integer(body, name)) is not None:
        deadlines.append(in_body)
    if deadlines:
        return min(deadlines) * 1_000_000
    return None


def _milliseconds(header: str, text: str) -> int:
    if len(text) < 10 and text.isascii() and text.isdigit():
        number = int(text)
    else:
        number = 0
    if not 1 <= number <= MAX_DEADLINE_MS:
        limits = f"must be an integer of milliseconds from 1 to {MAX_DEADLINE_MS}"
        raise InvalidRequest(f"Invalid header '{header}': {limits}, got {show(text)}.", param=header)
    return number


async def read_parsed(
    request: HTTPRequest,
    kind: type[Body],
    note: Note | None = None,
    check_given: Callable[[Mapping[str, msgspec.Raw]], None] | None = None,
) -> tuple[Body, int]:
    """Read and parse the body of a request that is not for the engine, and return it with its number of bytes. Raises
    the errors of `parse`."""
    serving = serving_of(request)
    content = await read_body(request, serving)
    body = await in_turns_if_large(request, parse(kind, content, check_given, note), len(content))
    serving.check_body(body)
    return body, len(content)


async def read_without_engine(request: HTTPRequest, bodies: Bodies, kind: type[Body], note: Note | None = None) -> Body:
    """Read and parse a body as `read_parsed` does, without an engine."""
    body = bytearray()
    state = request.state
    with HeldBytes(bodies.received, state.client) as held:
        await read_into(body, request, held, bodies.limit_bytes)
        check_type(request, "application/json")
        work = parse(kind, body.removeprefix(BOM_UTF8), note=note)
        return await bodies.read(work, client=state.client, num_bytes=len(body), cpu=state.cpu)
