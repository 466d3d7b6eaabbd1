"""The objects of files and batches in OpenAI's form, and the lines of a batch's input and output."""

from __future__ import annotations

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from io import BytesIO
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from oaiserve.routes.bodies import MetadataBody
from oaiserve.routes.objects import described
from oaiserve.routes.pages import Page
from oaiserve.routes.protocol import decoder_of
from oaiserve.routes.sse import one_line

Status = Literal["failed", "in_progress", "completed", "expired", "cancelled"]
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
WINDOW_SECONDS = 24 * 3600
MOST_LINES = 50_000  # OpenAI's limit
MOST_BLANK_LINES = 20 * MOST_LINES
ASSUMED_TOKENS = 256  # of an answer, where its request sets no limit
MOST_ERRORS = 20  # that a failed batch tells of


class FileObject(msgspec.Struct, kw_only=True):
    """A file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output", "vision", "user_data"]
    status: str = "processed"
    object: str = "file"


class FilePage(Page[FileObject]):
    """Files."""


class BatchBody(MetadataBody, kw_only=True):
    """A client begins a batch."""

    input_file_id: Annotated[str, described("A file with the purpose batch: a request per line.")]
    endpoint: Annotated[Endpoint, described("The route of all of its requests.")]
    completion_window: Annotated[Literal["24h"], described("What is not done by then is given up.")]


class LineError(msgspec.Struct):
    """A fault in a line of a batch's input file: its code, a sentence about it, and the line's number."""

    code: str
    message: str
    line: int
    param: str | None = None


class LineErrors(msgspec.Struct):
    """The faults in the lines of a batch's input file, for which the batch has failed."""

    data: list[LineError]
    object: str = "list"


class Counts(msgspec.Struct):
    """The numbers of a batch's requests: of all, and of those that have ended in each way."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokens(msgspec.Struct):
    """Tokens found in the prefix cache."""

    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    """Tokens of reasoning."""

    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """The tokens of all answers so far."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)
    output_tokens_details: ReasoningTokens = msgspec.field(default_factory=ReasoningTokens)


class Estimate(msgspec.Struct):
    """The cost of a batch as estimated before it began, if nobody else uses the machine."""

    prompt_tokens: int
    output_tokens: int  # at most, where the requests say so
    expected_seconds: float | None  # None: the cost of steps was not known yet


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch."""

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: Status = "in_progress"
    completion_window: str = "24h"
    errors: LineErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None
    oaiserve: Estimate | None = None
    object: str = "batch"

    def end(self, status: Status, now: int) -> None:
        self.status = status
        setattr(self, f"{status}_at", now)


class BatchPage(Page[BatchObject]):
    """Batches, newest first."""


class Line(NamedTuple):
    """A request of a batch."""

    number: int  # from 1
    custom_id: str
    body: bytes
    most_tokens: int = ASSUMED_TOKENS  # of its answers, for an estimate


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class _Body(msgspec.Struct):
    stream: bool | None = None
    background: bool | None = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None

    @property
    def most_tokens(self) -> int:
        limits = (self.max_completion_tokens, self.max_tokens, self.max_output_tokens, ASSUMED_TOKENS)
        most = next(limit for limit in limits if isinstance(limit, int))
        return most * (self.n if isinstance(self.n, int) else 1)


class _Used(msgspec.Struct):
    usage: dict[str, Any] | None = None  # all that is read of an answer, which may have a million numbers


class _Answer(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: _Answer | None
    error: dict[str, str] | None


def result(batch_id: str, line: Line, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of the output that answers a request."""
    answer = _Answer(status, request_id, msgspec.Raw(body))
    return _written(_Result(f"{batch_id}_req_{line.number}", line.custom_id, answer, None))


def given_up(batch_id: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """Return the line of the output of a request that is not answered."""
    error = {"code": code, "message": message}
    return _written(_Result(f"{batch_id}_req_{number}", custom_id, None, error))


def _written(found: _Result) -> bytes:
    return one_line(msgspec.json.encode(found)) + b"\n"


def usage_of(body: bytes) -> BatchUsage:
    """Return the usage of an answer of any route."""
    found = decoder_of(_Used).decode(body).usage or {}
    prompt, answer = ("input", "output") if "input_tokens" in found else ("prompt", "completion")
    cached = (found.get(f"{prompt}_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (found.get(f"{answer}_tokens_details") or {}).get("reasoning_tokens") or 0
    num_prompt, num_answer = found.get(f"{prompt}_tokens") or 0, found.get(f"{answer}_tokens") or 0
    total = num_prompt + num_answer
    return BatchUsage(num_prompt, num_answer, total, CachedTokens(cached), ReasoningTokens(reasoning))


def is_utf16(content: bytes | bytearray) -> bool:
    """Return whether a text is in UTF-16 or UTF-32, with a byte-order mark or without one."""
    return content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or 0 in content[:4]


def lines_of(content: bytes, endpoint: str) -> tuple[list[Line], list[LineError]]:
    """Return the requests in the content of a file, and what is wrong with it."""
    lines: list[Line] = []
    errors: list[LineError] = []
    seen: set[str] = set()
    number = 0
    for number, raw in enumerate(BytesIO(content), 1):
        text = raw.strip().removeprefix(BOM_UTF8)  # which editors of Windows write, and `cat` leaves within
        if text:
            found = _read(number, text, endpoint, seen)
            lines.append(found) if isinstance(found, Line) else errors.append(found)
        if len(lines) > MOST_LINES or len(errors) == MOST_ERRORS or number > MOST_BLANK_LINES:
            break
    if len(lines) > MOST_LINES or number > MOST_BLANK_LINES:
        errors.append(LineError("too_many_requests", f"A batch has at most {MOST_LINES} requests.", MOST_LINES + 1))
    if not lines and not errors:
        errors.append(LineError("empty_file", "The file has no request.", 1))
    return lines, errors


def _read(number: int, text: bytes, endpoint: str, seen: set[str]) -> Line | LineError:
    try:
        line: _Line = decoder_of(_Line).decode(text)
        asked: _Body = decoder_of(_Body).decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineError("invalid_json_line", f"The line is no request of a batch: {error}.", number)
    if line.url != endpoint:
        return LineError("mismatched_url", f"'url' must be {endpoint}, the endpoint of the batch.", number, "url")
    if line.custom_id in seen:
        return LineError("duplicate_custom_id", "'custom_id' must be another one for each line.", number, "custom_id")
    if asked.stream or asked.background:
        name = "stream" if asked.stream else "background"
        return LineError("unsupported_parameter", f"'{name}' must not be true in a batch.", number, f"body.{name}")
    seen.add(line.custom_id)
    return Line(number, line.custom_id, bytes(line.body), asked.most_tokens)
