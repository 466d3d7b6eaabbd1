"""The prompt of a request of /v1/messages: its turns and tools in the form in which chat has them.

This file knows nothing of HTTP. Every refusal is an `InvalidRequest` that names the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from oaiserve.engine.request import ChatPrompt
from oaiserve.facts.prefix_keys import is_billing
from oaiserve.routes.conversation import Conversation
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.invalid import invalid, show
from oaiserve.routes.media import MediaReader
from oaiserve.routes.messages.body import (
    AssistantTurn,
    CountTokensBody,
    ImageBlock,
    MessagesBody,
    MessagesTool,
    ThinkingBlock,
    ThinkingOptions,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UserTurn,
)
from oaiserve.routes.objects import Function, TextPart
from oaiserve.routes.parameters import integer
from oaiserve.routes.tools import Kind, Tools, chosen, prompt_with_tools, shown_tools

Message = dict[str, Any]
Said = str | dict[str, Any]  # a text, or the part of an image
_KINDS: dict[str, Kind] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


def conversed(
    body: MessagesBody | CountTokensBody, dialect: Dialect, media: MediaReader, *, is_constrained: bool
) -> tuple[Conversation, ChatPrompt]:
    """Return the tools and the reasoning of a request, and its prompt. `is_constrained` as for `Conversation`."""
    messages = chat_messages(body.system, body.messages, media)
    continues = messages[-1]["role"] == "assistant"
    thinking = body.thinking or ThinkingOptions(type="adaptive")
    effort = None if body.output_config is None else body.output_config.effort
    switched: dict[str, Any] = {}
    if thinking.type in ("enabled", "disabled") and dialect.reasoning is not None:
        switched = {**dialect.reasoning.switched(on=thinking.type == "enabled")}
    if thinking.type == "disabled" and not switched:
        effort = "none"
    conversation = Conversation(
        dialect,
        requested_tools(body),
        {**switched, **(body.chat_template_kwargs or {})},
        effort=effort,
        thinking_budget=integer(thinking, "budget_tokens"),
        is_constrained=is_constrained,
        asks_for_answer=not continues,
    )
    prompt = prompt_with_tools(
        messages,
        conversation.shown_tools,
        dialect,
        media,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    return conversation, conversation.completed(prompt)


def chat_messages(system: str | Sequence[TextPart] | None, turns: Iterable[Turn], media: MediaReader) -> list[Message]:
    """Return the messages of chat. Turns of the same role in a row become one message, and results stand before the
    text beside them."""
    messages: list[Message] = []
    call_ids: set[str] = set()
    _say(messages, "system", [text for text in _texts(system or "") if text and not is_billing(text)])
    for number, turn in enumerate(turns):
        where, content = f"messages[{number}]", turn.content
        blocks: Sequence[object] = [TextPart(content)] if isinstance(content, str) else content
        said = [*_said(blocks, f"{where}.content", media)]
        if isinstance(turn, AssistantTurn):
            _say(messages, "assistant", said, always=True)
            _add_thoughts_and_calls(messages[-1], blocks)
            call_ids.update(block.id for block in blocks if isinstance(block, ToolUseBlock))
        else:
            for place, block in enumerate(blocks):
                if isinstance(block, ToolResultBlock):
                    if block.tool_use_id not in call_ids:
                        reason = f"there is no call {show(block.tool_use_id)} before this result of it"
                        raise invalid("messages", reason, f"{where}.content[{place}].tool_use_id")
                    messages.append(_result(block, f"{where}.content[{place}].content", media))
            _say(messages, "user" if isinstance(turn, UserTurn) else "system", said)
    if not messages or (messages[-1]["role"] == "system" and len(messages) == 1):
        raise invalid("messages", "must hold at least one turn with a text or an image")
    last = messages[-1]
    if last["role"] == "assistant" and (not any(last["content"]) or "tool_calls" in last):
        reason = "the last turn is the assistant's, so it is continued, but it does not end with text"
        raise invalid("messages", reason)
    for message in messages:
        if isinstance(said := message["content"], list):
            message["content"] = _content(said)
    return messages


def _say(messages: list[Message], role: str, said: list[Said], *, always: bool = False) -> None:
    """Add what is said in a role to the last message, or in one of its own: none if it is nothing, but `always`."""
    if messages and messages[-1]["role"] == role:
        messages[-1]["content"] += said
    elif said or always:
        messages.append({"role": role, "content": said})


def _said(blocks: Iterable[object], where: str, media: MediaReader) -> Iterator[Said]:
    """Yield the texts of blocks, and the parts of images."""
    for place, block in enumerate(blocks):
        if isinstance(block, TextPart):
            yield block.text
        elif isinstance(block, ImageBlock):
            yield media.part(block, f"{where}[{place}]")


def _content(said: Sequence[Said]) -> str | list[Message]:
    """Return the content of a message: a string if that can hold it."""
    if len(said) < 2 and all(isinstance(one, str) for one in said):
        return "".join(map(str, said))
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in said]


def _texts(content: str | Sequence[TextPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def _add_thoughts_and_calls(message: Message, blocks: Iterable[object]) -> None:
    for block in blocks:
        if isinstance(block, ThinkingBlock):
            message["reasoning"] = "\n".join(filter(None, (message.get("reasoning"), block.thinking)))
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()}
            call = {"id": block.id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)


def _result(block: ToolResultBlock, where: str, media: MediaReader) -> Message:
    given = block.content or ""
    said: list[Said] = [given] if isinstance(given, str) else [*_said(given, where, media)]
    if all(isinstance(one, str) for one in said):
        said = ["\n".join(map(str, said))]
    if block.is_error:
        said = [f"Error: {said[0]}" if isinstance(said[0], str) else "Error: ", *said[isinstance(said[0], str) :]]
    return {"role": "tool", "content": _content(said), "tool_call_id": block.tool_use_id}


def requested_tools(body: MessagesBody | CountTokensBody) -> Tools | None:
    """Return the tools for the model, or None without any: those with a schema, which clients define and run."""
    given, choice = body.tools or [], body.tool_choice
    numbered = [(number, tool) for number, tool in enumerate(given) if tool.type in (None, "custom")]
    kind: Kind = "auto" if choice is None else _KINDS[choice.type]
    names = None if choice is None or kind != "named" else [choice.name or ""]
    if choice is not None and kind in ("required", "named"):
        _check_may_be_forced(choice.name if names else None, given)
    if not numbered:
        return None
    for number, tool in numbered:
        if tool.input_schema is None:
            reason = "is required for a tool without a type that Anthropic defines"
            raise invalid("tools", reason, f"tools[{number}].input_schema")
    functions = [
        Function(name=tool.name, description=tool.description, parameters=tool.input_schema) for _, tool in numbered
    ]
    shown = shown_tools("tools", functions, "tools[{}]", "input_schema")
    if kind == "none":
        return Tools(shown, {}, kind, only_one=False)
    all_schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in shown}
    only_one = kind == "named" or bool(choice and choice.disable_parallel_tool_use)
    return Tools(shown, chosen("tool_choice", names, all_schemas), kind, only_one)


def _check_may_be_forced(name: str | None, given: Sequence[MessagesTool]) -> None:
    """Raise InvalidRequest if a call of the tool with this name, or of any (None), cannot be forced."""
    typed = [tool for tool in given if tool.type not in (None, "custom") and name in (None, tool.name)]
    if not given:
        raise invalid("tool_choice", f"is only allowed with 'tools', got {show(name or 'any')}")
    if typed and (name is not None or len(typed) == len(given)):
        reason = (
            f"the tool {show(typed[0].name)} is of the type {show(typed[0].type)}, which only Anthropic's models know"
        )
        raise invalid("tool_choice", f"{reason}. Force one with an 'input_schema'")
