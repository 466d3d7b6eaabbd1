"""The bodies of requests to /v1/responses and /v1/conversations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from oaiserve.routes.intake.body_types import (
    MAX_INT32,
    MAX_TOOLS,
    Metadata,
    MetadataBody,
    ModelName,
    ParallelToolCalls,
    SamplingBody,
    TemplateKwargs,
    ThinkingBudget,
    TopLogprobs,
)
from oaiserve.routes.intake.object_types import (
    REF,
    Effort,
    Function,
    Integer,
    ResponseToolChoice,
    Strict,
    TextFormat,
    ToolName,
    described,
)

MAX_ITEMS = 20  # items added to a conversation at once; OpenAI's limit
# Further values of `include`. Only the encoding of reasoning does anything. The others belong to tools
# on OpenAI's servers, so no answer has them.
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
]

GivenItem = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema={"$ref": REF.format(name="InputItem")})]


class InputFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form of a custom tool's input: any text, or a text by a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex", None] = None
    definition: str | None = None


class NamespaceTool(Function):
    """A function of a namespace."""

    type: Annotated[str, described("function. Tools of other types are left out.")]


class ResponseTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool. Its type decides which fields it needs: a function or a custom tool has a name, and a namespace has
    tools, too.

    Tools of other types run on OpenAI's servers.
    """

    type: Annotated[str, described("function, custom or namespace. Tools of other types are left out.")]
    name: ToolName | None = None
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, described("The JSON Schema of an object with its arguments.")] = None
    strict: Strict = None
    tools: Annotated[list[NamespaceTool] | None, described("The tools of a namespace.")] = None
    format: Annotated[InputFormat | None, described("The format of a custom tool's input. Default: any text.")] = None


class TextOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of a response's text."""

    format: TextFormat | None = None
    verbosity: Annotated[str | None, described("Changes nothing.")] = None


class ReasoningOptions(msgspec.Struct):
    """How the model should reason."""

    effort: Annotated[Effort | None, described("Passed on to the chat template.")] = None


class ConversationId(msgspec.Struct):
    """A conversation, by its id."""

    id: str


# The prompt of a response, and everything its tokens depend on.
_Input = Annotated[str | list[GivenItem], described("A text, or the items of a conversation.", minItems=1)]
_Instructions = Annotated[str | None, described("The system's message, before all others.")]
_Text = Annotated[TextOptions | None, described("The form of the text.")]
_Tools = Annotated[list[ResponseTool] | None, described("Functions that the model may call.", maxItems=MAX_TOOLS)]
_Choice = Annotated[ResponseToolChoice | None, described("Whether to call tools, and which. Default: auto.")]
_Reasoning = Annotated[ReasoningOptions | None, described("How the model reasons.")]
_Previous = Annotated[str | None, described("The stored response that this one continues.")]
_Conversation = Annotated[
    str | ConversationId | None, described("The id of the stored conversation that this turn belongs to.")
]


class CompactionBody(msgspec.Struct, kw_only=True):
    """A conversation to shorten, or the stored response at its end, or both."""

    model: ModelName = None
    input: _Input | None = None
    instructions: _Instructions = None
    tools: _Tools = None
    parallel_tool_calls: ParallelToolCalls = None
    reasoning: _Reasoning = None
    chat_template_kwargs: TemplateKwargs = None
    previous_response_id: _Previous = None


class PromptCacheOptions(msgspec.Struct):
    """Which earlier prompt to compare with this one. The cache itself needs no options."""

    comparison_response_id: Annotated[str | None, described("The id of an earlier response of this server.")] = None
    mode: Annotated[Literal["implicit", "explicit"] | None, described("Changes nothing.")] = None
    prewarm: Annotated[bool | None, described("Only compute and cache the prompt, and answer without output.")] = None
    ttl: Annotated[Literal["30m", "12h"] | None, described("Changes nothing: blocks stay while there is room.")] = None


class BackgroundOptions(msgspec.Struct):
    """When a response in the background has to be done."""

    completion_window: Annotated[
        Literal["soonest", "2h", "8h"] | None,
        described("How long it may take. It waits for other work for 30 seconds (soonest), one hour or four."),
    ] = None
    continuation_id: Annotated[str | None, described("Changes nothing.")] = None


class ResponseInputBody(CompactionBody, kw_only=True):
    """The input of a response, and nothing more."""

    input: _Input
    text: _Text = None
    tool_choice: _Choice = None
    conversation: _Conversation = None


class ResponsesBody(SamplingBody, kw_only=True):
    """The input of a response, and how to answer it."""

    input: _Input
    instructions: _Instructions = None
    max_output_tokens: Annotated[
        Integer | None, described("Most tokens of the answer, including its reasoning.", 1, MAX_INT32)
    ] = None
    top_logprobs: TopLogprobs = None
    include: Annotated[list[Includable] | None, described("Further parts of the response.")] = None
    text: _Text = None
    tools: _Tools = None
    tool_choice: _Choice = None
    parallel_tool_calls: ParallelToolCalls = None
    max_tool_calls: Annotated[
        Integer | None,
        described(
            "The most calls of tools that run on the server. It has none, so this changes nothing.", 1, MAX_INT32
        ),
    ] = None
    reasoning: _Reasoning = None
    thinking_token_budget: ThinkingBudget = None
    chat_template_kwargs: TemplateKwargs = None
    previous_response_id: _Previous = None
    store: Annotated[bool | None, described("Keep the response. Default: true.")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        described("auto: a conversation beyond the context loses its first items. Default: it is refused."),
    ] = None
    metadata: Metadata = None
    user: Annotated[str | None, described("Returned with the response.")] = None
    safety_identifier: Annotated[str | None, described("Returned with the response.")] = None
    prompt_cache_key: Annotated[str | None, described("Returned with the response.")] = None
    prompt_cache_options: Annotated[
        PromptCacheOptions | None, described("Say in the answer why the prompt was not read from the cache.")
    ] = None
    background: Annotated[
        bool | None, described("Answer at once, and make the response in the background. It must be stored.")
    ] = None
    background_options: BackgroundOptions | None = None
    conversation: _Conversation = None
    prompt: Annotated[str | dict[str, Any] | None, described("Is refused: there are no stored prompts.")] = None


InputBody = ResponsesBody | ResponseInputBody


class ItemsBody(msgspec.Struct, kw_only=True):
    """Items to add to a conversation."""

    items: Annotated[list[GivenItem], described("The next ones.", minItems=1, maxItems=MAX_ITEMS)]


class ConversationBody(MetadataBody, kw_only=True):
    """A new conversation."""

    items: Annotated[list[GivenItem] | None, described("The first ones.", maxItems=MAX_ITEMS)] = None
