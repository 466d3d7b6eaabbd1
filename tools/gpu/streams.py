"""Measures streams over HTTP: a server with front ends, and clients that read as cheaply as they can."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tools.engine_load import percentile
from tools.gpu.sections import Target
from tools.gpu.workload import note_off, saved_model
from tools.server_process import running_oaiserve

WANTED = ("attention", "sampling", "fused_layers", "decode_graphs", "prompt_graphs", "mixed_graphs")


def run(target: Target) -> Iterator[dict[str, Any]]:
    count, num_tokens, front_ends = (4, 8, 1) if target.quick else (256, 256, 4)
    flags = ["--device", target.device.type, "--front-ends", str(front_ends), "--max-running", str(count)]
    flags += ["--max-connections-per-address", "0", "--log-level", "warning"]
    with (
        saved_model("gpt2-124m", target) as folder,
        running_oaiserve(*flags, model=folder, log_file=Path(folder) / "log", start_limit_seconds=100.0) as server,
    ):
        for _ in range(2):  # the first is the warm-up
            streams = asyncio.run(read_streams(server.url, count, num_tokens))
        if target.is_gpu:
            found = {s.labels["feature"]: s.value for s in samples(server.url) if s.name == "oaiserve_engine_feature"}
            note_off({name: "" if is_on else "of the server" for name, is_on in found.items()}, WANTED)
    began_ns, ended_ns = min(one.begun_ns for one in streams), max(one.read_ns[-1] for one in streams)
    gaps = [(later - earlier) / 1e6 for one in streams for earlier, later in pairwise(one.read_ns)]
    gaps = gaps or [0.0]  # each stream came in one read, as few tokens may
    yield {
        "streams": {
            "streams": count,
            "front_ends": front_ends,
            "tokens_each": num_tokens,
            "start_seconds": server.start_seconds,
            "output_tokens_per_second": count * num_tokens / (ended_ns - began_ns) * 1e9,
            "ttft_p99_ms": percentile([(one.read_ns[0] - one.begun_ns) / 1e6 for one in streams], 0.99),
            "read_gap_p50_ms": percentile(gaps, 0.5),
            "read_gap_p99_ms": percentile(gaps, 0.99),
        }
    }


def samples(url: str) -> list[Sample]:
    """Read the samples of a server's metrics."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


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
    request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    request += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)
    streams = [Stream(request, loop.create_future()) for _ in range(number)]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, address.hostname, address.port)  # type: ignore[misc]
    await asyncio.gather(*(stream.ended for stream in streams))
    return streams
