"""Objects of the SDKs' types within conversations and tools, each with a request that has it."""

from base64 import b64encode
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.routes.asking import CHAT, MESSAGES, PARAMETERS, RESPONSES

Fields = dict[str, Any]


class Sent(NamedTuple):
    kind: str  # the name of its type
    fields: Fields
    body: Callable[[Fields], Fields]  # the request's parameters around it
    route: str


FILE = "data:text/plain;base64," + b64encode(b"The code is 4711.").decode()
UPLOADED = "file-of-the-test"
DATA = b64encode(b"a medium").decode()
PNG = f"data:image/png;base64,{DATA}"
ASKED = {"role": "user", "content": "What time is it?"}
ALLOWED = {"properties": {"zone": {"type": "string"}}, "required": ["zone"], "type": "object"}
USED = {"type": "tool_use", "id": "call_1", "name": "get_time", "input": {"zone": "utc"}}
FUNCTION: Fields = {"name": "get_time", "description": "The time.", "parameters": PARAMETERS, "strict": True}
CALLED = {"name": "get_time", "arguments": '{"zone": "utc"}'}
CALL = {"type": "function_call", "call_id": "call_1", **CALLED}
CUSTOM = {"type": "custom_tool_call", "call_id": "call_1", "name": "run", "input": "ls"}
GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
RUN = {"type": "custom", "name": "run", "description": "Runs it.", "format": GRAMMAR}
CHOICES = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
RESULT_OF_SEARCH = {"type": "text", "text": "12:00"}
# Wishes that tools of /v1/responses and /v1/messages may have.
MORE_OF_TOOLS = {"allowed_callers": ["programmatic"], "async": True, "defer_loading": True}


def chat_tools(*, number: int = 2) -> list[Fields]:
    return [{"type": "function", "function": {"name": name}} for name in ("get_time", "stop")[:number]]


def tools(*, number: int = 2) -> list[Fields]:
    return [{"type": "function", "name": name} for name in ("get_time", "stop")[:number]]


def schema_tools() -> list[Fields]:
    return [{"name": name, "input_schema": {"type": "object"}} for name in ("get_time", "stop")]


def message(fields: Fields) -> Fields:
    return {"messages": [fields]}


def earlier(fields: Fields) -> Fields:
    return {"messages": [ASKED, fields, ASKED]}


def part(fields: Fields) -> Fields:
    return {"messages": [{"role": "user", "content": [fields]}]}


def of_assistant(fields: Fields) -> Fields:
    return earlier({"role": "assistant", "content": [fields]})


def call(fields: Fields) -> Fields:
    return earlier({"role": "assistant", "tool_calls": [fields]})


def item(fields: Fields) -> Fields:
    return {"input": [ASKED, fields, ASKED]}


def result_of(called: Fields) -> Callable[[Fields], Fields]:
    return lambda fields: {"input": [ASKED, called, fields]}


def item_part(fields: Fields) -> Fields:
    return {"input": [{"role": "user", "content": [fields]}]}


def part_of_answer(fields: Fields) -> Fields:
    return item({"type": "message", "role": "assistant", "content": [fields]})


def part_of_result(fields: Fields) -> Fields:
    return {"input": [ASKED, CALL, {"type": "function_call_output", "call_id": "call_1", "output": [fields]}]}


def result_block(fields: Fields) -> Fields:
    return {"messages": [ASKED, {"role": "assistant", "content": [USED]}, {"role": "user", "content": [fields]}]}


def change(fields: Fields) -> Fields:
    """Return a conversation with a change of its tools."""
    return {**earlier({"role": "system", "content": [fields]}), "tools": schema_tools()}


def chosen(tools: list[Fields]) -> Callable[[Fields], Fields]:
    return lambda fields: {"tools": tools, "tool_choice": fields}


def tool(fields: Fields) -> Fields:
    return {"tools": [fields]}


SENT = [
    *(
        Sent(kind, fields, body, CHAT)
        for kind, fields, body in (
            ("ChatCompletionUserMessageParam", {**ASKED, "name": "ann"}, message),
            ("ChatCompletionSystemMessageParam", {"role": "system", "content": "Be kind.", "name": "ann"}, earlier),
            ("ChatCompletionDeveloperMessageParam", {"role": "developer", "content": "Hi", "name": "ann"}, earlier),
            ("ChatCompletionAssistantMessageParam", {"role": "assistant", "content": "Yes.", "name": "bob"}, earlier),
            ("ChatCompletionAssistantMessageParam", {"role": "assistant", "refusal": "No."}, earlier),
            ("ChatCompletionAssistantMessageParam", {"role": "assistant", "function_call": CALLED}, earlier),
            (
                "ChatCompletionAssistantMessageParam",
                {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": CALLED}]},
                earlier,
            ),
            (
                "ChatCompletionToolMessageParam",
                {"role": "tool", "content": "12", "tool_call_id": "call_1"},
                lambda fields: {
                    "messages": [
                        *call({"id": "call_1", "type": "function", "function": CALLED})["messages"][:2],
                        fields,
                    ]
                },
            ),
            (
                "ChatCompletionFunctionMessageParam",
                {"role": "function", "name": "get_time", "content": "12"},
                lambda fields: {"messages": [ASKED, {"role": "assistant", "function_call": CALLED}, fields]},
            ),
            ("ChatCompletionContentPartTextParam", {"type": "text", "text": "Hi"}, part),
            ("ChatCompletionContentPartImageParam", {"type": "image_url", "image_url": {"url": PNG}}, part),
            (
                "ChatCompletionContentPartInputAudioParam",
                {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
                part,
            ),
            ("ChatCompletionContentPartRefusalParam", {"type": "refusal", "refusal": "No."}, of_assistant),
            (
                "ImageURL",
                {"url": PNG, "detail": "low"},
                lambda fields: part({"type": "image_url", "image_url": fields}),
            ),
            (
                "InputAudio",
                {"data": DATA, "format": "wav"},
                lambda fields: part({"type": "input_audio", "input_audio": fields}),
            ),
            ("File", {"type": "file", "file": {"file_data": FILE}}, part),
            (
                "FileFile",
                {"file_data": FILE, "filename": "a.txt"},
                lambda fields: part({"type": "file", "file": fields}),
            ),
            (
                "ChatCompletionMessageFunctionToolCallParam",
                {"id": "call_1", "type": "function", "function": CALLED},
                call,
            ),
            (
                "ChatCompletionMessageCustomToolCallParam",
                {"id": "call_1", "type": "custom", "custom": {"name": "run", "input": "ls"}},
                call,
            ),
            (
                "Custom",
                {"name": "run", "input": "ls"},
                lambda fields: call({"id": "call_1", "type": "custom", "custom": fields}),
            ),
            ("Function", CALLED, lambda fields: call({"id": "call_1", "type": "function", "function": fields})),
            (
                "FunctionCall",
                CALLED,
                lambda fields: earlier({"role": "assistant", "function_call": fields}),
            ),
            ("ChatCompletionFunctionToolParam", {"type": "function", "function": FUNCTION}, tool),
            ("FunctionDefinition", FUNCTION, lambda fields: tool({"type": "function", "function": fields})),
            (
                "ChatCompletionNamedToolChoiceParam",
                {"type": "function", "function": {"name": "stop"}},
                chosen(chat_tools()),
            ),
            (
                "ChatCompletionAllowedToolChoiceParam",
                {"type": "allowed_tools", "allowed_tools": CHOICES},
                chosen(chat_tools()),
            ),
            (
                "ChatCompletionAllowedToolsParam",
                CHOICES,
                lambda fields: chosen(chat_tools())({"type": "allowed_tools", "allowed_tools": fields}),
            ),
        )
    ),
    *(
        Sent(kind, fields, body, RESPONSES)
        for kind, fields, body in (
            ("EasyInputMessageParam", {"type": "message", **ASKED}, lambda fields: {"input": [fields]}),
            (
                "EasyInputMessageParam",
                {"type": "message", "role": "assistant", "content": "Wait.", "phase": "commentary"},
                item,
            ),
            ("Message", {"role": "user", "content": [{"type": "input_text", "text": "Hi"}], "type": "message"}, item),
            (
                "ResponseOutputMessageParam",
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "12"}],
                    "phase": "final_answer",
                },
                item,
            ),
            ("ResponseInputTextParam", {"type": "input_text", "text": "Hi"}, item_part),
            ("ResponseInputTextContentParam", {"type": "input_text", "text": "12"}, part_of_result),
            ("ResponseOutputTextParam", {"type": "output_text", "text": "12"}, part_of_answer),
            ("ResponseOutputRefusalParam", {"type": "refusal", "refusal": "No."}, part_of_answer),
            *(
                (f"Response{kind}", {**fields, **more}, body)
                for kind, fields, more, body in (
                    (kind, fields, more, body)
                    for kinds, fields, choices in (
                        (
                            ("InputImageParam", "InputImageContentParam"),
                            {"type": "input_image", "detail": "low"},
                            ({"image_url": PNG}, {"file_id": UPLOADED}),
                        ),
                        (
                            ("InputFileParam", "InputFileContentParam"),
                            {"type": "input_file", "filename": "a.txt", "detail": "high"},
                            ({"file_data": FILE}, {"file_url": "http://example.test/a"}, {"file_id": UPLOADED}),
                        ),
                    )
                    for kind, body in zip(kinds, (item_part, part_of_result), strict=True)
                    for more in choices
                )
            ),
            ("ResponseFunctionToolCallParam", {**CALL, "namespace": "clock"}, item),
            (
                "FunctionCallOutput",
                {"type": "function_call_output", "call_id": "call_1", "output": "12"},
                result_of(CALL),
            ),
            ("ResponseCustomToolCallParam", CUSTOM, item),
            (
                "ResponseCustomToolCallOutputParam",
                {"type": "custom_tool_call_output", "call_id": "call_1", "output": "a.txt"},
                result_of(CUSTOM),
            ),
            (
                "ResponseReasoningItemParam",
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
                item,
            ),
            (
                "ResponseReasoningItemParam",
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]},
                item,
            ),
            (
                "ResponseReasoningItemParam",
                {"type": "reasoning", "encrypted_content": "oaiserve:" + b64encode(b"So.").decode()},
                item,
            ),
            ("Summary", {"type": "summary_text", "text": "So."}, lambda f: item({"type": "reasoning", "summary": [f]})),
            (
                "Content",
                {"type": "reasoning_text", "text": "So."},
                lambda f: item({"type": "reasoning", "content": [f]}),
            ),
            (
                "ResponseCompactionItemParamParam",
                {"type": "compaction", "encrypted_content": "oaiserve:" + b64encode(b"So far.").decode()},
                item,
            ),
            ("ItemReference", {"type": "item_reference", "id": "msg_1"}, item),
            ("CompactionTrigger", {"type": "compaction_trigger"}, item),
            ("AdditionalTools", {"type": "additional_tools", "role": "developer", "tools": tools()}, item),
            (
                "ResponseToolSearchOutputItemParamParam",
                {"type": "tool_search_output", "call_id": "call_1", "tools": tools()},
                item,
            ),
            ("FunctionToolParam", {"type": "function", **FUNCTION, **MORE_OF_TOOLS, "output_schema": PARAMETERS}, tool),
            ("CustomToolParam", {**RUN, **MORE_OF_TOOLS}, tool),
            ("Grammar", GRAMMAR, lambda fields: tool({**RUN, "format": fields})),
            ("Text", {"type": "text"}, lambda fields: tool({**RUN, "format": fields})),
            (
                "NamespaceToolParam",
                {"type": "namespace", "name": "clock", "description": "Clocks.", "tools": [tools()[0]]},
                tool,
            ),
            (
                "ToolSearchOutputNamespaceToolParam",
                {"type": "namespace", "name": "clock", "description": "Clocks.", "tools": [tools()[0]]},
                lambda fields: item({"type": "tool_search_output", "call_id": "call_1", "tools": [fields]}),
            ),
            (
                "ToolFunction",
                {"type": "function", **FUNCTION, **MORE_OF_TOOLS, "output_schema": PARAMETERS},
                lambda fields: tool({"type": "namespace", "name": "clock", "tools": [fields]}),
            ),
            ("ToolChoiceFunctionParam", {"type": "function", "name": "stop"}, chosen(tools())),
            ("ToolChoiceCustomParam", {"type": "custom", "name": "run"}, chosen([*tools(), RUN])),
            (
                "ToolChoiceAllowedParam",
                {"type": "allowed_tools", "mode": "required", "tools": tools(number=1)},
                chosen(tools()),
            ),
        )
    ),
    *(
        Sent(kind, fields, body, MESSAGES)
        for kind, fields, body in (
            ("UserMessageParam", ASKED, message),
            ("AssistantMessageParam", {"role": "assistant", "content": "12"}, earlier),
            ("SystemMessageParam", {"role": "system", "content": "Be kind."}, earlier),
            (
                "SystemMessageParam",
                {"role": "system", "content": "Be kind.", "clear_at": "next_user_message"},
                earlier,
            ),
            (
                "SystemMessageParam",
                {"role": "system", "content": "Be kind.", "output_config": {"effort": "low"}},
                earlier,
            ),
            ("ToolAdditionBlockParam", {"type": "tool_addition", "tool": {"definition": schema_tools()[1]}}, change),
            ("ToolRemovalBlockParam", {"type": "tool_removal", "tool": {"name": "stop"}}, change),
            (
                "ToolChangeToolDefinitionParam",
                {"definition": schema_tools()[1]},
                lambda fields: change({"type": "tool_addition", "tool": fields}),
            ),
            (
                "ToolChangeToolReferenceParam",
                {"name": "stop"},
                lambda fields: change({"type": "tool_removal", "tool": fields}),
            ),
            (
                "CompactionBlockParam",
                {
                    "type": "compaction",
                    "content": "They said hi.",
                    "tool_changes": [{"type": "tool_removal", "tool": {"name": "stop"}}],
                },
                lambda fields: {**of_assistant(fields), "tools": schema_tools()},
            ),
            ("TextBlockParam", {"type": "text", "text": "Hi"}, part),
            (
                "ImageBlockParam",
                {
                    "type": "image",
                    "source": {"type": "base64", "data": DATA, "media_type": "image/png"},
                    "transformations": {"resize": "none"},
                },
                part,
            ),
            (
                "Base64ImageSourceParam",
                {"type": "base64", "data": DATA, "media_type": "image/png"},
                lambda fields: part({"type": "image", "source": fields}),
            ),
            (
                "DocumentBlockParam",
                {
                    "type": "document",
                    "source": {"type": "text", "media_type": "text/plain", "data": "4711"},
                    "title": "Codes",
                    "context": "Of today",
                    "citations": {"enabled": True},
                },
                part,
            ),
            (
                "PlainTextSourceParam",
                {"type": "text", "media_type": "text/plain", "data": "4711"},
                lambda fields: part({"type": "document", "source": fields}),
            ),
            (
                "PlainTextSourceParam",
                {"type": "base64", "media_type": "text/plain", "data": b64encode(b"4711").decode()},
                lambda fields: part({"type": "document", "source": fields}),
            ),
            (
                "ContentBlockSourceParam",
                {"type": "content", "content": [RESULT_OF_SEARCH]},
                lambda fields: part({"type": "document", "source": fields}),
            ),
            (
                "SearchResultBlockParam",
                {
                    "type": "search_result",
                    "source": "http://example.test",
                    "title": "Time",
                    "content": [RESULT_OF_SEARCH],
                    "citations": {"enabled": True},
                },
                part,
            ),
            ("ThinkingBlockParam", {"type": "thinking", "thinking": "So."}, of_assistant),
            ("ToolUseBlockParam", USED, of_assistant),
            (
                "ToolResultBlockParam",
                {"type": "tool_result", "tool_use_id": "call_1", "content": "12", "is_error": True},
                result_block,
            ),
            (
                "ToolParam",
                {
                    "type": "custom",
                    "name": "get_time",
                    "description": "The time.",
                    "input_schema": PARAMETERS,
                    "strict": True,
                    "input_examples": [{"zone": "utc"}],
                    "eager_input_streaming": True,
                    "allowed_callers": ["programmatic"],
                    "defer_loading": True,
                },
                tool,
            ),
            (
                "InputSchemaTyped",
                ALLOWED,
                lambda fields: tool({"name": "get_time", "input_schema": fields}),
            ),
            ("ToolChoiceNoneParam", {"type": "none"}, chosen(schema_tools())),
            (
                "ToolChoiceAutoParam",
                {"type": "auto", "disable_parallel_tool_use": True},
                chosen(schema_tools()),
            ),
            ("ToolChoiceAnyParam", {"type": "any", "disable_parallel_tool_use": True}, chosen(schema_tools())),
            (
                "ToolChoiceToolParam",
                {"type": "tool", "name": "stop", "disable_parallel_tool_use": True},
                chosen(schema_tools()),
            ),
        )
    ),
]
