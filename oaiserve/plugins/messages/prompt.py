"""The prompt of a request of /v1/messages: its turns and tools in the form of chat.

A history may have begun on another server, or may lack some of its turns. So blocks that are wrong by Anthropic's own
types are refused only in the user's last turn, and unreadable ones are left out with a note. This file knows nothing of
HTTP. Each refusal is an `InvalidRequest` that names the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from oaiserve.engine.request import ChatPrompt
from oaiserve.errors import InvalidRequest
from oaiserve.plugins.messages.body import (
    Block,
    CountTokensBody,
    MessagesBody,
    MessagesTool,
    SystemText,
    ThinkingOptions,
    ToolResultBlock,
    Turn,
)
from oaiserve.routes.adaptations import Note
from oaiserve.routes.chat.contents import ONE_PART, WITHOUT_TYPE
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.chat.foreign import LEFT_OUT, NOT_READ, is_unread, name_of, text_of
from oaiserve.routes.chat.history import BEFORE_SUMMARY, Placed, prompt_of
from oaiserve.routes.chat.tools import Kind, Tools, shown_tools, tools_of
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.intake.invalid import converted, invalid, show
from oaiserve.routes.intake.last_turn import first_asked
from oaiserve.routes.intake.media import MediaReader
from oaiserve.routes.intake.object_types import Function, ImageBlock
from oaiserve.routes.intake.parameters import integer

Message = dict[str, Any]
Said = str | dict[str, Any]  # a text, or the part of an image
_KINDS: dict[str, Kind] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
_TEXTS = ("text", "document", "search_result")  # types of blocks that lose nothing when they become plain text
MIN_BUDGET = 1024  # Anthropic's


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A text in the system message."""

    text: str


def conversed(
    body: MessagesBody | CountTokensBody,
    dialect: Dialect,
    media: MediaReader,
    note: Note,
    *,
    is_constrained: bool,
) -> tuple[Conversation, ChatPrompt]:
    """Return the tools and the reasoning of a request, and its prompt. `is_constrained` is as in `Conversation`."""
    messages = chat_messages(body.system, body.messages, media, note)
    continues = messages[-1][1]["role"] == "assistant" and "tool_calls" not in messages[-1][1]
    thinking = body.thinking or ThinkingOptions(type="adaptive")
    effort = None if body.output_config is None else body.output_config.effort
    switched: dict[str, Any] = {}
    if thinking.type in ("enabled", "disabled") and dialect.reasoning is not None:
        switched = {**dialect.reasoning.switched(on=thinking.type == "enabled")}
    if thinking.type == "disabled" and not switched:
        effort = "none"
    if body.mcp_servers:
        note("mcp_servers", "tools of servers are left out")
    conversation = Conversation(
        dialect,
        requested_tools(body, note),
        {**switched, **(body.chat_template_kwargs or {})},
        effort=effort,
        thinking_budget=integer(thinking, "budget_tokens"),
        is_constrained=is_constrained,
        asks_for_answer=not continues,
    )
    prompt = prompt_of(
        messages,
        conversation.shown_tools,
        dialect,
        media,
        note,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    return conversation, conversation.completed(prompt)


def check_thinking(thinking: ThinkingOptions | None, max_tokens: int | None) -> None:
    """Raise InvalidRequest for reasoning whose budget is outside Anthropic's limits. Unless `max_tokens` is None, the
    budget must also be less than that."""
    if thinking is None or thinking.type != "enabled":
        return
    budget = integer(thinking, "budget_tokens")
    place = "thinking.budget_tokens"
    if budget is None:
        raise invalid("thinking", "is required for the type 'enabled'", place)
    if budget < MIN_BUDGET:
        raise invalid("thinking", f"must be >= {MIN_BUDGET}, got {budget}", place)
    if max_tokens is not None and budget >= max_tokens:
        raise invalid("thinking", f"must be < max_tokens ({max_tokens}), got {budget}", place)


def chat_messages(
    system: str | Sequence[SystemText] | None, turns: Sequence[Turn], media: MediaReader, note: Note
) -> list[Placed]:
    """Return the messages of chat with their places. The last one is the assistant's only if it has calls, or a text to
    continue."""
    if not turns:
        raise invalid("messages", "must hold at least one turn")
    history = _History(media, note)
    for number, part in enumerate([SystemText(text=system, type="text")] if isinstance(system, str) else system or []):
        if part.type is None:
            note(f"system[{number}]", WITHOUT_TYPE)
        if part.text:
            history.say("system", part.text, "system")
    last_of_user = max((number for number, turn in enumerate(turns) if turn.role == "user"), default=-1)
    first_question = first_asked([turn.role for turn in turns])
    for number, turn in enumerate(turns):
        if turn.output_config:
            note(f"messages[{number}].output_config", "is left out: the request's holds for all turns")
        if turn.clear_at != "next_user_message" or number > last_of_user:
            history.add_turn(turn, f"messages[{number}]", is_asked=turn.role == "user" and number >= first_question)
    return history.ended()


class _History:
    """The messages of chat so far. Turns of the same role in a row become one message."""

    def __init__(self, media: MediaReader, note: Note) -> None:
        self._media = media
        self._note = note
        self._placed: list[Placed] = []

    def add_turn(self, turn: Turn, where: str, *, is_asked: bool) -> None:
        """Add a turn. If it `is_asked`, it is the user's last turn, so unreadable content in it is refused."""
        if isinstance(turn.content, str):
            content = [{"type": "text", "text": turn.content}]
        else:
            content = turn.content or []
            if turn.content is None:
                self._note(f"{where}.content", "is missing, and read as empty")
        places = (f"{where}.content[{number}]" for number in range(len(content)))
        placed = [
            (self._typed(block, place, is_asked=is_asked), place) for block, place in zip(content, places, strict=True)
        ]
        if turn.role == "user":  # Results come before the text in the same turn.
            placed.sort(key=lambda each: not each[0]["type"].endswith("tool_result"))
        for block, place in placed:
            self._add_block(turn.role, block, place, is_asked=is_asked)

    def _typed(self, block: Block, where: str, *, is_asked: bool) -> Block:
        if isinstance(block.get("type"), str):
            return block
        if is_asked:
            raise invalid("messages", "must be the type of the block", f"{where}.type")
        self._note(where, "has no type, and is read as text")
        return {**block, "type": "text"}

    def _add_block(self, role: str, block: Block, where: str, *, is_asked: bool) -> None:
        kind: str = block["type"]
        if kind.endswith("tool_result"):
            self._add_result(converted(ToolResultBlock, block, where), block, where)
        elif kind.endswith("tool_use") and role == "assistant":
            arguments = block.get("input")
            if isinstance(arguments, str):
                self._note(f"{where}.input", "is read as JSON")
            elif arguments is None:
                self._note(f"{where}.input", "is missing, and read as empty")
                arguments = {}
            function = {"name": block.get("name"), "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            self._message_of(role, where).setdefault("tool_calls", []).append(call)
        elif kind == "thinking" and role == "assistant" and isinstance(thought := block.get("thinking"), str):
            message = self._message_of(role, where)
            message.setdefault("reasoning", []).append(thought)
        elif kind == "compaction" and isinstance(block.get("content"), str):
            # This summary includes all turns before it.
            self._placed = [each for each in self._placed[:1] if each[1]["role"] == "system"]
            self.say("user", f"{BEFORE_SUMMARY}\n\n{block['content']}", where)
        elif kind not in ("tool_addition", "tool_removal"):  # These are read with the tools.
            if is_asked and kind != "image" and is_unread(block):
                raise invalid("messages", NOT_READ, where)
            said = [*self._said(block, where, is_asked=is_asked)]
            if not said:
                self._note(where, f"{name_of(block)} is left out")
            for one in said:
                if one or role == "user":
                    self.say(role, one, where)

    def _said(self, block: Block, where: str, *, is_asked: bool) -> Iterator[Said]:
        """Yield a block as a text or as the part of an image, or nothing if it has nothing for the model."""
        citations = block.get("citations")
        if isinstance(citations, dict) and citations.get("enabled"):
            self._note(f"{where}.citations", "is left out: answers cite nothing")
        if block["type"] == "text" and (is_asked or isinstance(block.get("text"), str)):
            yield converted(TextPart, block, where).text
            return
        if block["type"] == "image":
            if block.get("transformations"):
                self._note(f"{where}.transformations", "is left out: images are read as they are")
            try:
                yield self._media.part(converted(ImageBlock, block, where), where, is_asked=is_asked)
                return
            except InvalidRequest:
                if is_asked:
                    raise
        if text := text_of(block):
            if LEFT_OUT in text:
                self._note(where, f"{name_of(block)} is left out, or has a part that is")
            elif block["type"] not in _TEXTS:
                self._note(where, f"{name_of(block)} is shown by its text")
            yield text

    def _add_result(self, result: ToolResultBlock, block: Block, where: str) -> None:
        said = self._said_in_result(result.content, f"{where}.content")
        if result.is_error:
            begins = bool(said) and isinstance(said[0], str)
            said = [f"Error: {said[0]}" if begins else "Error: ", *said[begins:]]
        if block["type"] != "tool_result":
            self._note(where, f"the text of {name_of(block)} is shown as the result of a tool")
        elif isinstance(result.content, dict):
            self._note(f"{where}.content", ONE_PART)
        self._placed.append((where, {"role": "tool", "content": said, "tool_call_id": result.tool_use_id}))

    def _said_in_result(self, content: object, where: str) -> list[Said]:
        said: list[Said] = []
        for number, each in enumerate(content if isinstance(content, list) else [content]):
            place = f"{where}[{number}]"
            if isinstance(each, dict) and isinstance(each.get("type"), str):
                said += self._said(each, place, is_asked=False)
                continue
            if each is not content:
                self._note(place, WITHOUT_TYPE)
            said.append(each if isinstance(each, str) else text_of(each))
        if all(isinstance(one, str) for one in said):
            said = ["\n".join(map(str, said))]
        return said

    def say(self, role: str, said: Said, where: str) -> None:
        self._message_of(role, where)["content"].append(said)

    def _message_of(self, role: str, where: str) -> Message:
        if not self._placed or self._placed[-1][1]["role"] != role:
            self._placed.append((where, {"role": role, "content": []}))
        return self._placed[-1][1]

    def ended(self) -> list[Placed]:
        last: Message = self._placed[-1][1] if self._placed else {}
        if last.get("role") == "assistant" and not any(last["content"]) and "tool_calls" not in last:
            self._note("messages", "the last turn has no text to go on with and is left out")
            del self._placed[-1]
        if all(message["role"] != "user" for _, message in self._placed):  # Some templates want a user message.
            is_system = bool(self._placed) and self._placed[0][1]["role"] == "system"
            self._placed.insert(int(is_system), ("messages", {"role": "user", "content": []}))
        for _, message in self._placed:
            message["content"] = _content(message["content"])
            if "reasoning" in message:
                message["reasoning"] = "\n".join(filter(None, message["reasoning"]))
        return self._placed


def _content(said: Sequence[Said]) -> str | list[Message]:
    if len(said) < 2 and all(isinstance(one, str) for one in said):
        return "".join(map(str, said))
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in said]


def requested_tools(body: MessagesBody | CountTokensBody, note: Note) -> Tools | None:
    """Return the tools for the model, or None without any: those with a schema, which clients define and run."""
    offered = _offered(body, note)
    choice = body.tool_choice
    kind: Kind = "auto" if choice is None else _KINDS[choice.type]
    names = None if choice is None or kind != "named" else [choice.name or ""]
    if choice is not None and kind in ("required", "named"):
        _check_may_be_forced(choice.name if names else None, [*offered.values()])
    functions: list[Function] = []
    places: list[str] = []
    for where, tool in offered.items():
        if tool.type not in (None, "custom"):
            note(where, "a tool that Anthropic defines is left out")
            continue
        for name in ("name", "input_schema"):
            if getattr(tool, name) is None:
                reason = "is required for a tool without a type that Anthropic defines"
                raise invalid("tools", reason, f"{where}.{name}")
        places.append(where)
        functions.append(
            Function(
                name=tool.name or "", description=tool.description, parameters=tool.input_schema, strict=tool.strict
            )
        )
    if not functions:
        return None
    shown = shown_tools(functions, places, note, "input_schema")
    only_one = kind == "named" or bool(choice and choice.disable_parallel_tool_use)
    return tools_of(shown, kind, names, note, only_one=only_one)


def _offered(body: MessagesBody | CountTokensBody, note: Note) -> dict[str, MessagesTool]:
    """Return the tools by their places: the request's tools, as later turns have changed them."""
    offered = {f"tools[{number}]": tool for number, tool in enumerate(body.tools or [])}
    places: dict[str | None, list[str]] = {}  # places of the tools of each name
    for where, one in offered.items():
        places.setdefault(one.name, []).append(where)
    removed: set[str | None] = set()
    for place, change in _changes_of_tools(body.messages):
        tool = change.get("tool")
        if not isinstance(tool, dict):
            continue
        added = tool.get("definition")
        if change["type"] == "tool_removal":
            removed.add(str(tool.get("name")))
            note(place, "its tool is left out of the whole prompt")
        elif added is None:
            removed.discard(str(tool.get("name")))
        else:
            where = f"{place}.tool.definition"
            new = converted(MessagesTool, added, where)
            removed.discard(new.name)
            for older in places.pop(new.name, ()):
                del offered[older]
            offered[where] = new
            places[new.name] = [where]
            note(place, "its tool is shown with the others, before the conversation")
    return {where: tool for where, tool in offered.items() if tool.name not in removed}


def _changes_of_tools(turns: Sequence[Turn]) -> Iterator[tuple[str, Block]]:
    """Yield the blocks that add or remove tools, each with its place. A compaction has those of the turns before it."""
    for number, turn in enumerate(turns):
        for place, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            where = f"messages[{number}].content[{place}]"
            changes: object = [block]
            if block.get("type") == "compaction":
                changes = block.get("tool_changes")
                where = f"{where}.tool_changes"
            for each in changes if isinstance(changes, list) else ():
                if isinstance(each, dict) and each.get("type") in ("tool_addition", "tool_removal"):
                    yield where, each


def _check_may_be_forced(name: str | None, tools: Sequence[MessagesTool]) -> None:
    """Raise InvalidRequest if a call of the tool with this name, or of any tool (None), cannot be forced."""
    typed = [tool for tool in tools if tool.type not in (None, "custom") and name in (None, tool.name)]
    if not tools:
        raise invalid("tool_choice", f"is only allowed with 'tools', got {show(name or 'any')}")
    if typed and (name is not None or len(typed) == len(tools)):
        reason = (
            f"the tool {show(typed[0].name)} is of the type {show(typed[0].type)}, which only Anthropic's models know"
        )
        raise invalid("tool_choice", f"{reason}. Force one with an 'input_schema'")
