"""The bodies of Ollama's API. Each field is obeyed, refused, or named as left out; `requests` and `options` say which.

The official Python package's types have no other fields, as `tests/plugins/ollama/test_fields.py` checks.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from oaiserve.routes.intake.body_types import MAX_INT32, MAX_LOGPROBS, MAX_TOOLS
from oaiserve.routes.intake.object_types import Integer, described

Model = Annotated[str, described("Name of the model. ':latest' at its end is left out.")]
Options = Annotated[dict[str, Any] | None, described("Sampling, and settings of Ollama's runner.")]
KeepAlive = Annotated[
    str | Integer | None, described("Is left out: models stay loaded. 0 without a prompt is refused.")
]
Format = Annotated[str | dict[str, Any] | None, described("json for an object, or a JSON Schema.")]
Think = Annotated[bool | str | None, described("Whether to reason, or with what effort: low, medium or high.")]
Streams = Annotated[bool | None, described("Send the answer as lines of JSON while it is generated. Default: true.")]
Images = Annotated[list[str] | None, described("Images in base64.")]
Unused = Annotated[bool | None, described("Is left out: a prompt that is too long is refused.")]


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a call."""

    name: str
    arguments: dict[str, Any] | str | None = None
    index: Integer | None = None


class MessageCall(msgspec.Struct, kw_only=True):
    """A call that the model has made."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """A message of a conversation."""

    role: str
    content: str | None = None
    thinking: Annotated[str | None, described("The reasoning before an earlier answer.")] = None
    images: Images = None
    tool_calls: list[MessageCall] | None = None
    tool_name: Annotated[str | None, described("With the role tool: the function whose result this is.")] = None
    tool_call_id: Annotated[str | None, described("With the role tool: the call whose result this is.")] = None
    name: Annotated[str | None, described("Older name of tool_name.")] = None


class AskBody(msgspec.Struct, kw_only=True):
    """The fields that /api/chat and /api/generate share."""

    model: Model
    stream: Streams = None
    format: Format = None
    options: Options = None
    keep_alive: KeepAlive = None
    think: Think = None
    logprobs: Annotated[bool | None, described("Send the log-probability of each token.")] = None
    top_logprobs: Annotated[Integer | None, described("Alternatives for each token.", 0, MAX_LOGPROBS)] = None
    truncate: Unused = None
    shift: Unused = None


class OllamaChatBody(AskBody, kw_only=True):
    """The conversation to answer, and how."""

    messages: Annotated[list[OllamaMessage] | None, described("The conversation so far.")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, described("Functions that the model may call.", maxItems=MAX_TOOLS)
    ] = None


class GenerateBody(AskBody, kw_only=True):
    """The prompt to answer, and how."""

    prompt: str | None = None
    suffix: Annotated[str | None, described("The text after the answer, which fills the gap.")] = None
    system: Annotated[str | None, described("The system's message, before the prompt.")] = None
    template: Annotated[str | None, described("Is refused: the model's own chat template is used.")] = None
    context: Annotated[list[Integer] | None, described("Is refused: /api/chat takes the messages so far.")] = None
    raw: Annotated[bool | None, described("Continue the prompt as it is, without a chat template.")] = None
    images: Images = None
    width: Annotated[Integer | None, described("Is refused: no images are generated.")] = None
    height: Annotated[Integer | None, described("Is refused: no images are generated.")] = None
    steps: Annotated[Integer | None, described("Is refused: no images are generated.")] = None


class EmbedTextsBody(msgspec.Struct, kw_only=True):
    """The texts to embed, and how."""

    model: Model
    input: Annotated[str | list[str], described("A text, or a list of texts.")]
    truncate: Annotated[bool | None, described("Cut texts that are too long, or refuse them. Default: true.")] = None
    dimensions: Annotated[
        Integer | None, described("Cut vectors to this many numbers, if the model can.", 1, MAX_INT32)
    ] = None
    options: Options = None
    keep_alive: KeepAlive = None


class EmbedTextBody(msgspec.Struct, kw_only=True):
    """The text to embed."""

    model: Model
    prompt: str | None = None
    options: Options = None
    keep_alive: KeepAlive = None


class NamedBody(msgspec.Struct, kw_only=True):
    """A model, by its name."""

    model: Annotated[str | None, described("Name of the model. ':latest' at its end is left out.")] = None
    name: Annotated[str | None, described("Older name of model.")] = None
    stream: Streams = None
    insecure: Annotated[bool | None, described("Changes nothing: nothing is downloaded.")] = None
    verbose: Annotated[bool | None, described("Changes nothing: there are no tables of tokens to show.")] = None
