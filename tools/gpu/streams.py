"""Measures streams over HTTP: a server with front ends, and clients that read as cheaply as they can."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns
from typing import Any
from urllib.parse import urlsplit

import torch

from tests.models.decoders import byte_tokenizer, random_model, real_shape
from tools.engine_load import percentile
from tools.gpu.target import Target
from tools.server_process import running_oaiserve

MODEL = "gpt2-124m"
START_LIMIT_SECONDS = 100.0


def run(target: Target) -> Iterator[dict[str, Any]]:
    count, num_tokens, front_ends = (4, 8, 1) if target.quick else (256, 256, 4)
    config = real_shape(MODEL, tiny=target.quick)
    with tempfile.TemporaryDirectory() as folder:
        random_model(config, dtype=torch.bfloat16).save_pretrained(folder)
        byte_tokenizer(config.vocab_size).save_pretrained(folder)
        flags = ["--device", target.device.type, "--front-ends", str(front_ends), "--max-running", str(count)]
        flags += ["--max-connections-per-address", "0", "--log-level", "warning"]
        log_file = Path(folder) / "server.log"
        with running_oaiserve(
            *flags, model=folder, log_file=log_file, start_limit_seconds=START_LIMIT_SECONDS
        ) as server:
            for _ in range(2):  # the first is the warm-up
                streams = asyncio.run(read_streams(server.url, count, num_tokens))
            began = min(stream.begun_ns for stream in streams)
            seconds = (max(stream.read_ns[-1] for stream in streams) - began) / 1e9
            gaps = [
                (later - earlier) / 1e6
                for stream in streams
                for earlier, later in zip(stream.read_ns, stream.read_ns[1:], strict=False)
            ]
            gaps = gaps or [0.0]  # each stream came in one read, as few tokens may
            yield {
                "streams": {
                    "streams": count,
                    "front_ends": front_ends,
                    "tokens_each": num_tokens,
                    "start_seconds": server.start_seconds,
                    "output_tokens_per_second": count * num_tokens / seconds,
                    "ttft_p99_ms": percentile([(s.read_ns[0] - s.begun_ns) / 1e6 for s in streams], 0.99),
                    "read_gap_p50_ms": percentile(gaps, 0.5),
                    "read_gap_p99_ms": percentile(gaps, 0.99),
                }
            }


@dataclass
class Stream(asyncio.Protocol):
    """A client that counts what it reads, as cheaply as Python can."""

    request: bytes
    ended: asyncio.Future[None]
    begun_ns: int = 0
    read_ns: list[int] = field(default_factory=list)
    tail: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.begun_ns = monotonic_ns()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if b"data: {" in data:
            self.read_ns.append(monotonic_ns())
        self.tail = (self.tail + data)[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        assert b"[DONE]" in self.tail, f"a stream was cut: {self.tail!r}"
        self.ended.set_result(None)


async def read_streams(url: str, number: int, num_tokens: int) -> list[Stream]:
    """Read so many streams that begin at once."""
    address, loop = urlsplit(url), asyncio.get_running_loop()
    body = {"prompt": [1, 2, 3], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
    request = head + content
    streams = [Stream(request, loop.create_future()) for _ in range(number)]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, address.hostname, address.port)  # type: ignore[misc]
    await asyncio.gather(*(stream.ended for stream in streams))
    return streams
