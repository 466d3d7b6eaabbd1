"""The bodies of /v1/messages and of its count of tokens: turns made of blocks, tools, and how to think and answer.

Fields that change no answer here, such as `cache_control` and `signature`, are not read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from oaiserve.routes.bodies import MAX_INT32, MAX_STRINGS, MAX_TOOLS, SamplingBody, ThinkingBudget
from oaiserve.routes.objects import Effort, Integer, NonEmpty, Schema, TextPart, described


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """The model called a tool."""

    id: str
    name: str
    input: Annotated[dict[str, Any], described("The arguments.")]


class Base64Source(msgspec.Struct, tag_field="type", tag="base64"):
    """An image itself."""

    data: Annotated[str, described("In base64.")]
    media_type: Annotated[str | None, described("Changes nothing: the file itself says what it is.")] = None


class URLSource(msgspec.Struct, tag_field="type", tag="url"):
    """An image by its URL."""

    url: str


class FileSource(msgspec.Struct, tag_field="type", tag="file"):
    """An image by the id of a file of /v1/files."""

    file_id: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """An image."""

    source: Base64Source | URLSource | FileSource


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", kw_only=True):
    """The result of a call."""

    tool_use_id: Annotated[str, described("The call that it belongs to.")]
    content: str | list[TextPart | ImageBlock] | None = None
    is_error: Annotated[bool | None, described("The model reads 'Error: ' before the content.")] = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """The model thought this before it answered."""

    thinking: str


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning that another server has encrypted. The model is not shown it."""


class UserTurn(msgspec.Struct, tag_field="role", tag="user"):
    """The user says this, with the results of the model's calls."""

    content: str | list[TextPart | ImageBlock | ToolResultBlock]


class AssistantTurn(msgspec.Struct, tag_field="role", tag="assistant"):
    """The model said this. As the last turn, it is continued."""

    content: str | list[TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock]


class SystemTurn(msgspec.Struct, tag_field="role", tag="system"):
    """An instruction in the midst of the conversation."""

    content: str | list[TextPart]


Turn = UserTurn | AssistantTurn | SystemTurn


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs. One of a type that Anthropic defines is not shown to the model."""

    name: str
    type: Annotated[str | None, described("custom, or left out, for a tool with an input_schema.")] = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, described("The JSON Schema of an object with its arguments.")] = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """Whether tools may or must be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, described("With the type tool: the one that must be called.")] = None
    disable_parallel_tool_use: Annotated[bool | None, described("At most one call.")] = None


class ThinkingOptions(msgspec.Struct, kw_only=True):
    """Whether the model reasons. Where its chat template has no switch for that, the budget decides."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: ThinkingBudget = None
    display: Annotated[
        Literal["summarized", "omitted"] | None, described("omitted leaves reasoning out of the answer.")
    ] = None


class JSONFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON by a schema."""

    schema: Schema


class OutputConfig(msgspec.Struct, kw_only=True):
    """The answer is to be like this."""

    effort: Annotated[Effort | None, described("As reasoning_effort of chat.")] = None
    format: JSONFormat | None = None


Turns = Annotated[list[Turn], described("The conversation so far.", minItems=1)]
System = Annotated[str | list[TextPart] | None, described("The system's message, before all others.")]
Offered = Annotated[list[MessagesTool] | None, described("What the model may call.", maxItems=MAX_TOOLS)]
Choice = Annotated[MessagesToolChoice | None, described("Whether to call tools. Default: auto.")]
Thinking = Annotated[ThinkingOptions | None, described("How the model reasons. Default: as it does.")]
Output = Annotated[OutputConfig | None, described("The form of the answer.")]
TemplateKwargs = Annotated[dict[str, Any] | None, described("Variables of the chat template.")]


class CountTokensBody(msgspec.Struct, kw_only=True):
    """A client sends a prompt whose tokens are to be counted."""

    model: Annotated[str | None, described("Name of the model; the one that is served, if left out.")] = None
    messages: Turns
    system: System = None
    tools: Offered = None
    tool_choice: Choice = None
    thinking: Thinking = None
    output_config: Output = None
    chat_template_kwargs: TemplateKwargs = None


class MessagesBody(SamplingBody, kw_only=True):
    """A client sends the conversation to answer, and says how."""

    messages: Turns
    max_tokens: Annotated[
        Integer,
        described("Most tokens of the answer, which may be more than the context has room for.", 0, MAX_INT32),
    ]
    system: System = None
    stop_sequences: Annotated[
        list[NonEmpty] | None, described("Texts before which the answer ends.", maxItems=MAX_STRINGS)
    ] = None
    tools: Offered = None
    tool_choice: Choice = None
    thinking: Thinking = None
    output_config: Output = None
    output_format: Annotated[JSONFormat | None, described("Older name of output_config.format.")] = None
    chat_template_kwargs: TemplateKwargs = None
