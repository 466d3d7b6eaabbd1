"""The routes of stored responses: reading and deleting them, and listing their input.

They make no records.
"""

from __future__ import annotations

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.errors import InvalidRequest, NotFound
from oaiserve.plugins.responses.background import EventStream
from oaiserve.plugins.responses.items import Item
from oaiserve.plugins.responses.output import ResponseEvent, ResponseObject
from oaiserve.plugins.responses.resumption import ended, follow
from oaiserve.plugins.responses.runs import Run
from oaiserve.plugins.responses.state import state_of
from oaiserve.plugins.responses.store import StoredDecoder, StoredResponse, is_conversation
from oaiserve.routes.answer.paging import Page, page_of
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.operation import Deleted, Operation, Parameter

MAX_LISTED = 100  # OpenAI's limit and default
LISTED = 20
ORDER = Parameter("order", "asc has the first item first. Default: desc.", allowed=("asc", "desc"))
LIMIT = Parameter("limit", f"How many items. Default: {LISTED}.", is_integer=True, most=MAX_LISTED)
AFTER = Parameter("after", "The id of the item behind which to begin.")


STREAM = Parameter("stream", "true: the events of a response that is made in the background, those to come included.")
STARTING_AFTER = Parameter("starting_after", "The number of the event behind which to begin.", is_integer=True, least=0)


class _Made(msgspec.Struct):
    background: bool = False


_made = StoredDecoder(_Made)


class ItemPage(Page[Item]):
    """A page of items."""


class _Identified(msgspec.Struct):
    id: str


# A list is read as texts, and only those of one page are decoded: a million items would fill the memory.
_texts = StoredDecoder(list[msgspec.Raw])
_identified = StoredDecoder(_Identified)


def id_of(text: msgspec.Raw) -> str:
    return _identified.decode(text).id


def texts_of(content: bytes) -> list[msgspec.Raw]:
    return _texts.decode(content)


@Operation(
    summary="A stored response, or one that is made in the background.",
    group="Generation",
    answer=ResponseObject,
    event=ResponseEvent,
    query=(STREAM, STARTING_AFTER),
    errors=(NotFound,),
)
async def retrieve(request: Request) -> Response:
    stored = await _stored(request)
    if request.query_params.get(STREAM.name, "").lower() not in ("true", "1"):
        return Response(stored.response, media_type="application/json")
    state = state_of(request)
    owner = request.state.owner
    if _run(request) is None:
        if await state.background.is_made_elsewhere(owner, stored.id):
            reason = "another server of this store makes it, and has its events"
            raise NotFound(f"There is no stream of {show(stored.id)} here: {reason}.", param="response_id")
        if not await state.background.is_open(owner, stored.id):
            raise invalid(STREAM.name, "the events of this response are not kept. Read it without 'stream'")
    after = request.query_params.get(STARTING_AFTER.name)
    return EventStream(follow(state, owner, stored.id, -1 if after is None else STARTING_AFTER.value(after)))


@Operation(summary="Delete a stored response.", group="Generation", answer=Deleted, errors=(NotFound,))
async def delete(request: Request) -> Response:
    response_id = (await _stored(request)).id
    state = state_of(request)
    if (run := _run(request)) is not None:
        await run.cancel()
        state.runs.remove(run)
    await state.background.delete(request.state.owner, response_id)
    await state.store.delete(request.state.owner, response_id)
    return json_response(Deleted(response_id, "response"))


@Operation(
    summary="The input of a stored response.",
    group="Generation",
    answer=ItemPage,
    query=(ORDER, LIMIT, AFTER),
    errors=(NotFound,),
)
async def list_input_items(request: Request) -> Response:
    """Answer with the input of the response, newest first, without the input of earlier responses."""
    return await page(request, (await _stored(request)).input_items)


@Operation(
    summary="Cancel a response that is made in the background.",
    group="Generation",
    answer=ResponseObject,
    errors=(NotFound,),
)
async def cancel(request: Request) -> Response:
    stored = await _stored(request)
    if (run := _run(request)) is not None:
        await run.cancel()
        stored = await _stored(request)
    elif await state_of(request).background.is_open(request.state.owner, stored.id):
        cancelled = ended(stored.response, "cancelled")
        await state_of(request).background.end(request.state.owner, stored.id, cancelled)
        stored = await _stored(request)
    elif not _made.decode(stored.response).background:
        raise InvalidRequest("Only a response that is made in the background can be cancelled.")
    return Response(stored.response, media_type="application/json")


async def page(request: Request, content: bytes) -> Response:
    query = request.query_params
    order = ORDER.value(query.get(ORDER.name, "desc"))
    limit = LIMIT.value(query.get(LIMIT.name, f"{LISTED}"))
    shown = await run_in_threadpool(_page, content, order, limit, query.get(AFTER.name))
    return Response(shown, media_type="application/json")


def _page(content: bytes, order: str, limit: int, after: str | None) -> bytes:
    items = texts_of(content)
    if order == "desc":
        items.reverse()
    return msgspec.json.encode(page_of(ItemPage, items, id_of, limit, after, "item "))


def _run(request: Request) -> Run | None:
    return state_of(request).runs.get(request.state.owner, request.path_params["response_id"])


async def _stored(request: Request) -> StoredResponse:
    if (run := _run(request)) is not None and run.state is not None:
        return run.state
    response_id = request.path_params["response_id"]
    state = state_of(request)
    stored = await state.background.get(request.state.owner, response_id)
    if stored is None:
        stored = await state.store.get(request.state.owner, response_id)
    if stored is None or is_conversation(response_id):
        reason = "it was not stored, was deleted, or was stored too long ago"
        raise NotFound(f"There is no response {show(response_id)}: {reason}.", param="response_id")
    return stored
