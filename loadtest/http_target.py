"""Send requests to an OpenAI-compatible server and record each one as a Sample.

Reads are stamped as they arrive; JSON is parsed only after the request has ended.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic_ns
from typing import Any, Literal

import httpcore
import httpx
import msgspec

from loadtest.errors import UsageError
from loadtest.prompts import Call, Workload
from loadtest.sample import Sample
from loadtest.sse import DONE, EventSplitter
from loadtest.transport import StampedBackend, StampedTransport
from oaiserve.config import is_header_value

# httpcore goes through all connections of a pool whenever a request begins or ends, so pools are kept small.
STREAMS_PER_CLIENT = 8

CONNECT_SECONDS = 10.0  # after which a connection attempt counts as failed
SLOW_READ_SECONDS = 0.1  # pause of a slow client after each read
MOST_PORT = 2**16 - 1
_HEADER = re.compile(r"\s*[!#$%&'*+.^_`|~0-9A-Za-z-]+\s*:[\t -~]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The options of the server and of the requests to it."""

    url: str | None = None
    """Address of the server, with or without /v1. Default: that of the server that started last on this machine."""

    model: str | None = None
    """Name of the model. Default: the first that /v1/models lists."""

    endpoint: Literal["completions", "chat"] = "completions"
    """Route to send to."""

    stream: bool = True
    """Ask for server-sent events. Without them, the first token counts when the whole answer arrives."""

    extra_body: str | None = None
    """JSON object to add to each request."""

    header: tuple[str, ...] = ()
    """Header to send, as in "name: value". May be repeated."""

    api_key: str | None = None
    """Sent as "Authorization: Bearer KEY". Default: $OPENAI_API_KEY."""

    ca_certificate: Path | None = None
    """PEM file with the certificates to trust for https. Default: $SSL_CERT_FILE, or else the system's."""

    timeout_seconds: float = 600.0
    """Time after which a request counts as failed."""

    trace_share: float = 0.01
    """Share of the requests that a server should trace, 0 to 1: their traceparent has the sampled flag."""

    scrape_seconds: float = 1.0
    """Time between two reads of the server's gauges during a run. 0: read /metrics only before and after it."""

    processes: int = 1
    """Processes that send. One can take a few thousand tokens per second; the report has their CPU use."""

    def __post_init__(self) -> None:
        if self.url is not None and not _is_url(self.url):
            raise UsageError(f"--url is '{self.url}', but must be like http://127.0.0.1:8000.")
        if self.processes < 1:
            raise UsageError(f"--processes is {self.processes}, but must be at least 1.")
        if not 0 <= self.trace_share <= 1:
            raise UsageError(f"--trace-share is {self.trace_share:g}, but must be between 0 and 1.")
        if self.scrape_seconds < 0:
            raise UsageError(f"--scrape-seconds is {self.scrape_seconds:g}, but must be at least 0.")
        if self.ca_certificate is not None:
            self.tls_context()
        if not self.timeout_seconds > 0:
            raise UsageError(f"--timeout-seconds is {self.timeout_seconds:g}, but must be more than 0.")
        for header in self.header:
            if _HEADER.fullmatch(header) is None:
                raise UsageError(f"--header is '{header}', but must be like 'name: value', in ASCII.")
        if self.api_key and not is_header_value(self.api_key):  # The message must not contain the key.
            raise UsageError("--api-key, or OPENAI_API_KEY, must be printable ASCII without spaces.")
        try:
            extra = json.loads(self.extra_body or "{}")
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise UsageError(f"--extra-body is '{self.extra_body}', but must be a JSON object.")

    def tls_context(self) -> ssl.SSLContext:
        """Return the certificates to trust. Raises UsageError if their file cannot be read."""
        try:
            return ssl.create_default_context(cafile=self.ca_certificate)
        except ssl.SSLError as error:
            reason = "which has no certificate in PEM format"
            raise UsageError(f"--ca-certificate is '{self.ca_certificate}', {reason}.") from error
        except OSError as error:
            raise UsageError(
                f"--ca-certificate is '{self.ca_certificate}', which cannot be read: {error.strerror}."
            ) from error

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "oaiserve-loadtest"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers | {
            name.strip().lower(): value.strip() for name, _, value in (h.partition(":") for h in self.header)
        }


def _is_url(text: str) -> bool:
    try:
        port = httpx.URL(text).port
    except httpx.InvalidURL:
        return False
    return re.fullmatch(r"https?://[^/]+(/.*)?", text) is not None and (port or 0) <= MOST_PORT


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: Any = None  # a text, or a list of parts, as in Mistral's chunks of thinking
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None

    @property
    def is_parsed(self) -> bool:
        """Return whether the server extracted it from the model's text by parsing: reasoning, or part of a tool
        call."""
        functions = [call.function for call in self.tool_calls or ()]
        is_call = any(function and (function.name or function.arguments) for function in functions)
        has_parts = bool(self.content) and not isinstance(self.content, str)
        return bool(self.reasoning or self.reasoning_content) or is_call or has_parts


class _Choice(msgspec.Struct):
    index: int | None = None  # None: there is only one choice
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        part = self.delta or self.message
        content = part.content if part else self.text
        return content if isinstance(content, str) else ""

    @property
    def is_parsed(self) -> bool:
        part = self.delta or self.message
        return part is not None and part.is_parsed


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Message(msgspec.Struct):
    """The fields of a chunk or a whole answer that the load test reads."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    timings: Any = None


_decode = msgspec.json.Decoder(_Message).decode


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call and its first request, already serialised."""

    index: int
    call: Call
    request: httpx.Request
    trace_id: str
    is_traced: bool
    num_choices: int


class HttpTarget:
    """A target that runs calls against a server, within one event loop. `clock_ns` is the clock of all stamps, and
    `backend` makes the connections."""

    def __init__(
        self,
        options: HttpOptions,
        workload: Workload,
        *,
        ask_timings: bool = False,
        clock_ns: Callable[[], int] = monotonic_ns,
        backend: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._options = options
        self._workload = workload
        self._must_fill = not workload.stop_on_eos  # ignore_eos
        self._ask_timings = ask_timings
        self._clock_ns = clock_ns
        self._backend = backend or StampedBackend(clock_ns)
        url = (options.url or "").rstrip("/")  # A target that sends nothing has no URL.
        self._url = url + ("/v1/chat/completions" if options.endpoint == "chat" else "/v1/completions")
        self._headers = options.headers()
        self._ssl_context = options.tls_context() if url.startswith("https") else None
        self.is_stopped = False  # Requests whose tasks are cancelled from now on count as abandoned by the client.
        self._clients: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []  # contains each client once for every further stream that it may take

    @property
    def num_connections(self) -> int:
        return self._backend.num_connections if isinstance(self._backend, StampedBackend) else 0

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    def prepare(self, index: int, call: Call) -> PreparedCall:
        """Serialise a request before the run, so that sending it takes no longer than necessary."""
        return self._prepared(index, call, _first_messages(call) if self._options.endpoint == "chat" else None)

    def _prepared(self, index: int, call: Call, messages: Sequence[Any] | None) -> PreparedCall:
        options = self._options
        body: dict[str, Any] = {
            "model": options.model,
            "max_tokens": call.max_tokens,
            "temperature": self._workload.temperature,
        }
        body |= {"prompt": call.prompt} if messages is None else {"messages": list(messages)}
        body["stream"] = options.stream
        if options.stream:
            body["stream_options"] = {"include_usage": True} | ({"include_timings": True} if self._ask_timings else {})
        if self._must_fill:
            body["ignore_eos"] = True
        own = {key: value for key, value in call.body.items() if key != "messages"}
        body |= own | json.loads(options.extra_body or "{}")
        trace_id = secrets.token_hex(16)
        # OpenTelemetry's ratio sampler compares the same half of the id, so both make the same decision.
        is_traced = int(trace_id[16:], 16) < options.trace_share * 2**64
        headers = self._headers | {"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-{is_traced:02x}"}
        request = httpx.Request("POST", self._url, headers=headers, content=msgspec.json.encode(body))
        return PreparedCall(index, call, request, trace_id, is_traced, _num_choices(body))

    async def run(self, prepared: PreparedCall, intended_ns: int) -> list[Sample]:
        """Send a call and return its sample, or a sample for each turn of a conversation. Errors of the server and of
        the network are recorded in the samples, not raised."""
        sample, answer = await self.exchange(prepared, intended_ns)
        samples = [sample]
        messages = _first_messages(prepared.call)
        for turn in prepared.call.next_turns:
            if not sample.is_ok:
                break
            messages += [{"role": "assistant", "content": answer}, *turn.messages]
            intended_ns = sample.end_ns + int(turn.pause_seconds * 1e9)
            following = self._prepared(prepared.index, replace(prepared.call, max_tokens=turn.max_tokens), messages)
            await asyncio.sleep((intended_ns - self._clock_ns()) / 1e9)
            sample, answer = await self.exchange(following, intended_ns)
            sample.turn = len(samples)
            samples.append(sample)
        return samples

    async def exchange(
        self, prepared: PreparedCall, intended_ns: int, limit_seconds: float | None = None
    ) -> tuple[Sample, str]:
        """Send one request, and return its sample and the text of its answer. `limit_seconds` takes the place of the
        time limit of the options. Errors are recorded in the sample, not raised."""
        sample = Sample(
            prepared.index,
            intended_ns,
            is_stream=self._options.stream,
            num_choices=prepared.num_choices,
            requested_tokens=prepared.call.max_tokens,
            must_fill=self._must_fill,
            trace_id=prepared.trace_id,
            is_traced=prepared.is_traced,
        )
        messages: list[tuple[int, bytes]] = []
        client = self._take_client()
        try:
            async with asyncio.timeout(limit_seconds or self._options.timeout_seconds):
                sample.sent_ns = self._clock_ns()
                response = await client.send(prepared.request, stream=True)
                try:
                    await self._read(response, sample, prepared.call, messages)
                finally:
                    await response.aclose()
        except asyncio.CancelledError:
            if not self.is_stopped:
                raise
            sample.is_abandoned = True
        except TimeoutError:
            sample.error = "timeout"
        except tuple(_ERROR_KINDS) as error:
            sample.error = next(kind for cls, kind in _ERROR_KINDS.items() if isinstance(error, cls))
        finally:
            self._free.append(client)
        if sample.error is not None or not sample.end_ns:
            sample.end_ns = self._clock_ns()
        return sample, _interpret(sample, messages)

    def _take_client(self) -> httpx.AsyncClient:
        if not self._free:
            # The transport has no limits of its own: `exchange` limits the time of the whole request.
            timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
            transport = StampedTransport(self._backend, self._ssl_context)
            client = httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False)
            self._clients.append(client)
            self._free += [client] * STREAMS_PER_CLIENT
        return self._free.pop()

    async def _read(
        self, response: httpx.Response, sample: Sample, call: Call, messages: list[tuple[int, bytes]]
    ) -> None:
        stream = response.extensions["network_stream"]
        sample.status = response.status_code
        sample.headers_ns = stream.read_ns
        sample.phases_ns = _server_timing(response.headers.get("server-timing", ""))
        if response.status_code != 200:
            sample.error = f"http_{response.status_code}"
            sample.error_message = _error_message(await _content(response))
        elif not self._options.stream:
            content = await _content(response)
            messages.append((stream.read_ns, content))
        elif not response.headers.get("content-type", "").startswith("text/event-stream"):
            sample.error = "not_a_stream"
            await _content(response)
        else:
            splitter = EventSplitter()
            async for part in response.aiter_raw():
                read_ns = stream.read_ns
                for event in splitter.feed(part):
                    messages.append((read_ns, event))
                if call.leave_after is not None and len(messages) >= call.leave_after:
                    sample.is_abandoned = True
                    break
                if call.is_slow:
                    await asyncio.sleep(SLOW_READ_SECONDS)
        sample.end_ns = stream.read_ns


_ERROR_KINDS: dict[type[Exception], str] = {  # the first class that matches decides
    httpcore.ConnectTimeout: "connect_timeout",
    httpcore.ConnectError: "connect",
    httpcore.NetworkError: "disconnected",
    httpcore.ProtocolError: "disconnected",
    httpcore.TimeoutException: "timeout",
    OSError: "disconnected",
}


async def _content(response: httpx.Response) -> bytes:
    """Return the body as it was sent. Decoding it could fail, and no encoding was requested."""
    return b"".join([part async for part in response.aiter_raw()])


def _num_choices(body: dict[str, Any]) -> int:
    """Return the number of choices of a request: `n` times its number of prompts."""
    prompt = body.get("prompt")
    n = body.get("n")
    num_prompts = len(prompt) if isinstance(prompt, list) and not any(isinstance(part, int) for part in prompt) else 1
    return max(1, num_prompts) * (n if isinstance(n, int) else 1)


def _error_message(content: bytes) -> str:
    """Return the message in the body of an error, as one line of at most 200 characters."""
    try:
        message = json.loads(content)
        while isinstance(message, dict) and ("error" in message or "message" in message):
            message = message.get("error") or message.get("message")
    except ValueError:
        message = content.decode(errors="replace")
    text = " ".join(str(message or "").split())
    return text if len(text) <= 200 else text[:200] + "..."


def _first_messages(call: Call) -> list[dict[str, Any]]:
    return list(call.body.get("messages", ())) or [{"role": "user", "content": call.prompt}]


def _server_timing(header: str) -> dict[str, int]:
    """Parse a Server-Timing header (name;dur=milliseconds, ...) into phases in nanoseconds."""
    return {name: round(float(ms) * 1e6) for name, ms in re.findall(r"([\w-]+);dur=(\d+\.?\d*)", header)}


def _interpret(sample: Sample, messages: list[tuple[int, bytes]]) -> str:
    """Fill in the sample from the messages of its answer, and return the text of the first choice, without reasoning
    and tool calls."""
    texts: list[str] = []
    finished: set[int] = set()
    is_complete = not sample.is_stream
    for read_ns, data in messages:
        if data == DONE:
            is_complete = True
            continue
        try:
            message = _decode(data)
        except msgspec.DecodeError:
            sample.error = sample.error or "malformed"
            break
        if message.error is not None:
            sample.error_message = _error_message(data)
            sample.error = "error_event"
            break
        for choice in message.choices or ():
            if choice.content or choice.is_parsed:
                _count_characters(sample, choice)
                sample.event_ns.append(read_ns)
                sample.event_choices.append(choice.index or 0)
                sample.is_parsed |= choice.is_parsed
            if not choice.index:
                texts.append(choice.content)
            if choice.finish_reason:
                finished.add(choice.index or 0)
        if message.usage is not None:
            details = message.usage.prompt_tokens_details
            sample.prompt_tokens = message.usage.prompt_tokens
            if details is not None and details.cached_tokens is not None:
                sample.cached_tokens = details.cached_tokens
                sample.cached_by = "usage"
            sample.completion_tokens = message.usage.completion_tokens
            if len(sample.event_ns) == 1 and sample.num_choices == 1 and message.choices:  # continuous_usage_stats
                sample.first_tokens = message.usage.completion_tokens
        _read_timings(sample, message.timings)
    if sample.is_parsed:  # the text of reasoning and tool calls is not read
        sample.num_characters = 0
    if not any(sample.event_choices):
        sample.event_choices = []
    is_complete = is_complete or len(finished) >= sample.num_choices
    if sample.error is None and not is_complete and not sample.is_abandoned:
        sample.error = "truncated"
    if sample.is_ok and not finished and not sample.event_ns and sample.completion_tokens is None:
        sample.error = "no_answer"
        sample.error_message = _error_message(messages[0][1]) if messages[0][1] != DONE else ""
    return "".join(texts)


def _count_characters(sample: Sample, choice: _Choice) -> None:
    """Count the characters of an event. Call this before the event itself is counted."""
    sample.num_characters += len(choice.content)
    if (choice.index or 0) not in sample.event_choices:
        sample.first_characters += len(choice.content)


def _read_timings(sample: Sample, timings: Any) -> None:
    """Read the `timings` of the last chunk: oaiserve's phases (`stream_options.include_timings`), or llama.cpp's number
    of cached tokens if the usage didn't report it."""
    if not isinstance(timings, dict):
        return
    phases = timings.get("phases_ns")
    if isinstance(phases, dict):
        sample.phases_ns |= {str(name): phase_ns for name, phase_ns in phases.items() if isinstance(phase_ns, int)}
    cached = timings.get("cache_n")
    if isinstance(cached, int) and not sample.cached_by:
        sample.cached_tokens = cached
        sample.cached_by = "timings"
