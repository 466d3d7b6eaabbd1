"""The objects that /v1/responses sends: a response, and the events of a stream."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.routes.exchange import RequestTimings
from oaiserve.routes.logprobs import ContentToken
from oaiserve.routes.responses.output import Item, OutputText, ReasoningText


class InputTokensDetails(msgspec.Struct):
    """Tokens whose keys and values were in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Tokens of the model's reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """A response took this many tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """The answer was cut for this reason."""

    reason: str


class ResponseError(msgspec.Struct):
    """A response failed because of this. Its codes are others than those of HTTP errors."""

    code: str
    message: str
    request_id: str | UnsetType = UNSET
    trace_id: str | UnsetType = UNSET


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response: its state, its output, and the parameters as they took effect."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None
    status: str
    background: bool = False
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[Item]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    metadata: dict[str, str]
    user: str | None
    usage: ResponseUsage | None


class ResponseEvent(msgspec.Struct, omit_defaults=True):
    """An event of a stream. `type` says what happened, and which of the other fields it has."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ContentToken] | msgspec.Raw | UnsetType = UNSET
    timings: RequestTimings | UnsetType = UNSET
