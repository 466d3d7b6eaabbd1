"""A server without a model. It answers after set delays, so that the client can be measured by itself.

`python -m loadtest null-server` runs it. It speaks just enough HTTP/1.1 for a load test. The field `sent_ns` of each
event is the time of its write, on the monotonic clock that all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

from loadtest.errors import UsageError

MODEL = "null"


@dataclass(frozen=True, slots=True, kw_only=True)
class NullOptions:
    """The delays that the null server simulates."""

    first_seconds: float = 0.0
    """Time from a request to its first token."""

    gap_seconds: float = 0.0
    """Time between two events. 0: as fast as possible."""

    tokens_per_event: int = 1
    """Tokens in one event."""

    def __post_init__(self) -> None:
        if self.tokens_per_event < 1:
            raise UsageError(f"--tokens-per-event is {self.tokens_per_event}, but must be at least 1.")


class NullServer:
    def __init__(self, options: NullOptions) -> None:
        self._options = options
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._serve, host, port, limit=2**26, backlog=1024, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def serve_forever(self) -> None:
        assert self._server is not None
        await self._server.serve_forever()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                method, path, _ = head.split(b" ", 2)
                length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
                body = await reader.readexactly(int(length or 0))
                if method == b"post":
                    await self._answer(writer, json.loads(body), is_chat=path.endswith(b"/chat/completions"))
                elif path == b"/v1/models":
                    _write_json(writer, 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
                elif path in (b"/health", b"/ready"):
                    _write_json(writer, 200, {})
                else:
                    _write_json(writer, 404, {"error": {"message": "not found"}})
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has disconnected
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool) -> None:
        options = self._options
        start = asyncio.get_running_loop().time()
        num_tokens = int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)
        num_events = -(-num_tokens // options.tokens_per_event)
        prompt = body.get("prompt") or "".join(_text(message.get("content")) for message in body.get("messages", ()))
        prompt_tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": num_tokens}
        if not body.get("stream"):
            await _sleep_until(start + options.first_seconds + options.gap_seconds * (num_events - 1))
            text = " token" * num_tokens
            choice = {"index": 0, "finish_reason": "length"}
            choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            _write_json(writer, 200, {"choices": [choice], "usage": usage})
            return
        writer.write(_STREAM_HEAD)
        due = start + options.first_seconds
        for number in range(num_events):
            if due > start:
                await _sleep_until(due)
            due += options.gap_seconds
            text = " token" * min(options.tokens_per_event, num_tokens - number * options.tokens_per_event)
            writer.write(_chunk(_event(text, is_chat=is_chat)))
            await writer.drain()
        last = {"choices": [], "usage": usage}
        writer.write(_chunk(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n")


def _text(content: Any) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())


async def _sleep_until(due: float) -> None:
    await asyncio.sleep(due - asyncio.get_running_loop().time())


_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _event(text: str, *, is_chat: bool) -> bytes:
    content = b'"delta":{"content":"%b"}' if is_chat else b'"text":"%b"'
    choice = b'{"index":0,' + content % text.encode() + b',"logprobs":null,"finish_reason":null}'
    start = b'data: {"id":"cmpl-0","object":"text_completion","created":1,"model":"null","sent_ns":%d,"choices":['
    return start % monotonic_ns() + choice + b"]}\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _write_json(writer: asyncio.StreamWriter, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
