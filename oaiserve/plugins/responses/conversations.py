"""Conversations that clients create, change and read with /v1/conversations, and name in requests for responses.

A conversation is stored like a response whose input is all items of the conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.errors import InvalidRequest, NotFound
from oaiserve.plugins.responses.body import MAX_ITEMS, ConversationBody, ItemsBody
from oaiserve.plugins.responses.items import Item, input_items, with_distinct_ids
from oaiserve.plugins.responses.output import item_id
from oaiserve.plugins.responses.state import state_of
from oaiserve.plugins.responses.store import (
    CONVERSATION,
    ConversationTooLarge,
    ResponseDatabase,
    StoredDecoder,
    StoredResponse,
    is_conversation,
)
from oaiserve.plugins.responses.stored import AFTER, LIMIT, ORDER, ItemPage, id_of, page, texts_of
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.door.middleware import json_response, lasting_id
from oaiserve.routes.intake.body_types import MetadataBody
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.parameters import check_metadata
from oaiserve.routes.intake.read import read_parsed
from oaiserve.routes.operation import Deleted, Operation
from oaiserve.routes.serving import serving_of

_EXAMPLE = {"items": [{"role": "user", "content": "What is the capital of France?"}]}


class ConversationObject(msgspec.Struct):
    """A conversation, without its items."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


_object_decoder = StoredDecoder(ConversationObject)


def no_conversation(name: str) -> str:
    return f"There is no conversation {show(name)}: it was deleted, or not used for too long."


def with_turn(
    conversation: StoredResponse, items: list[Item], unique_id: str, num_given: int
) -> tuple[StoredResponse, list[Item]]:
    """Return the conversation with the items of a response, `num_given` of which are input, and these items as the
    conversation has them.

    If another server that ended early has added the items of this response, they are replaced.
    """
    before, after = _around_turn(conversation, unique_id, num_given)
    distinct = _distinct(items, (before, after), unique_id)
    parts = [part for part in (before[1:-1], msgspec.json.encode(distinct)[1:-1], after[1:-1]) if part]
    return conversation._replace(input_items=b"[%b]" % b",".join(parts)), distinct


def _distinct(items: list[Item], others: Iterable[bytes], unique_id: str) -> list[Item]:
    """Return the items, with new ids for those with the id of one of the `others`, which are lists in JSON."""
    if all(unique_id in item["id"] for item in items):  # The server has given all of these ids.
        return items
    taken = {id_of(item) for texts in others for item in texts_of(texts)}
    numbers = itertools.count(1)
    return with_distinct_ids(items, lambda prefix: item_id(prefix, unique_id, f"n{next(numbers)}"), taken)


def before_turn(conversation: StoredResponse, unique_id: str, num_given: int) -> StoredResponse:
    """Return the conversation as it was before the items of a response were added, if they were."""
    return conversation._replace(input_items=_around_turn(conversation, unique_id, num_given)[0])


def _around_turn(conversation: StoredResponse, unique_id: str, num_given: int) -> tuple[bytes, bytes]:
    """Return the items before and after those of a response, as lists in JSON. They are recognised by the id that the
    server gives to output and to input without one."""
    whole = conversation.input_items
    if unique_id.encode() not in whole:  # nearly always true
        return whole, b"[]"
    items = texts_of(whole)
    positions: dict[int, str] = {}
    for number, item in enumerate(items):
        _, own_id, position = f"{id_of(item)}__".split("_")[:3]
        if own_id == unique_id:
            positions[number] = position
    if not positions:
        return whole, b"[]"
    output = next((number for number, position in positions.items() if position.isdecimal()), None)
    start = min(positions) if output is None else max(0, output - num_given)
    return msgspec.json.encode(items[:start]), msgspec.json.encode(items[max(positions) + 1 :])


async def change(
    store: ResponseDatabase, owner: str, name: str, edit: Callable[[StoredResponse], StoredResponse]
) -> StoredResponse | None:
    """Change a conversation without interference by others. Return it, or None if it does not exist. Raises
    InvalidRequest if it would not fit into the store: it stays as it is."""
    while (old := await store.get(owner, name)) is not None:
        new = await run_in_threadpool(edit, old)
        try:
            if await store.replace(owner, old, new):
                return new
        except ConversationTooLarge:
            advice = "It stays as it was. Delete some of its items, or begin a new one."
            raise _too_large(new, advice) from None
    return None


def _too_large(conversation: StoredResponse, advice: str) -> InvalidRequest:
    return InvalidRequest(
        f"The conversation would have {conversation.num_bytes} bytes, more than this server can store "
        f"(--response-store-bytes). {advice}",
        param="conversation",
    )


@Operation(
    summary="Begin a conversation.",
    group="Generation",
    body=ConversationBody,
    answer=ConversationObject,
    example=_EXAMPLE,
)
async def create(request: Request) -> Response:
    if not serving_of(request).config.of(StoreOptions).stores_responses:
        raise InvalidRequest("This server keeps no conversations: it runs with --response-store-number 0.")
    adaptations = Adaptations()
    body, _ = await read_parsed(request, ConversationBody, adaptations.note)
    items = _new_items(request, body.items, adaptations) if body.items else []
    now = serving_of(request).runtime.unix_ns() // 10**9
    conversation = ConversationObject(f"{CONVERSATION}{lasting_id(request)}", now, _checked(body.metadata))
    stored = StoredResponse(
        conversation.id, conversation.id, None, msgspec.json.encode(conversation), msgspec.json.encode(items)
    )
    try:
        await state_of(request).store.put(request.state.owner, stored)
    except ConversationTooLarge:
        raise _too_large(stored, "Begin it with fewer items.") from None
    return json_response(conversation, headers=adaptations.headers())


@Operation(summary="A conversation.", group="Generation", answer=ConversationObject, errors=(NotFound,))
async def retrieve(request: Request) -> Response:
    return Response((await _stored(request)).response, media_type="application/json")


@Operation(
    summary="Replace the metadata of a conversation.",
    group="Generation",
    body=MetadataBody,
    answer=ConversationObject,
    example={"metadata": {"topic": "capitals"}},
)
async def update(request: Request) -> Response:
    body, _ = await read_parsed(request, MetadataBody)
    metadata = _checked(body.metadata)

    def edit(old: StoredResponse) -> StoredResponse:
        conversation = _object_decoder.decode(old.response)
        return old._replace(response=msgspec.json.encode(msgspec.structs.replace(conversation, metadata=metadata)))

    return Response((await _changed(request, edit)).response, media_type="application/json")


@Operation(summary="Delete a conversation.", group="Generation", answer=Deleted, errors=(NotFound,))
async def delete(request: Request) -> Response:
    name = (await _stored(request)).id
    await state_of(request).store.delete(request.state.owner, name)
    return json_response(Deleted(name, "conversation.deleted"))


@Operation(
    summary="The items of a conversation.",
    group="Generation",
    answer=ItemPage,
    query=(ORDER, LIMIT, AFTER),
    errors=(NotFound,),
)
async def list_items(request: Request) -> Response:
    return await page(request, (await _stored(request)).input_items)


@Operation(
    summary="Add items to a conversation.", group="Generation", body=ItemsBody, answer=ItemPage, example=_EXAMPLE
)
async def add_items(request: Request) -> Response:
    adaptations = Adaptations()
    body, _ = await read_parsed(request, ItemsBody, adaptations.note)
    items = _new_items(request, body.items, adaptations)
    added = items
    most_bytes = serving_of(request).body_limit
    unique_id = lasting_id(request)

    def edit(old: StoredResponse) -> StoredResponse:
        nonlocal added
        new, added = with_turn(old, items, unique_id, 0)
        if new.num_bytes > most_bytes:
            raise invalid("items", f"the conversation would have more than {int(most_bytes)} bytes")
        return new

    await _changed(request, edit)
    page = ItemPage(added, added[0]["id"], added[-1]["id"], has_more=False)
    return json_response(page, headers=adaptations.headers())


@Operation(summary="An item of a conversation.", group="Generation", answer="application/json", errors=(NotFound,))
async def retrieve_item(request: Request) -> Response:
    content = (await _stored(request)).input_items

    def text() -> bytes:
        items = texts_of(content)
        return bytes(items[_place(request, items)])

    return Response(await run_in_threadpool(text), media_type="application/json")


@Operation(
    summary="Delete an item of a conversation.", group="Generation", answer=ConversationObject, errors=(NotFound,)
)
async def delete_item(request: Request) -> Response:
    def edit(old: StoredResponse) -> StoredResponse:
        items = texts_of(old.input_items)
        del items[_place(request, items)]
        return old._replace(input_items=msgspec.json.encode(items))

    return Response((await _changed(request, edit)).response, media_type="application/json")


def _checked(metadata: Mapping[str, str] | None) -> dict[str, str]:
    check_metadata(metadata or {})
    return dict(metadata or {})


def _new_items(request: Request, items: list[Item], adaptations: Adaptations) -> list[Item]:
    if len(items) > MAX_ITEMS:
        raise invalid("items", f"must be at most {MAX_ITEMS} at once, got {len(items)}")
    numbers = itertools.count(1)
    unique_id = lasting_id(request)
    return input_items(items, lambda prefix: item_id(prefix, unique_id, f"i{next(numbers)}"), {}, adaptations, "items")


def _place(request: Request, items: list[msgspec.Raw]) -> int:
    name = request.path_params["item_id"]
    for number, item in enumerate(items):
        if id_of(item) == name:
            return number
    raise NotFound(f"There is no item {show(name)} in this conversation.", param="item_id")


async def _stored(request: Request) -> StoredResponse:
    return await _changed(request, None)


async def _changed(request: Request, edit: Callable[[StoredResponse], StoredResponse] | None) -> StoredResponse:
    """Return the conversation of the path, after the change if there is one. Raises NotFound."""
    name = request.path_params["conversation_id"]
    owner = request.state.owner
    store = state_of(request).store
    changed: StoredResponse | None = None
    if is_conversation(name):
        changed = await (store.get(owner, name) if edit is None else change(store, owner, name, edit))
    if changed is None:
        raise NotFound(no_conversation(name), param="conversation_id")
    return changed
