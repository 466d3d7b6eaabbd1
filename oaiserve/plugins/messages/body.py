"""The bodies of /v1/messages and of its token count: turns made of blocks, tools, and how to think and answer.

Fields that change no answer here, such as `cache_control` and `signature`, are not read.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from oaiserve.routes.intake.body_types import (
    MAX_INT32,
    MAX_STRINGS,
    MAX_TOOLS,
    SamplingBody,
    TemplateKwargs,
    ThinkingBudget,
)
from oaiserve.routes.intake.object_types import Effort, Integer, NonEmpty, Schema, Strict, described


class ToolResultBlock(msgspec.Struct):
    """The result of a call."""

    tool_use_id: Annotated[str, described("The call that it belongs to.")]
    content: Any = None
    is_error: Annotated[bool | None, described("The model reads 'Error: ' before the content.")] = None


# A history may have begun at Anthropic, which keeps adding types of blocks. So a block is any object with a type, and
# `prompt` reads the types that it knows.
Block = dict[str, Any]


class Turn(msgspec.Struct, kw_only=True):
    """A turn of the user, with the results of the model's calls; a turn of the assistant, which is continued if it is
    the last one; or an instruction in the middle of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        str | list[Block] | None,
        described("A text, or blocks: text, image, document, thinking, tool_use, tool_result and others."),
    ] = None
    clear_at: Annotated[
        str | None, described("With the role system: next_user_message leaves it out once the user has said more.")
    ] = None
    output_config: Annotated[dict[str, Any] | None, described("Is left out: the request's holds for all turns.")] = None


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs. The model does not see tools of the types that Anthropic defines."""

    name: Annotated[str | None, described("The name of a tool, required with an input_schema.")] = None
    type: Annotated[str | None, described("custom, or left out, for a tool with an input_schema.")] = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, described("The JSON Schema of an object with its arguments.")] = None
    strict: Strict = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """Whether tools may or must be called, and which ones."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, described("With the type tool: the one that must be called.")] = None
    disable_parallel_tool_use: Annotated[bool | None, described("At most one call.")] = None


class ThinkingOptions(msgspec.Struct, kw_only=True):
    """Whether the model reasons. If its chat template has no switch for that, the budget decides."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: ThinkingBudget = None
    display: Annotated[
        Literal["summarized", "omitted"] | None, described("omitted leaves reasoning out of the answer.")
    ] = None


class SystemText(msgspec.Struct, kw_only=True):
    """One text block of the system prompt."""

    text: str
    type: Literal["text", None] = None


class JSONFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An output format: JSON that follows a schema."""

    schema: Schema
    type: Literal["json_schema", None] = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """The form of the answer."""

    effort: Annotated[Effort | None, described("Like reasoning_effort in chat.")] = None
    format: JSONFormat | None = None


Model = Annotated[str, described("Name of the model.")]
Turns = Annotated[list[Turn], described("The conversation so far.", minItems=1)]
System = Annotated[str | list[SystemText] | None, described("The system's message, before all others.")]
Offered = Annotated[list[MessagesTool] | None, described("The tools that the model may call.", maxItems=MAX_TOOLS)]
Choice = Annotated[MessagesToolChoice | None, described("Whether to call tools. Default: auto.")]
Thinking = Annotated[ThinkingOptions | None, described("How the model reasons. Default: in its own way.")]
Output = Annotated[OutputConfig | None, described("The form of the answer.")]
MCPServers = Annotated[list[Any] | None, described("Are left out: this server runs no tools.")]
Thread = Annotated[dict[str, Any] | None, described("Is refused, so that the client sends the whole conversation.")]


class CountTokensBody(msgspec.Struct, kw_only=True):
    """A prompt whose tokens are counted."""

    model: Model
    messages: Turns
    system: System = None
    tools: Offered = None
    tool_choice: Choice = None
    thinking: Thinking = None
    output_config: Output = None
    mcp_servers: MCPServers = None
    thread: Thread = None
    chat_template_kwargs: TemplateKwargs = None


class DiagnosticsOptions(msgspec.Struct):
    """Which earlier prompt to compare with this one."""

    previous_message_id: Annotated[str | None, described("The id of an earlier answer of this server.")] = None


class MessagesBody(SamplingBody, kw_only=True):
    """The conversation to answer, and how."""

    model: Model
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
    mcp_servers: MCPServers = None
    thread: Thread = None
    diagnostics: Annotated[
        DiagnosticsOptions | None, described("Say in the answer why the prompt was not read from the cache.")
    ] = None
    compaction: Annotated[dict[str, Any] | None, described("Is refused: this server makes no summaries.")] = None
    chat_template_kwargs: TemplateKwargs = None
