"""What telemetry costs, as a ratio of paired runs: python -m tools.overhead

Two servers of the demo model run side by side, one with all telemetry (metrics, spans to a collector, a JSON log line
per request), one with none; or it is one server with all of it, which is scraped 20 times a second or not. Both get the
same load in turns, and a pair of runs gives one ratio. Prints markdown: the mean ratio with its 95 % confidence
interval, and what each part of telemetry costs per request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from oaiserve.engine.step_account import EngineSnapshot
from oaiserve.record import EngineAccount, EventKind, Outcome, RequestRecord, WaitReason
from oaiserve.telemetry import logs
from oaiserve.telemetry.metrics import Metrics
from oaiserve.telemetry.recent import RecentRequests
from oaiserve.telemetry.recorder import Recorder
from oaiserve.telemetry.tracing import Tracing
from oaiserve.times import RequestTimes
from oaiserve.trace import TraceContext
from tools.figures import free_port

SCRAPES_PER_SECOND = 20  # as often as the Kubernetes endpoint picker polls


@dataclass(frozen=True)
class Load:
    name: str
    num_requests: int  # all at once
    prompt_tokens: int
    output_tokens: int


LOADS = {
    "streams": Load("64 streams of 64 tokens", 64, 64, 64),
    "burst": Load("256 requests of one token", 256, 32, 1),
}


@dataclass
class Run:
    tokens_per_second: float
    itl_p99_seconds: float


def main() -> None:
    if sys.argv[1:2] == ["serve-without"]:
        return serve_without_telemetry(sys.argv[2:])
    if sys.argv[1:2] == ["collect"]:
        return collect(int(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of runs for each load (default 10)")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--compare", nargs="*", default=["telemetry", "scrapes"], choices=["telemetry", "scrapes"])
    arguments = parser.parse_args()
    print_parts()
    print("\n| with and without | load | tokens/s, ratio | ITL p99, ratio | pairs | tokens/s without |")
    print("|---|---|---|---|---|---|")
    for compared in arguments.compare:
        with servers(compared) as (with_url, without_url):
            for name in arguments.loads:
                pairs = asyncio.run(measure(with_url, without_url, LOADS[name], arguments.pairs, compared == "scrapes"))
                speeds = [a.tokens_per_second / b.tokens_per_second for a, b in pairs]
                gaps = [a.itl_p99_seconds / b.itl_p99_seconds for a, b in pairs if b.itl_p99_seconds]
                without = statistics.median(b.tokens_per_second for _, b in pairs)
                print(
                    f"| {compared} | {LOADS[name].name} | {interval(speeds)} | {interval(gaps)} | {len(pairs)} "
                    f"| {without:.0f} |",
                    flush=True,
                )


def interval(ratios: list[float]) -> str:
    """The geometric mean, and where it lies with 95 % confidence."""
    if len(ratios) < 2:
        return ""
    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.4f} ({math.exp(mean - error):.4f} to {math.exp(mean + error):.4f})"


async def measure(with_url: str, without_url: str, load: Load, num_pairs: int, scrape: bool) -> list[tuple[Run, Run]]:
    pairs = []
    for number in range(num_pairs + 1):
        runs: dict[bool, Run] = {}
        for is_with in (True, False) if number % 2 else (False, True):
            url = with_url if is_with else without_url
            async with scraping(url if scrape and is_with else None):
                runs[is_with] = await run(url, load, seed=2 * number + is_with)  # no prompt twice: it would be cached
        if number > 0:  # the first pair is the warm-up
            pairs.append((runs[True], runs[False]))
    return pairs


async def run(url: str, load: Load, seed: int) -> Run:
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, 40_000) for _ in range(load.prompt_tokens)] for _ in range(load.num_requests)]
    gaps: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        started = time.perf_counter()
        await asyncio.gather(*(stream(client, prompt, load.output_tokens, gaps) for prompt in prompts))
        seconds = time.perf_counter() - started
    p99 = statistics.quantiles(gaps, n=100)[98] if len(gaps) > 1 else 0.0
    return Run(load.num_requests * load.output_tokens / seconds, p99)


async def stream(client: httpx.AsyncClient, prompt: list[int], num_tokens: int, gaps: list[float]) -> None:
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last: float | None = None
    received = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
            if '"usage":{' in line:
                received = json.loads(line[6:])["usage"]["completion_tokens"]
    assert received == num_tokens, f"{received} tokens instead of {num_tokens}"


@asynccontextmanager
async def scraping(url: str | None) -> AsyncIterator[None]:
    """By a process of its own, with the standard library: it shares our cores, and httpx takes three times as long."""
    if url is None:
        yield
        return
    program = (
        "import http.client, time\n"
        f"connection = http.client.HTTPConnection('{url.removeprefix('http://')}')\n"
        "while True:\n"
        "    before = time.monotonic()\n"
        "    connection.request('GET', '/metrics')\n"
        "    response = connection.getresponse()\n"
        "    assert response.status == 200 and response.read()\n"
        f"    time.sleep(max(0, {1 / SCRAPES_PER_SECOND} - (time.monotonic() - before)))\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    try:
        yield
    finally:
        assert process.returncode is None, "the scraper has failed"
        process.kill()
        await process.wait()


@contextmanager
def servers(compared: str) -> Iterator[tuple[str, str]]:
    """The URLs of the server with what is compared, and of the one without."""
    with child("-m", "tools.overhead", "collect", port=(collector_port := free_port())):
        otel = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector_port}"}
        with child("-m", "oaiserve", "serve", port=(port := free_port()), env=otel):
            wait_until_ready(url := f"http://127.0.0.1:{port}")
            if compared == "scrapes":
                yield url, url
                return
            with child("-m", "tools.overhead", "serve-without", "serve", port=(other_port := free_port())):
                wait_until_ready(other_url := f"http://127.0.0.1:{other_port}")
                yield url, other_url


@contextmanager
def child(*command: str, port: int, env: dict[str, str] | None = None) -> Iterator[None]:
    serve = ["demo", "--log-format", "json", "--port"] if command[-1] == "serve" else []
    with subprocess.Popen(
        [sys.executable, *command, *serve, str(port)], env=os.environ | (env or {}), stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.ConnectError:
            time.sleep(0.05)
    raise RuntimeError(f"{url} is not ready after two minutes")


def print_parts() -> None:
    """Microseconds of each part for a streamed request of 64 tokens, by itself on one thread."""
    record = a_record()
    with open(os.devnull, "w") as sink:
        logs.configure(form="json", stream=sink)
        metrics = Metrics(
            snapshot=EngineSnapshot,
            take_steps=list,
            model="demo",
            version="0",
            model_info={},
            vllm=True,
            epoch_offset_ns=0,
        )
        tracing = Tracing(InMemorySpanExporter(), epoch_offset_ns=0, version="0", count_spans=lambda *_: None)
        recorder, recent = Recorder({}, lambda _: None), RecentRequests(256, 0)
        rows = [
            ("event loop", "hand the record over", lambda: recorder.record(record)),
            ("telemetry thread", "metrics", lambda: metrics.observe(record)),
            ("telemetry thread", "spans", lambda: tracing.record(record)),
            ("telemetry thread", "log line", lambda: logs.log_request(record)),
            ("telemetry thread", "recent requests", lambda: recent.add(record)),
            ("engine thread", "its account", a_record),
        ]
        print("| thread | part | µs per request |\n|---|---|---|")
        for thread, part, call in rows:
            print(f"| {thread} | {part} | {microseconds(call):.1f} |", flush=True)
        metrics.observe(record)
        for form in ("text/plain", "application/openmetrics-text"):
            took = scrape_microseconds(metrics, record, form)
            print(f"| worker thread | a page after one more request, {form} | {took:.0f} |")
        recorder.close(60)
        tracing.close(5)
        logs.configure("warning")


def microseconds(call: Callable[[], object], number: int = 2000) -> float:
    return min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6


def scrape_microseconds(metrics: Metrics, record: RequestRecord, accept: str, number: int = 200) -> float:
    took = []
    for _ in range(number):
        metrics.observe(record)
        before = time.perf_counter()
        metrics.render(accept)
        took.append(time.perf_counter() - before)
    return statistics.median(took) * 1e6


def a_record(num_tokens: int = 64) -> RequestRecord:
    """A request as most are; making one takes about as long as the engine and the routes take for it."""
    account = EngineAccount(waits_ns={WaitReason.STEP_UNDER_WAY: 5_000_000}, num_choices=1, first_step=7)
    account.note(EventKind.PREFILL_CHUNK, 40_000_000, 0, start=0, tokens=64)
    account.note(EventKind.FIRST_TOKEN, 40_000_000, 0)
    for token in range(num_tokens - 1):
        account.inter_token_ns.append(20_000_000 + token)
    account.note(EventKind.FINISHED, 1_300_000_000, 0, reason="length")
    account.num_steps, account.model_ns = num_tokens, 1_200_000_000
    return RequestRecord(
        request_id="req-0123456789abcdef0123456789abcdef",
        trace=TraceContext.from_headers(None, None),
        times=RequestTimes(*(1_000, 400_000, 500_000, 1_500_000, 6_500_000, 40_000_000, 1_300_000_000, 1_300_400_000)),
        outcome=Outcome.FINISHED,
        operation="text_completion",
        http_method="POST",
        http_route="/v1/completions",
        http_status=200,
        model="demo",
        stream=True,
        prompt_tokens=64,
        completion_tokens=num_tokens,
        finish_reasons=("length",),
        params={"temperature": 0, "max_tokens": num_tokens},
        account=account,
    )


def serve_without_telemetry(arguments: list[str]) -> None:
    """The server as it would be if it told nothing about itself."""
    from oaiserve import app, cli, record

    class NoTelemetry:
        recent = live = None

        def __init__(self, **_: Any) -> None: ...
        def record(self, _: Any) -> None: ...
        def observe_event_loop_lag(self, _: float) -> None: ...
        def close(self, _: float) -> bool:
            return True

        def render(self, _: str | None) -> tuple[bytes, str]:
            return b"", "text/plain"

    app.Telemetry = NoTelemetry  # type: ignore[assignment,misc]
    record.EngineAccount.note = lambda *_, **__: None  # type: ignore[method-assign]
    cli.main(arguments)


def collect(port: int) -> None:
    """Takes whatever is exported to it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
