"""Parameters that are objects: messages, calls and tools, choices among tools, constraints, and items of responses.

These types check clients' bodies and are published as they are. Other rules, such as different names for tools, are
checked where the objects are used. This file knows nothing of routes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

NAME = "^[A-Za-z0-9_.-]{1,64}$"  # names of schemas
MAX_TOOL_NAME = 128


def described(text: str, low: float | None = None, high: float | None = None, **keywords: object) -> msgspec.Meta:
    """Return a field's part of the published schema: its meaning, its range, and other keywords of JSON Schema.

    The range is checked where the field is read, because msgspec's own messages do not show the value.
    """
    limits = {name: value for name, value in (("minimum", low), ("maximum", high)) if value is not None}
    return msgspec.Meta(description=text, extra_json_schema={**limits, **keywords})


Integer = int | float  # JSON libraries of some languages write every number as a float
NonEmpty = Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1})]
TokenId = Annotated[Integer, msgspec.Meta(extra_json_schema={"minimum": 0})]
Name = Annotated[str, described("1 to 64 letters, digits, '_', '.' or '-'.", pattern=NAME)]
ToolName = Annotated[
    str,
    described(
        "The model is shown '_' for characters other than letters, digits, '_', '.' and '-'.",
        minLength=1,
        maxLength=MAX_TOOL_NAME,
    ),
]
Strict = Annotated[bool | None, described("true: the arguments of all its calls obey its schema.")]
# A text, several texts, one text as token ids, or several as token ids. A list has items of one kind.
Prompts = (
    str
    | Annotated[
        list[str | TokenId | Annotated[list[TokenId], msgspec.Meta(extra_json_schema={"minItems": 1})]],
        msgspec.Meta(extra_json_schema={"minItems": 1}),
    ]
)

# -- messages ---------------------------------------------------------------------------------------------------------


Detail = Literal["auto", "low", "high", "original", None]


class ImageAddress(msgspec.Struct):
    """An image by its URL, and the detail in which it is read."""

    url: Annotated[str, described("data:image/...;base64,..., or http(s) where --allow-media-from names the host.")]
    detail: Annotated[Detail, described("low: at most 512 pixels a side. Default: as it is.")] = None


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image in a message."""

    image_url: ImageAddress | str


class SoundData(msgspec.Struct):
    """A sound."""

    data: Annotated[str, described("In base64.")]
    format: Literal["wav", "mp3", "flac"]


class SoundPart(msgspec.Struct, tag_field="type", tag="input_audio"):
    """A sound in a message."""

    input_audio: SoundData


class Message(msgspec.Struct, kw_only=True):
    """A message of a conversation. A chat template gets its other fields as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | list[Any] | dict[str, Any] | None,
        described("A text, or parts: text, image_url, input_audio, file and others. A template gets a text's fields."),
    ] = None
    name: str | None = None
    refusal: Annotated[str | None, described("The refusal in an earlier answer.")] = None
    reasoning: Annotated[str | None, described("The model's reasoning before its answer.")] = None
    reasoning_content: Annotated[str | None, described("Another name of reasoning.")] = None
    tool_calls: Annotated[list[dict[str, Any]] | None, described("The calls that an earlier answer made.")] = None
    function_call: Annotated[dict[str, Any] | None, described("The older form of one call.")] = None
    tool_call_id: Annotated[str | None, described("The call that a result belongs to.")] = None


# Messages and items have fields that no struct lists, so bodies hold them unchanged.
REF = "#/components/schemas/{name}"
GivenMessage = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema={"$ref": REF.format(name="Message")})]

# -- tools ------------------------------------------------------------------------------------------------------------


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, described("The JSON Schema of an object with its arguments.")] = None
    returns: Annotated[dict[str, Any] | None, described("The JSON Schema of its result, for templates.")] = (
        msgspec.field(name="return", default=None)
    )
    strict: Strict = None


class Tool(msgspec.Struct):
    """A function that the model may call, as an entry of a list of tools."""

    type: Annotated[str, described("function. Tools of other types are left out.")]
    function: Function | None = None


class FunctionName(msgspec.Struct):
    """The function of a tool, by its name."""

    name: str


class NamedChoice(msgspec.Struct, tag_field="type", tag="function"):
    """This tool must be called."""

    function: FunctionName


class AllowedTool(msgspec.Struct):
    """One of the tools that may be called."""

    function: FunctionName


class Allowed(msgspec.Struct):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], described("The tools that are left.", minItems=1)]


class AllowedChoice(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """Only some of the tools may be called."""

    allowed_tools: Allowed


class ChosenTool(msgspec.Struct, kw_only=True):
    """A tool, by its name, and by its namespace if it is in one."""

    type: str = "function"
    name: str | None = None
    namespace: str | None = None


class ResponseChoice(ChosenTool, kw_only=True):
    """Requires a call of the tool with this type and name, or limits calls to some of the tools (`allowed_tools`)."""

    type: Annotated[str, described("function, custom or allowed_tools. Others cannot be forced.")]
    mode: Annotated[Literal["auto", "required", None], described("The mode of allowed_tools.")] = None
    tools: Annotated[list[ChosenTool] | None, described("The tools that allowed_tools leaves.", minItems=1)] = None


ChoiceWord = Literal["none", "auto", "required"]
ToolChoice = ChoiceWord | NamedChoice | AllowedChoice
ResponseToolChoice = ChoiceWord | ResponseChoice

# -- constraints on the answer ----------------------------------------------------------------------------------------
# Other parameters could change the answer, so they are refused.

Schema = Annotated[dict[str, Any], described("A JSON Schema.")]
# Clients with one type for all formats send null for the other formats' fields.
Nothing = Annotated[None, described("Must be null, or left out.")]


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON Schema and its name."""

    name: Name
    schema: Schema
    description: str | None = None
    strict: Annotated[
        bool | None, described("false: keywords that cannot be obeyed are left out, and named. Otherwise a 400.")
    ] = None


class AnyText(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """No constraint."""

    schema: Nothing = None
    json_schema: Nothing = None
    value: Nothing = None


class AnyObject(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """A JSON object, with the extensions of llama.cpp and Hugging Face's client for a schema."""

    schema: Annotated[dict[str, Any] | str | None, described("A JSON Schema, as an object or a string.")] = None
    value: Annotated[dict[str, Any] | str | None, described("Like schema: its name in TGI.")] = None
    json_schema: Nothing = None


class AnyJSON(AnyObject, tag_field="type", tag="json", forbid_unknown_fields=True):
    """TGI's name for the type json_object."""


class UnnamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON Schema, in TGI's form."""

    schema: Annotated[dict[str, Any] | str, described("A JSON Schema, as an object or a string.")]
    name: str | None = None


class BySchema(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON by a schema, which is in one of two fields."""

    json_schema: NamedSchema | None = None
    value: UnnamedSchema | None = None
    schema: Nothing = None


class ByRegex(msgspec.Struct, tag_field="type", tag="regex", forbid_unknown_fields=True):
    """Text by a regex, in TGI's form."""

    value: str
    schema: Nothing = None
    json_schema: Nothing = None


ResponseFormat = AnyText | AnyObject | AnyJSON | BySchema | ByRegex


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of json, regex, choice, grammar and json_object."""

    json: Annotated[dict[str, Any] | str | None, described("A JSON Schema, as an object or a string.")] = None
    regex: str | None = None
    choice: Annotated[list[str] | None, described("The only answers.", minItems=1)] = None
    grammar: Annotated[str | None, described("A grammar in GBNF, or in Lark's form.")] = None
    json_object: bool | None = None
    disable_any_whitespace: Annotated[bool | None, described("Keeps all JSON in one line.")] = None
    disable_additional_properties: Annotated[bool | None, described("Must be false.", enum=[False, None])] = None
    structural_tag: Nothing = None
    whitespace_pattern: Nothing = None


MAX_PATTERN_SIZE = 1024
MAX_PATTERN_COUNT = 256
MAX_LOOP_LENGTH = 2**15


class RepetitionDetection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """When a choice is in a loop: its last tokens repeat some tokens again and again. A choice in a loop ends with the
    finish reason `repetition`."""

    max_pattern_size: Annotated[
        Integer | None, described("The most tokens that are repeated. 0 and null: off.", 0, MAX_PATTERN_SIZE)
    ] = None
    min_pattern_size: Annotated[
        Integer | None, described("The least tokens that are repeated. 0 means 1. Default: 1.", 0, MAX_PATTERN_SIZE)
    ] = None
    min_count: Annotated[
        Integer | None, described("How often they are there in a row, at least.", 2, MAX_PATTERN_COUNT)
    ] = None
    min_length: Annotated[
        Integer | None, described("The least tokens of all these together. vLLM has none.", 0, MAX_LOOP_LENGTH)
    ] = None


class PlainText(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True, omit_defaults=True):
    """No constraint."""

    schema: Nothing = None
    name: Nothing = None


class PlainObject(PlainText, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """A JSON object."""


class PlainSchema(NamedSchema, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON by a schema."""


TextFormat = PlainText | PlainObject | PlainSchema


# OpenAI's and Anthropic's levels, and those of chat templates.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "no_think"]


# -- items of responses -----------------------------------------------------------------------------------------------


class InputImage(msgspec.Struct, tag_field="type", tag="input_image", kw_only=True):
    """An image in a message, or in the output of a call: its URL, or the id of a file."""

    image_url: Annotated[str | None, described("Like that of image_url in chat.")] = None
    file_id: Annotated[str | None, described("The id of a file of /v1/files.")] = None
    detail: Annotated[Detail, described("Like that of image_url in chat.")] = None


class Base64Source(msgspec.Struct, tag_field="type", tag="base64"):
    """An image in the body itself."""

    data: Annotated[str, described("In base64.")]
    media_type: Annotated[str | None, described("Changes nothing: the file itself says what it is.")] = None


class URLSource(msgspec.Struct, tag_field="type", tag="url"):
    """An image by its URL."""

    url: str


class FileSource(msgspec.Struct, tag_field="type", tag="file"):
    """An image by the id of a file of /v1/files."""

    file_id: str


class ImageBlock(msgspec.Struct):
    """An image in a message of /v1/messages."""

    source: Base64Source | URLSource | FileSource


class InputItem(msgspec.Struct, kw_only=True):
    """An item of a conversation. Its type decides which of the other fields it needs; without a type it is a message.

    The text of items of other types is read, if they have any.
    """

    type: Annotated[
        str | None,
        described(
            "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, reasoning, "
            "item_reference, compaction or compaction_trigger."
        ),
    ] = None
    id: str | None = None
    role: Annotated[
        Literal["user", "assistant", "system", "developer", None], described("The author of a message.")
    ] = None
    content: Annotated[
        str | list[Any] | dict[str, Any] | None,
        described("The text of a message or of reasoning, or parts such as input_text, input_image and output_text."),
    ] = None
    call_id: Annotated[str | None, described("The id of a call, repeated in its output.")] = None
    name: Annotated[str | None, described("The function that is called.")] = None
    namespace: Annotated[str | None, described("The namespace of the called function.")] = None
    input: Annotated[str | None, described("The input of a call of a custom tool.")] = None
    encrypted_content: Annotated[str | None, described("Reasoning or a compaction, as the server sent it.")] = None
    arguments: Annotated[Any, described("The arguments of a call, as JSON.")] = None
    output: Annotated[Any, described("The result of a call: a text, or parts.")] = None
    summary: Annotated[list[Any] | None, described("The summary of reasoning.")] = None
