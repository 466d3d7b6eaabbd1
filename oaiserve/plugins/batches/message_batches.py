"""/v1/messages/batches: batches in the form of Anthropic's API, in the same store and by the same runner as those of
OpenAI's. Their lines are answered by /v1/messages, if the server has that route."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import IO, Annotated, Any, Literal

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from oaiserve.errors import ANTHROPIC_PATH, InvalidRequest, NotFound
from oaiserve.plugins.batches.anthropic_form import AFTER_ID, BEFORE_ID, BETA, LIMIT, read_page, rfc3339
from oaiserve.plugins.batches.objects import (
    MOST_ID_CHARACTERS,
    MOST_LINES,
    WINDOW_SECONDS,
    BatchObject,
    Counts,
    Line,
    LineReader,
)
from oaiserve.plugins.batches.state import runner_of
from oaiserve.plugins.batches.store import MESSAGE_BATCHES, Owned
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.door.middleware import json_response, lasting_id
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.object_types import described
from oaiserve.routes.intake.read import read_without_engine
from oaiserve.routes.operation import Operation, read_query

PATH = f"{ANTHROPIC_PATH}/batches"
MOST_FRAME_BYTES = 2**13  # bytes of a stored line in addition to its request: the route and the longest custom_id
_OF_PROXIES = {"forwarded", "via", "x-real-ip"}


class MessageRequest(msgspec.Struct):
    """A request of a batch."""

    custom_id: Annotated[str, described(f"Another one for each, of at most {MOST_ID_CHARACTERS} characters.")]
    params: Annotated[msgspec.Raw, described("A body for /v1/messages, without `stream`.", type="object")]


class MessageBatchBody(msgspec.Struct):
    """A new batch of messages."""

    requests: Annotated[list[MessageRequest], described("The requests.", minItems=1, maxItems=MOST_LINES)]


class MessageCounts(msgspec.Struct):
    """The number of requests in each state."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct, kw_only=True):
    """A batch of messages. Behind a proxy, `results_url` is a path on this server."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None = None
    results_url: str | None


class MessageBatchPage(msgspec.Struct):
    """Batches of messages, newest first."""

    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedMessageBatch(msgspec.Struct):
    """The batch was deleted."""

    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


@Operation(
    summary="Begin a batch of messages.",
    group="Batches",
    body=MessageBatchBody,
    answer=MessageBatch,
    example={
        "requests": [
            {
                "custom_id": "a",
                "params": {
                    "model": "demo",
                    "max_tokens": 64,
                    "messages": [{"role": "user", "content": "Good morning"}],
                },
            }
        ]
    },
)
async def create(request: Request) -> Response:
    runner = runner_of(request)
    bodies = runner.backend.bodies
    now = runner.backend.runtime.unix_ns() // 10**9
    adaptations = Adaptations()
    body = await read_without_engine(request, bodies, MessageBatchBody, adaptations.note)
    batch = BatchObject(
        id=f"{MESSAGE_BATCHES}{lasting_id(request)}",
        endpoint=ANTHROPIC_PATH,
        input_file_id="",
        created_at=now,
        expires_at=now + WINDOW_SECONDS,
        in_progress_at=now,
    )
    if any("surrogate" in note for note in adaptations.notes):
        # An id must come back as it was sent.
        for number, each in enumerate(body.requests):
            if "\N{REPLACEMENT CHARACTER}" in each.custom_id:
                raise invalid("requests", "has half of a surrogate pair", f"requests[{number}].custom_id")
    async with runner.readers:
        with runner.store.new_content() as content:
            reader = LineReader(ANTHROPIC_PATH, bodies.limit_bytes + MOST_FRAME_BYTES)
            lines = await run_in_threadpool(_write, body.requests, reader, content)
            batch.request_counts = Counts(len(lines))
            await runner.store.add_batch(Owned(batch, request.state.owner), lines, content)
            await run_in_threadpool(content.close)  # This takes milliseconds for a large file.
    runner.added()
    return json_response(_shown(request, batch), headers=adaptations.headers())


@Operation(
    summary="The batches of messages.",
    group="Batches",
    answer=MessageBatchPage,
    query=(LIMIT, AFTER_ID, BEFORE_ID, BETA),
)
async def list_batches(request: Request) -> Response:
    query = read_query(request.query_params, (LIMIT, AFTER_ID, BEFORE_ID, BETA))
    newest = partial(runner_of(request).store.message_batches, request.state.owner)
    found, has_more = await read_page(query, newest, "batch")
    batches = [_shown(request, batch) for batch in found]
    first, last = (batches[0].id, batches[-1].id) if batches else (None, None)
    return json_response(MessageBatchPage(batches, first, last, has_more))


@Operation(summary="A batch of messages.", group="Batches", answer=MessageBatch, errors=(NotFound,))
async def retrieve(request: Request) -> Response:
    return json_response(_shown(request, await _batch(request)))


@Operation(summary="Cancel a batch of messages.", group="Batches", answer=MessageBatch, errors=(NotFound,))
async def cancel(request: Request) -> Response:
    """Answer with the ended batch, which keeps the answers up to now."""
    await runner_of(request).cancel(Owned(await _batch(request), request.state.owner))
    return json_response(_shown(request, await _batch(request)))


@Operation(
    summary="Delete a batch of messages that has ended.",
    group="Batches",
    answer=DeletedMessageBatch,
    errors=(NotFound,),
)
async def delete(request: Request) -> Response:
    batch = await _batch(request)
    if not await runner_of(request).store.delete_batch(request.state.owner, batch.id):
        raise InvalidRequest("The batch is being processed. Cancel it, or wait for its end, before you delete it.")
    return json_response(DeletedMessageBatch(batch.id))


@Operation(
    summary="The answers of a batch of messages, once it has ended.",
    group="Batches",
    answer="application/jsonl",
    errors=(NotFound,),
)
async def results(request: Request) -> Response:
    batch = await _batch(request)
    if batch.ended_at is None:
        raise InvalidRequest("The batch is being processed. Its results are there once it has ended.")
    return StreamingResponse(runner_of(request).store.message_results(batch.id), media_type="application/jsonl")


def routes() -> list[Route]:
    return [
        Route(PATH, create, methods=["POST"]),
        Route(PATH, list_batches, methods=["GET"]),
        Route(f"{PATH}/{{batch_id}}", retrieve, methods=["GET"]),
        Route(f"{PATH}/{{batch_id}}", delete, methods=["DELETE"]),
        Route(f"{PATH}/{{batch_id}}/cancel", cancel, methods=["POST"]),
        Route(f"{PATH}/{{batch_id}}/results", results, methods=["GET"]),
    ]


def _write(requests: Sequence[MessageRequest], reader: LineReader, content: IO[bytes]) -> list[Line]:
    """Write the requests as lines of a batch's file, and return these lines. Raises InvalidRequest."""
    if not requests:
        raise invalid("requests", "must not be an empty list")
    for each in requests:
        # Outside of its strings, JSON may have line ends.
        params = bytes(each.params).replace(b"\n", b" ").replace(b"\r", b" ")
        frame = msgspec.json.encode({"custom_id": each.custom_id, "url": ANTHROPIC_PATH})
        line = b'%b,"body":%b}\n' % (frame[:-1], params)
        content.write(line)
        reader.feed(line)
        if reader.is_done:
            break
    lines, errors = reader.end()
    if errors:
        raise InvalidRequest(f"requests[{errors[0].line - 1}] is not valid: {errors[0].message}", param="requests")
    return lines


async def _batch(request: Request) -> BatchObject:
    batch_id = request.path_params["batch_id"]
    batch = await runner_of(request).store.batch(request.state.owner, batch_id)
    if batch is None or not batch.is_of_messages:
        raise NotFound(f"There is no batch {show(batch_id)}.", param="batch_id")
    return batch


def _shown(request: Request, batch: BatchObject) -> MessageBatch:
    counts = batch.request_counts
    rest = counts.total - counts.completed - counts.failed
    has_ended = batch.ended_at is not None
    return MessageBatch(
        id=batch.id,
        processing_status="ended" if has_ended else "in_progress",
        request_counts=MessageCounts(
            processing=0 if has_ended else rest,
            succeeded=counts.completed,
            errored=counts.failed,
            canceled=rest if batch.status == "cancelled" else 0,
            expired=rest if batch.status == "expired" else 0,
        ),
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at),
        ended_at=_time(batch.ended_at),
        cancel_initiated_at=_time(batch.cancelling_at),
        results_url=f"{_origin(request)}{PATH}/{batch.id}/results" if has_ended else None,
    )


def _origin(request: Request) -> str:
    """Return the scheme and host that the client uses for this server, or "" behind a proxy, which may have others."""
    headers = request.headers
    if "host" not in headers or any(name in _OF_PROXIES or name.startswith("x-forwarded-") for name in headers):
        return ""
    return f"{request.scope['scheme']}://{headers['host']}"


def _time(seconds: int | None) -> Any:
    return None if seconds is None else rfc3339(seconds)
