"""The input of a request of /v1/responses: the stored turns that it continues, its tools, and its prompt.

With `truncation: "auto"`, a conversation that is too long for the context loses its first items. This file makes no
answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from oaiserve.engine.request import ChatPrompt, Grammar, TooManyTokens
from oaiserve.errors import InvalidRequest, NotFound
from oaiserve.http.fair_turns import Work
from oaiserve.plugins.responses.body import InputBody, ResponsesBody
from oaiserve.plugins.responses.conversations import before_turn, no_conversation
from oaiserve.plugins.responses.items import (
    Item,
    chat_messages,
    input_items,
    references,
    since_compaction,
    stored_items,
)
from oaiserve.plugins.responses.offered import BRINGING_TOOLS, OfferedTools, offered_tools, with_arrived
from oaiserve.plugins.responses.output import item_id, response_ids
from oaiserve.plugins.responses.state import state_of
from oaiserve.plugins.responses.store import ConversationTooLarge, StoredDecoder, StoredResponse, is_conversation
from oaiserve.routes.adaptations import STORED, Adaptations
from oaiserve.routes.chat import constraints
from oaiserve.routes.chat.contents import ContentReader
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.chat.history import prompt_of
from oaiserve.routes.door.middleware import lasting_id
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.media import NAMED_IN, MediaReader, read_media
from oaiserve.routes.intake.parameters import integer
from oaiserve.routes.intake.read import Intake
from oaiserve.routes.serving import Serving, serving_of

MAX_REFERENCES = 128  # references to items of other responses
ROOM_TOKENS = 1024  # room for an answer without a limit, when a conversation is truncated


class _StoredOutput(msgspec.Struct):
    output: list[Item] = []  # missing in a conversation, which has only items


_stored_output = StoredDecoder(_StoredOutput)


class Earlier(NamedTuple):
    """The stored responses for a request of their owner: earlier turns, and responses whose items the request refers
    to."""

    owner: str
    turns: list[StoredResponse]
    referred: list[StoredResponse]

    @property
    def num_bytes(self) -> int:
        return sum(stored.num_bytes for stored in (*self.turns, *self.referred))


async def read_earlier(request: Request, body: InputBody) -> Earlier:
    """Read the stored responses: those before the response with the request's id. Raises InvalidRequest if they are
    missing, or too large together."""
    store = state_of(request).store
    owner = request.state.owner
    most_bytes = serving_of(request).body_limit
    turns: list[StoredResponse] = []
    if body.previous_response_id is not None:
        try:
            turns = await store.conversation(owner, body.previous_response_id, most_bytes)
        except ConversationTooLarge:
            raise invalid(
                "previous_response_id", f"the conversation up to there has more than {most_bytes} bytes"
            ) from None
        if turns and is_conversation(turns[-1].conversation_id):
            reason = f"is a turn of a conversation. Send 'conversation': {show(turns[-1].conversation_id)} instead"
            raise invalid("previous_response_id", reason)
        if not turns:
            raise InvalidRequest(
                f"The previous response {show(body.previous_response_id)} is not there, or one before it is not: it "
                "was not stored, was deleted, or was stored too long ago.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
    if body.conversation is not None:
        if turns:
            raise invalid("conversation", "must not be given together with 'previous_response_id'")
        if isinstance(body.conversation, str):
            name = body.conversation
        else:
            name = body.conversation.id
        stored = await store.get(owner, name) if is_conversation(name) else None
        if stored is None:
            raise NotFound(no_conversation(name), param="conversation")
        num_items = 1 if isinstance(body.input, str) else len(body.input or ())
        turns = [await run_in_threadpool(before_turn, stored, lasting_id(request), num_items)]
    ids = response_ids(references(body.input))
    if len(ids) > MAX_REFERENCES:
        raise invalid("input", f"may refer to items of at most {MAX_REFERENCES} responses, got {len(ids)}")
    referred = [stored for one in ids if (stored := await store.get(owner, one)) is not None]
    earlier = Earlier(owner, turns, referred)
    if earlier.num_bytes > most_bytes:
        raise invalid("input", f"the conversation with the items that it refers to has more than {most_bytes} bytes")
    return earlier


def items_of(turns: Iterable[StoredResponse]) -> Iterable[Item]:
    for turn in turns:
        yield from stored_items.decode(turn.input_items)
        yield from _stored_output.decode(turn.response).output


async def earlier_media(
    request: Request, body: InputBody, earlier: Earlier, num_bytes: int, known: MediaReader | None = None
) -> MediaReader:
    """Return the reader of the media of a request and of the turns that it continues. Raises the errors of
    `read_media`."""

    def stored() -> Iterable[Item]:
        for turn in (*earlier.turns, *earlier.referred):
            if any(f'"{kind}"'.encode() in turn.input_items for kind in NAMED_IN):
                yield from stored_items.decode(turn.input_items)

    return await read_media(request, body, num_bytes + earlier.num_bytes, stored, known)


async def read_all_earlier(http: Request, intake: Intake[Any]) -> Earlier:
    """Read the stored responses for a request, and the media of both."""
    earlier = await read_earlier(http, intake.body)
    intake.media = await earlier_media(http, intake.body, earlier, intake.num_bytes, intake.media)
    intake.num_bytes += earlier.num_bytes
    return earlier


def conversed(
    body: InputBody, serving: Serving, earlier: Earlier, adaptations: Adaptations, *, is_constrained: bool
) -> tuple[OfferedTools, Conversation]:
    """Return the tools and the reasoning of a request. `is_constrained` says whether it has a `text.format`."""
    offered = offered_tools(with_arrived(body, _bringing_tools(body, earlier)), adaptations)
    conversation = Conversation(
        serving.dialect,
        offered.tools,
        body.chat_template_kwargs or {},
        effort=None if body.reasoning is None else body.reasoning.effort,  # No summary is ever made.
        thinking_budget=integer(body, "thinking_token_budget") if isinstance(body, ResponsesBody) else None,
        is_constrained=is_constrained or text_format(body) is not None,
    )
    return offered, conversation


def _bringing_tools(body: InputBody, earlier: Earlier) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the items that bring tools into the conversation, each with its place."""
    stored = [
        (f"{STORED}{item['id']}", item)
        for turn in earlier.turns
        if any(f'"{kind}"'.encode() in turn.input_items for kind in BRINGING_TOOLS)
        for item in stored_items.decode(turn.input_items)
    ]
    given = body.input if isinstance(body.input, list) else []
    sent = [(f"input[{number}]", item) for number, item in enumerate(given)]
    return [(where, item) for where, item in (*stored, *sent) if item.get("type") in BRINGING_TOOLS]


def text_format(body: InputBody) -> Grammar | None:
    if body.text is None or body.text.format is None:
        return None
    return constraints.text_format(body.text.format)


class RequestInput:
    """The items before the input and those of the input, with their prompt. Items without an id get one of the response
    with `unique_id`."""

    def __init__(
        self,
        body: InputBody,
        serving: Serving,
        conversation: Conversation,
        earlier: Earlier,
        media: MediaReader,
        adaptations: Adaptations,
        unique_id: str,
        *,
        needs_input: bool = True,
    ) -> None:
        self._body = body
        self._serving = serving
        self._conversation = conversation
        self._media = media
        self.earlier = since_compaction(list(items_of(earlier.turns)))
        self.items: list[Item] = []
        if needs_input or body.input or not self.earlier:
            numbers = itertools.count(1)
            known = {
                item["id"]: item
                for item in (*self.earlier, *items_of(earlier.referred))
                if item["type"] != "item_reference"  # That reference led to an item that was missing then, too.
            }
            self.items = input_items(
                body.input, lambda prefix: item_id(prefix, unique_id, f"i{next(numbers)}"), known, adaptations
            )
        serving.check_messages("input", len(self.earlier) + len(self.items))
        self.prompt = self._prompt(self.earlier, self.items, adaptations)

    def _prompt(self, earlier: Sequence[Item], items: Sequence[Item], adaptations: Adaptations) -> ChatPrompt:
        messages = chat_messages(earlier, items, ContentReader(self._media, adaptations.note, "input"), adaptations)
        if self._body.instructions is not None:
            messages.insert(0, ("instructions", {"role": "system", "content": self._body.instructions}))
        if not messages and items:
            raise invalid("input", "must hold at least one item that the model can read")
        tools = self._conversation.shown_tools
        prompt = prompt_of(messages, tools, self._serving.dialect, self._media, adaptations.note, param="input")
        return self._conversation.completed(prompt)

    def truncated(self, max_tokens: int | None, *, keeps_room: bool) -> Work[tuple[ChatPrompt, int]]:
        """Return a prompt with room for an answer, and the number of first items that it lacks, which is as small as
        possible.

        Without `keeps_room`, a whole conversation may leave room for only a single token.
        """
        limit = self._serving.engine.max_model_len
        room = min(max_tokens or ROOM_TOKENS, limit // 4)
        shortest = (self.prompt, 0)
        if (yield from self._fits(self.prompt, limit - (room if keeps_room else 1))):
            return shortest
        items = [*self.earlier, *self.items]
        cuts = _cuts(items)
        low = 0
        high = len(cuts)
        # The first tries keep one turn, two, four and so on, because trying half of a very long conversation takes
        # long.
        step = 1
        while low < high:
            middle = (low + high) // 2 if low else max(0, len(cuts) - step)
            staying = [*filter(_stays, items[: cuts[middle]]), *items[cuts[middle] :]]
            shorter = (self._prompt(staying, (), Adaptations()), len(items) - len(staying))
            if (yield from self._fits(shorter[0], limit - room)):
                high = middle
                shortest = shorter
            else:
                low = middle + 1
                if low == len(cuts):
                    shortest = max(shortest, shorter, key=lambda each: each[1])
            step *= 2
        return shortest

    def _fits(self, prompt: ChatPrompt, most_tokens: int) -> Work[bool]:
        try:
            yield from self._serving.engine.encode(prompt, most_tokens)
        except TooManyTokens:
            return False
        return True


def _stays(item: Item) -> bool:
    return item["type"] == "message" and item["role"] in ("system", "developer")


def _cuts(items: Sequence[Item]) -> list[int]:
    """Return the indices at which a conversation may be cut: before users' messages or, if there are none after them,
    before other items, but never between a call and its output."""
    called: dict[str, int] = {}
    # For each item, the change in the number of pairs of a call and its output around it.
    spans = [0] * (len(items) + 1)
    last_user = 0
    for number, item in enumerate(items):
        if item["type"] == "message":
            called.update((str(call["id"]), number) for call in item.get("tool_calls", ()))
        if item["type"].endswith("_call"):
            called[item.get("call_id") or item["id"]] = number
        elif item["type"].endswith("_call_output"):
            spans[called.get(item.get("call_id") or item["id"], number) + 1] += 1
            spans[number + 1] -= 1
        elif item["type"] == "message" and item["role"] == "user":
            last_user = number
    return [
        number
        for number, (item, around) in enumerate(zip(items, itertools.accumulate(spans), strict=False))
        if number and not around and (number > last_user or item.get("role") == "user")
    ]
