"""The objects of files and batches in OpenAI's form, and the lines of a batch's input and output."""

from __future__ import annotations

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from io import BytesIO
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.errors import ANTHROPIC_PATH, InternalError, InvalidRequest
from oaiserve.http.fair_turns import at_once
from oaiserve.routes.adaptations import HEADER
from oaiserve.routes.answer.paging import Page
from oaiserve.routes.answer.sse import one_line
from oaiserve.routes.intake.body_types import MAX_CHOICES, MAX_INT32, MetadataBody
from oaiserve.routes.intake.decode import decoder_of
from oaiserve.routes.intake.invalid import Kind, invalid_type
from oaiserve.routes.intake.object_types import described
from oaiserve.wire.surrogates import REPLACEMENT, as_sent, without_halves

Status = Literal["failed", "in_progress", "completed", "expired", "cancelled"]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
# OpenAI has three names for files that prompts refer to, and clients differ in which one they send.
GivenPurpose = Literal["assistants", "batch", "vision", "user_data"]
GIVEN_PURPOSES: tuple[GivenPurpose, ...] = get_args(GivenPurpose)
EXPIRED = ("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = ("batch_cancelled", "The batch was cancelled before this request was executed.")
_MESSAGE_RESULTS = {EXPIRED[0]: "expired", CANCELLED[0]: "canceled"}  # keyed by OpenAI's codes
WINDOW_SECONDS = 24 * 3600
MOST_LINES = 50_000  # OpenAI's limit
MOST_BLANK_LINES = 20 * MOST_LINES
ASSUMED_TOKENS = 256  # tokens of an answer if its request sets no limit
MOST_ERRORS = 20  # errors that a failed batch lists
MOST_REASON_CHARACTERS = 300  # characters of an error, which may quote the line
MOST_ID_CHARACTERS = 512  # characters of a custom_id
MOST_NUMBER_BYTES = 16  # digits of a number that counts for an estimate


class FileObject(msgspec.Struct, kw_only=True):
    """A file. Those of Anthropic's clients have a `mime_type`, as their uploads state it."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: GivenPurpose | Literal["batch_output"]
    status: str = "processed"
    object: str = "file"
    mime_type: str | UnsetType = UNSET


class FilePage(Page[FileObject]):
    """Files."""


class BatchBody(MetadataBody, kw_only=True):
    """A new batch."""

    input_file_id: Annotated[str, described("A file with the purpose batch: a request per line.")]
    endpoint: Annotated[Endpoint, described("The route of all of its requests.")]
    completion_window: Annotated[Literal["24h"], described("Requests that are not done by then are given up.")]


class LineError(msgspec.Struct):
    """A fault in a line of a batch's input file: its code, a sentence about it, and the line's number."""

    code: str
    message: str
    line: int
    param: str | None = None


class LineErrors(msgspec.Struct):
    """The faults in the lines of a batch's input file, because of which the batch has failed."""

    data: list[LineError]
    object: str = "list"


class Counts(msgspec.Struct):
    """The number of a batch's requests, and of those that have ended in each way."""

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
    """The cost of a batch, estimated before it began, if nobody else uses the machine."""

    prompt_tokens: int
    output_tokens: int  # maximum, if the requests set a limit
    expected_seconds: float | None  # None: the cost of steps was still unknown


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

    @property
    def is_of_messages(self) -> bool:
        """Whether it is a batch of Anthropic's API. Its requests are in a file that no client sees."""
        return self.endpoint == ANTHROPIC_PATH

    @property
    def ended_at(self) -> int | None:
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at

    def end(self, status: Status, now: int) -> None:
        self.status = status
        if status == "cancelled":
            self.cancelling_at = now
        setattr(self, f"{status}_at", now)


class BatchPage(Page[BatchObject]):
    """Batches, newest first."""


class Line(NamedTuple):
    """A request of a batch: a line of its input file."""

    number: int  # counted from 1
    custom_id: str
    start: int  # byte offset in the file
    num_bytes: int
    most_tokens: int = ASSUMED_TOKENS  # tokens of its answers, for an estimate


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class _Body(msgspec.Struct):
    stream: bool | None = None
    background: bool | None = None
    # The route refuses wrong values, which may be of any type and size.
    n: msgspec.Raw = msgspec.Raw()
    max_tokens: msgspec.Raw = msgspec.Raw()
    max_completion_tokens: msgspec.Raw = msgspec.Raw()
    max_output_tokens: msgspec.Raw = msgspec.Raw()

    @property
    def most_tokens(self) -> int:
        limits = (self.max_completion_tokens, self.max_tokens, self.max_output_tokens)
        most = next((limit for limit in map(_number, limits) if limit is not None), ASSUMED_TOKENS)
        return min(most, MAX_INT32) * min(_number(self.n) or 1, MAX_CHOICES)


def _number(value: msgspec.Raw) -> int | None:
    text = bytes(memoryview(value)[:MOST_NUMBER_BYTES]).strip()
    if text.isdigit():
        return int(text)
    return None


class _Used(msgspec.Struct):
    # The only field of an answer that is read; the answer may have a million numbers.
    usage: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw
    headers: dict[str, str] | UnsetType = UNSET  # only what was adapted


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: _Answer | None
    error: dict[str, str] | None


class _MessageResult(msgspec.Struct):
    """A line of the output in Anthropic's form."""

    custom_id: str
    result: dict[str, Any]
    headers: dict[str, str] | UnsetType = UNSET


class Answered(NamedTuple):
    """The answer of a route to the request in a line."""

    status: int
    may_retry: bool  # whether a retry may get another answer
    request_id: str
    body: bytes
    adapted: str = ""  # the adaptations, as in the header
    client: str = ""  # the client that sent the request, as in its state
    cpu_ns: int = 0  # CPU time of the work on its body


def result(batch: BatchObject, line: Line, answered: Answered) -> bytes:
    """Return the line of the output with the answer to a request. It has a header of the answer, which would be lost
    otherwise."""
    status, _, request_id, body, adapted, *_ = answered
    text = msgspec.Raw(body)
    headers = {HEADER: adapted} if adapted else UNSET
    if batch.is_of_messages:
        outcome = {"type": "succeeded", "message": text} if status == 200 else {"type": "errored", "error": text}
        return _written(_MessageResult(line.custom_id, outcome, headers))
    answer = _Answer(status, request_id, text, headers)
    return _written(_Result(f"{batch.id}_req_{line.number}", line.custom_id, answer, None))


def given_up(batch: BatchObject, number: int, custom_id: str, code: str, message: str) -> bytes:
    """Return the line of the output for a request that is not answered."""
    if batch.is_of_messages:
        outcome: dict[str, Any] = {"type": _MESSAGE_RESULTS.get(code, "errored")}
        if outcome["type"] == "errored":
            outcome["error"] = InternalError(message).body(ANTHROPIC_PATH)
        return _written(_MessageResult(custom_id, outcome))
    error = {"code": code, "message": message}
    return _written(_Result(f"{batch.id}_req_{number}", custom_id, None, error))


def _written(result: _Result | _MessageResult) -> bytes:
    return one_line(msgspec.json.encode(result)) + b"\n"


def usage_of(body: bytes) -> BatchUsage:
    usage = decoder_of(_Used).decode(body).usage or {}
    if "input_tokens" in usage:
        prompt = "input"
        answer = "output"
    else:
        prompt = "prompt"
        answer = "completion"
    cached = (usage.get(f"{prompt}_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get(f"{answer}_tokens_details") or {}).get("reasoning_tokens") or 0
    num_prompt = usage.get(f"{prompt}_tokens") or 0
    num_answer = usage.get(f"{answer}_tokens") or 0
    total = num_prompt + num_answer
    return BatchUsage(num_prompt, num_answer, total, CachedTokens(cached), ReasoningTokens(reasoning))


def is_utf16(content: bytes | bytearray) -> bool:
    """Return whether a text is in UTF-16 or UTF-32, with a byte-order mark or without one."""
    return content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or 0 in content[:4]


class LineReader:
    """Reads the requests in the content of a file, piece by piece. Only an unfinished line is held in memory."""

    def __init__(self, endpoint: str, most_line_bytes: int) -> None:
        self._endpoint = endpoint
        self._most_line_bytes = most_line_bytes
        self._lines: list[Line] = []
        self._errors: list[LineError] = []
        self._seen: set[str] = set()
        self._number = 0  # lines that have ended
        self._start = 0  # start of the unfinished line
        self._open = bytearray()  # the beginning of that line, up to its limit
        self._open_bytes = 0

    @property
    def is_done(self) -> bool:
        """Whether the rest of the file would change nothing."""
        return len(self._lines) > MOST_LINES or len(self._errors) == MOST_ERRORS or self._number > MOST_BLANK_LINES

    def feed(self, data: bytes) -> None:
        for part in BytesIO(data):
            self._open_bytes += len(part)
            if self._open_bytes <= self._most_line_bytes:
                self._open += part
            if part.endswith(b"\n"):
                self._end_line()
            if self.is_done:
                return

    def end(self) -> tuple[list[Line], list[LineError]]:
        if self._open_bytes and not self.is_done:
            self._end_line()
        if len(self._lines) > MOST_LINES or self._number > MOST_BLANK_LINES:
            text = f"A batch has at most {MOST_LINES} requests."
            self._errors.append(LineError("too_many_requests", text, MOST_LINES + 1))
        if not self._lines and not self._errors:
            self._errors.append(LineError("empty_file", "The file has no request.", 1))
        return self._lines, self._errors

    def _end_line(self) -> None:
        self._number += 1
        if self._open_bytes > self._most_line_bytes:
            text = f"A line may have at most {self._most_line_bytes} bytes (--body-limit), this one has more."
            self._errors.append(LineError("line_too_long", text, self._number))
        elif text_of_line := without_mark(self._open):
            line = self._read(text_of_line)
            self._lines.append(line) if isinstance(line, Line) else self._errors.append(line)
        self._start += self._open_bytes
        self._open_bytes = 0
        self._open.clear()

    def _read(self, text: bytes) -> Line | LineError:
        number = self._number
        try:
            line, _ = _parsed(text)
            body = _decoded(_Body, line.body)
        except (InvalidRequest, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if isinstance(error, RecursionError):
                reason = "it is nested too deeply"
            else:
                reason = str(error)[:MOST_REASON_CHARACTERS].removesuffix(".")
            return LineError("invalid_json_line", f"The line is no request of a batch: {reason}.", number)
        if line.url != self._endpoint:
            reason = f"'url' must be {self._endpoint}, the endpoint of the batch."
            return LineError("mismatched_url", reason, number, "url")
        if len(line.custom_id) > MOST_ID_CHARACTERS:
            reason = f"'custom_id' must have at most {MOST_ID_CHARACTERS} characters, got {len(line.custom_id)}."
            return LineError("custom_id_too_long", reason, number, "custom_id")
        if line.custom_id in self._seen:
            return LineError(
                "duplicate_custom_id", "'custom_id' must be another one for each line.", number, "custom_id"
            )
        if body.stream or body.background:
            name = "stream" if body.stream else "background"
            return LineError("unsupported_parameter", f"'{name}' must not be true in a batch.", number, f"body.{name}")
        self._seen.add(line.custom_id)
        return Line(number, line.custom_id, self._start, self._open_bytes, body.most_tokens)


def without_mark(line: bytes | bytearray) -> bytes:
    return bytes(line.strip().removeprefix(BOM_UTF8))  # Editors on Windows write this mark, and `cat` leaves it inside.


def request_of(line: bytes) -> bytes:
    """Return the body of the request in a line, as the client has written it: the route replaces halves of pairs."""
    text = without_mark(line)
    parsed, readable = _parsed(text)
    return as_sent(bytes(parsed.body), readable, text)


def _parsed(text: bytes) -> tuple[_Line, bytes]:
    """Return a line, and the text that was read, in which other escapes replace halves of surrogate pairs."""
    try:
        return _decoded(_Line, text), text
    except msgspec.DecodeError:
        readable = bytearray(text)
        if not (halves := at_once(without_halves(readable))):
            raise
        line = _decoded(_Line, readable)
        _check_id(line, readable, halves)
        return line, bytes(readable)


def _check_id(line: _Line, readable: bytearray, halves: list[int]) -> None:
    """Raise InvalidRequest if halves of pairs were replaced in the custom_id, which must come back as it was sent."""
    other = bytearray(readable)
    for at in halves:
        other[at : at + len(REPLACEMENT)] = rb"\ufffe"
    if _decoded(_Line, other).custom_id != line.custom_id:
        raise InvalidRequest("'custom_id' has half of a surrogate pair, which is no character.", param="custom_id")


def _decoded(kind: type[Kind], text: bytes | bytearray | msgspec.Raw) -> Kind:
    """Decode a part of a line. Raises InvalidRequest for a wrong type, and the decoder's errors."""
    try:
        decoded: Kind = decoder_of(kind).decode(text)
    except msgspec.ValidationError as error:
        raise invalid_type(kind, str(error)) from None
    return decoded
